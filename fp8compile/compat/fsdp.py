"""What FSDP2 (`fully_shard`) manages. The parameters of a module are the sharded ones. Its forward, and so a compiled graph,
reads the unsharded ones. These are other objects. They stay the same for the whole run; their memory is freed in between."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any


def resharded(inputs: Sequence[Any]) -> frozenset[int]:
    """Which of a graph's inputs are parameters that FSDP2 frees after forward and gathers again in backward, by position."""
    freed = {id(_unsharded(p)) for group in _groups() if group.post_forward_mesh_info is not None for p in group.fsdp_params}
    return frozenset(i for i, value in enumerate(inputs) if value is not None and id(value) in freed)


def sharded_pairs() -> Iterator[tuple[Any, Any]]:
    """Each parameter that FSDP2 has sharded, with the unsharded one that graphs read, once it exists."""
    for group in _groups():
        for parameter in group.fsdp_params:
            if (read := _unsharded(parameter)) is not None:
                yield parameter.sharded_param, read


def specs_before_sharding() -> dict[int, Any]:
    """By the id of each parameter that FSDP2 has sharded: how it was distributed before, None if it was a plain tensor."""
    found = {}
    for group in _groups():
        for parameter in group.fsdp_params:  # _tp_spec up to 2.11, where a plain tensor has none
            spec = getattr(parameter, "_unsharded_dtensor_spec", None) or getattr(parameter, "_tp_spec", None)
            found[id(parameter.sharded_param)] = spec
    return found


def _unsharded(parameter: Any) -> Any:
    return getattr(parameter, "_unsharded_param", None)  # None before the first forward


def _groups() -> Iterator[Any]:
    """The groups of parameters of all modules that were sharded in this process."""
    states = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if states is None:  # FSDP2 was not imported
        return
    from torch.distributed._composable_state import _module_state_mapping

    found = {id(state): state for _, reference in list(_module_state_mapping.items()) if (state := reference()) is not None}
    for state in found.values():
        if isinstance(state, states.FSDPState):
            groups = getattr(state, "_fsdp_param_groups", None)  # up to 2.11 there is one group or none
            yield from [state._fsdp_param_group] * (state._fsdp_param_group is not None) if groups is None else groups
