"""An optimizer's packed states of one parameter, and what torch.optim.AdamW keeps instead: same keys, same shapes, float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .state_formats import FIRST, SECOND, empty, from_blocks, join, pack, split, to_blocks, unpack

SMALL = 4096  # elements: below, packing saves nothing worth a kernel
MASTERS = (None, "bf16+remainder", "float32")
MASTER = "master_param"  # TransformerEngine's key for a float32 master weight
_MOMENTS = {"exp_avg": FIRST, "exp_avg_sq": SECOND}

State = dict[str, Any]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is. Detached."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_small(parameter: Tensor) -> bool:
    """By the size of the whole parameter, so that all ranks agree."""
    return parameter.numel() < SMALL


def fresh(parameter: Tensor, master: str | None) -> State:
    """The state before the first step. Packed moments are [blocks, 128]; `step` is a float32 number on the CPU, as torch's."""
    mine = local(parameter)
    state: State = {"step": torch.tensor(0.0, dtype=torch.float32)}
    for key, dtype in _MOMENTS.items():
        if is_small(parameter):
            state[key] = torch.zeros(mine.shape, dtype=torch.float32, device=mine.device)
        else:
            state[key], state[f"{key}_scale"] = empty(mine.numel(), dtype, mine.device)
    return {**state, **_kept(parameter, master, mine.float())}


def _kept(parameter: Tensor, master: str | None, value: Tensor) -> State:
    """What is kept beside a 16-bit weight, so that the float32 `value` is known."""
    if master is None or parameter.element_size() >= 4:
        return {}
    if is_small(parameter):
        return {"master": value.clone()}
    if master == "float32":
        return {"master": to_blocks(value).clone()}
    return {"remainder": split(to_blocks(value))[1]}


def vanilla(parameter: Tensor, state: State) -> State:
    """What torch.optim.AdamW keeps: `step`, and float32 moments of the parameter's shape, DTensors if it is one. A master
    weight comes as `master_param`, which torch.optim.AdamW ignores."""
    mine = local(parameter)

    def like(values: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return values
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(values, mesh, placements, run_check=False, shape=shape, stride=stride)

    found: State = {"step": state["step"].clone()}
    for key in _MOMENTS:
        kept = state[key]
        values = kept.clone() if is_small(parameter) else from_blocks(unpack(kept, state[f"{key}_scale"]), mine.shape)
        found[key] = like(values)
    if "remainder" in state:
        found[MASTER] = like(from_blocks(join(to_blocks(mine), state["remainder"]), mine.shape))
    elif "master" in state:
        kept = state["master"]
        found[MASTER] = like((kept if is_small(parameter) else from_blocks(kept, mine.shape)).clone())
    return found


def packed(parameter: Tensor, saved: Mapping[str, Any], master: str | None, name: str) -> State:
    """The state from what torch.optim.AdamW, or `vanilla`, has saved. ValueError, with the parameter's `name`, if it is
    anything else; nothing is changed."""
    missing = [key for key in ("step", *_MOMENTS) if key not in saved]
    if missing:
        keys = ", ".join(sorted(saved)) or "nothing"
        raise ValueError(f"{name}: the checkpoint has no {' and no '.join(missing)} but {keys}: it is not of torch.optim.AdamW")
    if "max_exp_avg_sq" in saved:
        raise ValueError(f"{name}: the checkpoint is of amsgrad=True, which fp8compile.optim.AdamW does not do")
    step = saved["step"]
    state: State = {"step": torch.tensor(float(step), dtype=torch.float32)}
    for key, dtype in _MOMENTS.items():
        values = _like(parameter, saved[key], f"{name}: {key}")
        if is_small(parameter):
            state[key] = values.clone()
        else:
            state[key], state[f"{key}_scale"] = pack(to_blocks(values), dtype)
    known = saved.get(MASTER)
    value = local(parameter).float() if known is None else _like(parameter, known, f"{name}: {MASTER}")
    return {**state, **_kept(parameter, master, value)}


def _like(parameter: Tensor, value: Any, what: str) -> Tensor:
    """This rank's part of a saved tensor, in float32 on the parameter's device."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{what} is {found} in the checkpoint, the parameter is {list(parameter.shape)}")
    if isinstance(parameter, DTensor):
        if not isinstance(value, DTensor):
            how = "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            raise ValueError(f"{what} is a whole tensor in the checkpoint, the parameter is sharded: load it by {how}")
        if value.placements != parameter.placements or value.device_mesh != parameter.device_mesh:
            value = value.redistribute(parameter.device_mesh, parameter.placements)
    elif isinstance(value, DTensor):
        raise ValueError(f"{what} is sharded in the checkpoint, the parameter is not: save it with full_state_dict=True")
    mine = local(value).to(local(parameter).device, torch.float32)
    return mine


def sizes(state: State) -> int:
    """The bytes of a state's tensors."""
    return sum(x.nbytes for x in state.values() if isinstance(x, Tensor))

