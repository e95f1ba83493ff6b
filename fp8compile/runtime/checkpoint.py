"""The scaling state of a model in a checkpoint: of one process, or of all ranks.

    scaling = fp8compile.ScalingState(model).state_dict()
    torch.save({"model": model.state_dict(), "scaling": scaling}, "checkpoint.pt")

    saved = torch.load("checkpoint.pt")
    model.load_state_dict(saved["model"])
    fp8compile.ScalingState(model).load_state_dict(saved["scaling"])  # before or after the model is compiled

    state = {"model": model.state_dict(), "scaling": fp8compile.ScalingState(model)}
    dcp.save(state, checkpoint_id=path)  # torch.distributed.checkpoint
    dcp.load(state, checkpoint_id=path)  # also before the first call, and on another number of ranks

DCP takes plain tensors with one name for replicas, and keeps those of one rank. The state of a rank is its
own. So all ranks gather their states, and the checkpoint has one item, "ranks", the same on all of them: the
states, each that is equal on several ranks once. Whoever loads reads them all, and takes what is its own.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import compat, process
from ..errors import StateError
from ..ir import state_page
from ..ir.state_page import ODD, REACH
from ..logs import get_logger
from .arena import Arenas
from .state import named_weights, refuse_or_warn
from .state_dict import SHORTEST, VERSION, VERSION_KEY, current, prepare_load, scaling_state

logger = get_logger(__name__)

ITEM, FORMAT = "ranks", 1
FIX = (
    "Load on ranks that divide the parameters as those that saved, or ScalingState(model) without "
    "strict=True to load what fits; without the scaling state in the dict, the run starts cold."
)


class ScalingState:
    """The delayed scaling state of a model, or of the stages of a pipeline that this rank has:
    ``state_dict()`` to save it, ``load_state_dict(saved)`` to load it. `torch.distributed.checkpoint` takes
    the object itself.

    Saving the state is optional. Without it, a resumed run starts cold, as in its first step. With it, a run
    continues as if it had not been stopped: bitwise, if everything else in the run is deterministic. Other
    recipes keep no state.

    A state may be loaded before or after the model is compiled and called, but after `fully_shard` and
    `parallelize_module`, which make new parameters. ``load_state_dict(None)`` starts every tensor cold.

    **What does not fit.** A state that was made with another policy, margin, recipe or other options fits in
    part, and so does that of another model. What fits is taken, adapted where possible (another margin,
    another history length); all other tensors start cold. One warning lists the differences. Before the first
    call only the parameters' names can be checked. The rest is checked when a graph is first called with the
    parameters. With `strict=True` a difference is a StateError (a ValueError), on all ranks and before
    anything is changed: here, or by the first call. What is no scaling state at all is one without it, too.

    **Several ranks.** Each rank has its own state, of the tensors that it has seen. ``state_dict()`` gathers
    those of `process_group` (None: all ranks), so all of them call it, as in DCP. With `all_ranks=False` it
    is that of this rank alone, as plain tensors, {"layers.0.up.weight.input.0": float32 vector, ...} and a
    version, and nothing is communicated. ``load_state_dict`` takes both.

    On as many ranks as saved it, each rank takes its own state, and continues bitwise. On another number of
    ranks each parameter takes over the histories of all ranks that had the same part of it, by the maximum of
    each amax. Under DDP and FSDP2 these are all ranks. No tensor overflows then that would not have on one of
    the ranks. A scale may be coarser than the rank's own would be, for as many steps as the history is long.
    With `reduce_amax` all ranks have one state, so that nothing changes. Tensor parallel ranks take what fits
    of ranks that had the same parts.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        process_group: dist.ProcessGroup | None = None,
        strict: bool = False,
        all_ranks: bool = True,
    ):
        self.models = [model] if isinstance(model, nn.Module) else list(model)
        self.group, self.strict, self.all_ranks = process_group, strict, all_ranks
        self._made: bytes | None = None
        self._weights()

    def state_dict(self) -> dict[str, Any]:
        """The state, for `load_state_dict`. DCP calls it to save, and to know what to load."""
        if self.all_ranks and self.group is None:
            process.of(Arenas).move()  # with `reduce_amax` a collective
        state: dict[str, Tensor] = {}
        for model in self.models:
            state |= scaling_state(model)
        if not self.all_ranks:
            return state
        del state[VERSION_KEY]
        values = torch.cat([torch.empty(0), *state.values()])
        owners = set(map(_owner, state))
        weights = {name: weight for name, weight in self._weights().items() if name in owners}
        own = {
            "slots": list(state),
            "lengths": [row.numel() for row in state.values()],
            "values": values,
            "parts": compat.shards.parts(weights),
        }
        text = repr([own["slots"], own["lengths"], own["parts"]]).encode()
        known = self._gather(hashlib.sha256(text + bytes(values.view(torch.uint8).tolist())).hexdigest())
        different = list(dict.fromkeys(known))
        if len(different) == 1:
            states = [own]
        else:
            first = known.index(known[self._rank]) == self._rank
            gathered = self._gather(_bytes(own) if first else b"")
            states = [_read(gathered[known.index(one)]) for one in different]
        ranks = [different.index(one) for one in known]
        self._made = _bytes({"format": FORMAT, "version": VERSION, "ranks": ranks, "states": states})
        return {ITEM: self._made}

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Take over a state that `state_dict` returned, of all ranks or of one; None: start cold."""
        if not isinstance(state_dict, Mapping) or ITEM not in state_dict:
            self._load_own(state_dict)
            return
        given = state_dict[ITEM]
        # DCP with allow_partial_load leaves what it was given
        if given is self._made and self.state_dict()[ITEM] == given:
            logger.warning("fp8: this checkpoint has no scaling state: the run starts cold")
            return
        error, lacking = "", set()
        changes: list[Callable[[], None]] = []
        try:
            saved = _opened(given)
            weights = self._weights()
            lacking = {name for state in saved["states"] for name in state["parts"]} - weights.keys()
            found, different = _chosen(saved, self._rank, self._size, compat.shards.parts(weights))
            if different:
                refuse_or_warn(different, self.strict, FIX)
            found[VERSION_KEY] = torch.tensor([VERSION])
            changes = [prepare_load(model, _of(model, found), self.strict) for model in self.models]
        except StateError as problem:
            error = str(problem)
        said = self._gather((error, lacking))
        errors: dict[str, list[int]] = {}
        for rank, (text, _) in enumerate(said):
            errors.setdefault(text, []).append(rank)
        nobody = set.intersection(*(names for _, names in said))
        if errors.keys() == {""} and nobody:
            unexpected = [f"unexpected: {name} (no rank has it)" for name in sorted(nobody)]
            refuse_or_warn(unexpected, self.strict, FIX)
        for text in filter(None, errors):
            raise StateError(text if len(said) == 1 else f"on ranks {errors[text]}: {text}")
        for change in changes:
            change()

    def _load_own(self, state: Mapping[str, Any] | None) -> None:
        """Take over the state of one rank."""
        if len(self.models) == 1 or not isinstance(state, Mapping):
            changes = [prepare_load(model, state, self.strict) for model in self.models]
        else:
            known = self._weights()
            slots = (slot for slot in state if slot != VERSION_KEY)
            unexpected = [f"unexpected: {slot}" for slot in slots if _owner(slot) not in known]
            if unexpected:
                refuse_or_warn(unexpected, self.strict, FIX)
            changes = [prepare_load(model, _of(model, state), self.strict) for model in self.models]
        for change in changes:
            change()

    def _weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for weights in map(named_weights, self.models):
            twice = [name for name in weights if name in found]
            if twice:
                raise StateError(
                    f"two of the modules have a {twice[0]!r}: give each a ScalingState and a key of its own"
                )
            found |= weights
        return found

    @property
    def _size(self) -> int:
        return dist.get_world_size(self.group) if compat.process_groups.has_groups() else 1

    @property
    def _rank(self) -> int:
        return dist.get_rank(self.group) if compat.process_groups.has_groups() else 0

    def _gather(self, mine: Any) -> list[Any]:
        if self._size == 1:
            return [mine]
        found: list[Any] = [None] * self._size
        dist.all_gather_object(found, mine, group=self.group)
        return found


def _bytes(x: Any) -> bytes:
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()


def _read(x: bytes) -> Any:
    return torch.load(io.BytesIO(x), map_location="cpu", weights_only=True)


def _opened(given: Any) -> dict[str, Any]:
    if not isinstance(given, bytes):
        raise StateError(f"this checkpoint has a {type(given).__name__} where ScalingState has put bytes")
    saved = _read(given)
    if saved["format"] != FORMAT or saved["version"] not in SHORTEST:
        known = f"format {FORMAT}, version {' or '.join(map(str, SHORTEST))}"
        have = f"format {saved['format']}, version {saved['version']}"
        raise StateError(f"a scaling state of {known} can be read here; this checkpoint has {have}")
    return saved


def _owner(slot: str) -> str:
    """The name of a slot's parameter. `slot`: parameter, role and use, as in `scaling_state`."""
    return slot.rsplit(".", 2)[0]


def _of(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """What a state has for one of several models."""
    names = named_weights(model).keys()
    return {slot: row for slot, row in state.items() if slot == VERSION_KEY or _owner(slot) in names}


def _rows(state: dict[str, Any], version: int) -> dict[str, Tensor]:
    """The slots of one rank by name."""
    rows = state["values"].split(state["lengths"])
    return {slot: current(row, version) for slot, row in zip(state["slots"], rows, strict=True)}


def _chosen(
    saved: dict[str, Any], rank: int, size: int, parts: dict[str, str]
) -> tuple[dict[str, Tensor], list[str]]:
    """The rows that a rank takes, by slot, and what does not fit. `parts`: those of its own parameters."""
    states, ranks = saved["states"], saved["ranks"]
    own = states[ranks[rank]] if len(ranks) == size else None
    held: dict[str, list[Tensor]] = {}
    others: dict[str, set[str]] = {}
    for state in states:
        for slot, row in _rows(state, saved["version"]).items():
            name = _owner(slot)
            if name not in parts:
                continue
            if state["parts"][name] != parts[name]:
                others.setdefault(name, set()).add(state["parts"][name])
            elif own is None or state is own or own["parts"].get(name) != parts[name]:
                held.setdefault(slot, []).append(row)
    found, different = {}, []
    for slot, rows in held.items():
        if len({tuple([row.numel(), *row[REACH:ODD].tolist()]) for row in rows}) > 1:
            different.append(f"{slot}: the ranks that saved it had different options")
            continue
        row = state_page.merged(torch.stack([row[:-1] for row in rows]))
        found[slot] = torch.cat((row, torch.stack([row[-1:] for row in rows]).amax(0)))
    for name in sorted(others.keys() - set(map(_owner, held))):
        was = " or ".join(part or "all of it" for part in sorted(others[name]))
        here = parts[name] or "all of it"
        different.append(f"{name}: the ranks that saved it had {was}; this one has {here}")
    return found, different
