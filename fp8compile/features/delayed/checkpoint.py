"""The scaling state of a model in a checkpoint: of one process, or of all ranks.

DCP takes plain tensors with one name for replicas, and keeps those of one rank. The state of a rank is its
own. So all ranks gather their states, and the checkpoint has one item, "ranks", the same on all of them: the
states, each that is equal on several ranks once. Each rank that loads takes what it has saved.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import compat, process
from ...errors import StateError
from ...logs import get_logger
from ...runtime.named_weights import named_weights
from .arena import Arenas
from .state import refuse_or_warn
from .state_dict import VERSION, VERSION_KEY, prepare_load, scaling_state

logger = get_logger(__name__)

ITEM, FORMAT = "ranks", 1
LEAVE_OUT = "leave the scaling state out of the dict: then the run starts cold."
FIX = (
    "Load the models that were saved, with their parameters divided as they were, or without strict=True to "
    f"load what fits, or {LEAVE_OUT}"
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

    On as many ranks as saved it, each rank takes its own state, and continues bitwise. A parameter of which
    tensor parallelism gives the rank a part of another shape starts cold, with the warning. On another number
    of ranks the whole run starts cold, which a warning says."""

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
        own = {
            "slots": list(state),
            "lengths": [row.numel() for row in state.values()],
            "values": torch.cat([torch.empty(0), *state.values()]),
            "shapes": compat.fsdp.local_shapes(self._weights()),
        }
        known = compat.process_groups.gather(_bytes(own), self.group)
        different = list(dict.fromkeys(known))
        ranks, states = [different.index(one) for one in known], [_read(one) for one in different]
        self._made = _bytes({"format": FORMAT, "version": VERSION, "ranks": ranks, "states": states})
        return {ITEM: self._made}

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Take over a state that `state_dict` returned, of all ranks or of one; None: start cold."""
        if not isinstance(state_dict, Mapping) or ITEM not in state_dict:
            for change in self._changes(state_dict):
                change()
            return
        given = state_dict[ITEM]
        # DCP with allow_partial_load leaves what it was given
        if given is self._made and self.state_dict()[ITEM] == given:
            logger.warning("fp8: this checkpoint has no scaling state: the run starts cold")
            return
        error, changes = "", []
        try:
            changes = self._changes(self._own(_opened(given)))
        except StateError as problem:
            error = str(problem)
        said = compat.process_groups.gather(error, self.group)
        if error := next(filter(None, said), ""):
            ranks = [rank for rank, text in enumerate(said) if text == error]
            raise StateError(error if len(said) == 1 else f"on ranks {ranks}: {error}")
        for change in changes:
            change()

    def _own(self, saved: dict[str, Any]) -> dict[str, Tensor] | None:
        """What this rank has saved, as `state_dict` has it with `all_ranks=False`; None: start cold."""
        ranks, rank, size = saved["ranks"], 0, 1
        if compat.process_groups.has_groups():
            rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if len(ranks) != size:
            what = f"this scaling state is of another number of ranks ({len(ranks)}, here {size})"
            if self.strict:
                raise StateError(f"{what}. Load it on as many, or {LEAVE_OUT}")
            logger.warning("fp8: %s: the run starts cold", what)
            return None
        own = saved["states"][ranks[rank]]
        rows = dict(zip(own["slots"], own["values"].split(own["lengths"]), strict=True))
        here = compat.fsdp.local_shapes(self._weights())
        was = own.get("shapes", here)  # files of 0.3.0 have none
        different = []
        for name in dict.fromkeys(map(_owner, rows)):
            before, now = was.get(name, "all of it"), here.get(name, "all of it")
            if before != now:
                different.append(f"{name}: this rank had {before} when it was saved, and now has {now}")
                rows = {slot: row for slot, row in rows.items() if _owner(slot) != name}
        if different:
            refuse_or_warn(different, self.strict, FIX)
        return {VERSION_KEY: torch.tensor([saved["version"]]), **rows}

    def _changes(self, state: Mapping[str, Any] | None) -> list[Callable[[], None]]:
        """Check the state of one rank; each call of what is returned loads a model's part of it."""
        if len(self.models) == 1 or not isinstance(state, Mapping):
            return [prepare_load(model, state, self.strict) for model in self.models]
        known = self._weights()
        other = [slot for slot in state if slot != VERSION_KEY and _owner(slot) not in known]
        if other:
            refuse_or_warn([f"unexpected: {slot}" for slot in other], self.strict, FIX)
        return [prepare_load(model, _of(model, state), self.strict) for model in self.models]

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
    if saved["format"] != FORMAT:
        raise StateError(f"this scaling state has format {saved['format']}; {FORMAT} can be read here")
    return saved


def _owner(slot: str) -> str:
    """The name of a slot's parameter. `slot`: parameter, role and use, as in `scaling_state`."""
    return slot.rsplit(".", 2)[0]


def _of(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """What a state has for one of several models."""
    names = named_weights(model).keys()
    return {slot: row for slot, row in state.items() if slot == VERSION_KEY or _owner(slot) in names}
