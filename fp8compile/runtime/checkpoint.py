"""The scaling state of all ranks in a checkpoint of torch.distributed.checkpoint.

    state = {"model": model.state_dict(), "scaling": fp8compile.ScalingState(model)}
    dcp.save(state, checkpoint_id=path)

    state = {"model": model.state_dict(), "scaling": fp8compile.ScalingState(model)}
    dcp.load(state, checkpoint_id=path)                     # also before the first call, and on another number of ranks

DCP takes plain tensors with one name for replicas, and keeps those of one rank. The state of a rank is its own. So all ranks
gather their states, and the checkpoint has one item, "ranks", which is the same on all of them: the states, each that is equal
on several ranks once. Whoever loads reads them all and takes what is its own.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import compat
from ..errors import StateError
from ..ir import state_page
from ..ir.state_page import HISTORY, REACH
from ..logs import get_logger
from .state import named_weights, refuse_or_warn
from .state_dict import VERSION, VERSION_KEY, prepare_load, scaling_state

logger = get_logger(__name__)

ITEM, FORMAT = "ranks", 1
FIX = (
    "Load on ranks that divide the parameters as those that saved, or ScalingState(model) without strict=True to take what "
    "fits; without the scaling state in the dict, the run starts cold."
)


class ScalingState:
    """The scaling state of a model, or of the stages of a pipeline that this rank has, for `torch.distributed.checkpoint`.

    `process_group` is that of `dcp.save` and `dcp.load`; None: all ranks. All of its ranks take part in both, as in DCP.

    **On as many ranks** each rank takes its own state, and goes on to the bit.

    **On another number of ranks** each parameter takes over the histories of all ranks that had the same part of it, by the
    maximum of each amax. Under DDP and FSDP2 these are all ranks. No tensor overflows then that would not have on one of the
    ranks. A scale may be coarser than the rank's own would be, for as many steps as the history is long. With `reduce_amax`
    all ranks have one state, so that nothing changes.

    Where tensor parallel ranks have other parts than those that saved, and where names, policy or options differ, what fits is
    taken, and a warning lists the rest, as in `load_scaling_state`. With `strict=True` that is a StateError, on all ranks and
    before anything is changed.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        process_group: dist.ProcessGroup | None = None,
        strict: bool = False,
    ):
        self.models = [model] if isinstance(model, nn.Module) else list(model)
        self.group, self.strict = process_group, strict
        self._made: bytes | None = None
        self._weights()

    def state_dict(self) -> dict[str, bytes]:
        """The states of all ranks. DCP calls it to save, and to know what to load."""
        state: dict[str, Tensor] = {}
        for model in self.models:
            state |= scaling_state(model)
        del state[VERSION_KEY]
        values = torch.cat([torch.empty(0), *state.values()])
        owners = set(map(_owner, state))
        own = {
            "slots": list(state),
            "lengths": [row.numel() for row in state.values()],
            "values": values,
            "parts": compat.parts({name: weight for name, weight in self._weights().items() if name in owners}),
        }
        text = repr([own["slots"], own["lengths"], own["parts"]]).encode()
        known = self._gather(hashlib.sha256(text + values.numpy().tobytes()).hexdigest())
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what a checkpoint has."""
        given = state_dict[ITEM]
        if given is self._made:  # allow_partial_load
            logger.warning("fp8: this checkpoint has no scaling state: the run starts cold")
            return
        error, lacking, changes = "", set(), []
        try:
            saved = _opened(given)
            weights = self._weights()
            lacking = {name for state in saved["states"] for name in state["parts"]} - weights.keys()
            found, different = _chosen(saved, self._rank, self._size, compat.parts(weights))
            if different:
                refuse_or_warn(different, self.strict, FIX, type(self).__name__)
            version = {VERSION_KEY: torch.tensor([VERSION])}
            for model in self.models:
                names = named_weights(model).keys()
                own = {slot: row for slot, row in found.items() if _owner(slot) in names}
                changes.append(prepare_load(model, version | own, self.strict))
        except StateError as problem:
            error = str(problem)
        said = self._gather((error, lacking))
        errors: dict[str, list[int]] = {}
        for rank, (text, _) in enumerate(said):
            errors.setdefault(text, []).append(rank)
        nobody = set.intersection(*(names for _, names in said))
        if errors.keys() == {""} and nobody:
            unexpected = [f"unexpected: {name} (no rank has it)" for name in sorted(nobody)]
            refuse_or_warn(unexpected, self.strict, FIX, type(self).__name__)
        for text in filter(None, errors):
            raise StateError(text if len(said) == 1 else f"on ranks {errors[text]}: {text}")
        for change in changes:
            change()

    def _weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for weights in map(named_weights, self.models):
            twice = [name for name in weights if name in found]
            if twice:
                raise StateError(f"two of the modules have a {twice[0]!r}: give each a ScalingState and a key of its own")
            found |= weights
        return found

    @property
    def _size(self) -> int:
        return dist.get_world_size(self.group) if compat.has_groups() else 1

    @property
    def _rank(self) -> int:
        return dist.get_rank(self.group) if compat.has_groups() else 0

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
    if (saved["format"], saved["version"]) != (FORMAT, VERSION):
        have = f"format {saved['format']}, version {saved['version']}"
        raise StateError(f"a scaling state of format {FORMAT}, version {VERSION} can be read here; this checkpoint has {have}")
    return saved


def _owner(slot: str) -> str:
    """The name of the parameter that a slot belongs to. `slot`: parameter, role and use, as in `scaling_state`."""
    return slot.rsplit(".", 2)[0]


def _rows(state: dict[str, Any]) -> dict[str, Tensor]:
    """The slots of one rank by name."""
    return dict(zip(state["slots"], state["values"].split(state["lengths"]), strict=True))


def _chosen(saved: dict[str, Any], rank: int, size: int, parts: dict[str, str]) -> tuple[dict[str, Tensor], list[str]]:
    """The rows that a rank takes, by name of the slot, and what does not fit. `parts`: of its own parameters."""
    states, ranks = saved["states"], saved["ranks"]
    own = states[ranks[rank]] if len(ranks) == size else None
    held: dict[str, list[Tensor]] = {}
    others: dict[str, set[str]] = {}
    for state in states:
        for slot, row in _rows(state).items():
            name = _owner(slot)
            if name not in parts:
                continue
            if state["parts"][name] != parts[name]:
                others.setdefault(name, set()).add(state["parts"][name])
            elif own is None or state is own or own["parts"].get(name) != parts[name]:
                held.setdefault(slot, []).append(row)
    found, different = {}, []
    for slot, rows in held.items():
        if len({tuple([row.numel(), *row[REACH:HISTORY].tolist()]) for row in rows}) > 1:
            different.append(f"{slot}: the ranks that saved it had different options")
            continue
        row = state_page.merged(torch.stack([row[:-1] for row in rows]))
        found[slot] = torch.cat((row, torch.stack([row[-1:] for row in rows]).amax(0)))
    for name in sorted(others.keys() - set(map(_owner, held))):
        was = " or ".join(part or "all of it" for part in sorted(others[name]))
        different.append(f"{name}: the ranks that saved it had {was}; this one has {parts[name] or 'all of it'}")
    return found, different
