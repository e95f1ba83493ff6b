"""An optimizer's states in few bytes, and as torch.optim.AdamW keeps them: its keys and shapes, float32.

A tensor is cut into blocks of 128 elements, in its logical order; the last block is filled up with zeros.
Each block has a scale of its own, a power of two in float32. A power of two costs no precision, and makes
packing exact the second time: `unpack(pack(unpack(pack(x)))) == unpack(pack(x))`. So a checkpoint in float32
resumes bitwise.

| tensor                  | kept as                                     | bytes an element |
|-------------------------|---------------------------------------------|------------------|
| first moment (exp_avg)  | E4M3 and a scale a block                    | 1.03             |
| second moment (exp_avg_sq) | FP16 and a scale a block                 | 2.03             |
| float32 master weight   | what a bf16 weight lacks of it, as int16    | 2                |

The second moment needs FP16's range: it spreads twice as many decades as the gradient. In E4M3 whatever is
below 4e-6 of its block's largest becomes zero, and the step divides by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

BLOCK = 128
FIRST, SECOND = torch.float8_e4m3fn, torch.float16
LARGEST = {FIRST: (0x600000, 8), SECOND: (0x7FE000, 15)}  # fraction, E: 1.75 * 2^8, (2 - 2^-10) * 2^15
SMALLEST = torch.finfo(SECOND).smallest_normal * torch.finfo(SECOND).eps
SMALL = 4096  # elements: below, packing saves nothing worth a kernel
MASTERS = (None, "bf16+remainder", "float32")
MASTER = "master_param"  # TransformerEngine's key for a float32 master weight
_MOMENTS = {"exp_avg": FIRST, "exp_avg_sq": SECOND}

State = dict[str, Any]


# -- formats: pure functions, in plain torch, that Inductor can fuse --


class Packed(NamedTuple):
    """The values are `data` [blocks, 128] in E4M3 or FP16, times `scale` [blocks, 1] in float32."""

    data: Tensor
    scale: Tensor


def to_blocks(values: Tensor) -> Tensor:
    """Any shape -> [blocks, 128] of the same dtype; a view if that is possible."""
    flat = values.reshape(-1)
    if rest := flat.numel() % BLOCK:
        flat = functional.pad(flat, (0, BLOCK - rest))
    return flat.view(-1, BLOCK)


def from_blocks(values: Tensor, shape: torch.Size) -> Tensor:
    """[blocks, 128] -> `shape`, a view."""
    return values.view(-1)[: shape.numel()].view(shape)


def power_of_two_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest power of two s >= 2^-126 with amax / s <= the dtype's largest; amax: finite float32 >= 0.

    In bits: amax = (1 + f) 2^e and largest = (1 + F) 2^E give s = 2^(e - E), or its double where f > F."""
    mantissa, exponent = LARGEST[dtype]
    biased = ((amax.view(torch.int32) + (0x7FFFFF - mantissa)) >> 23) - exponent
    return (biased.clamp(min=1) << 23).view(torch.float32)


def pack(values: Tensor, dtype: torch.dtype) -> Packed:
    """float32 [blocks, 128] -> its packed form, rounded to nearest. An infinity or NaN does not disturb its
    block; E4M3 has no infinity and keeps it as NaN. In FP16 a positive value never becomes zero, because a
    step divides by it."""
    amax = torch.where(values.isfinite(), values.abs(), 0.0).amax(1, keepdim=True)
    scale = power_of_two_scale(amax, dtype)
    scaled = values / scale
    if dtype == FIRST:  # devices differ in what an infinity becomes
        scaled = torch.where(scaled.isinf(), torch.nan, scaled)
    if dtype == SECOND:
        scaled = torch.where(values > 0, scaled.clamp(min=SMALLEST), scaled)
    return Packed(scaled.to(dtype), scale)


def unpack(data: Tensor, scale: Tensor) -> Tensor:
    """-> float32 [blocks, 128], exact."""
    return data.float() * scale


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """A bf16 weight and its int16 remainder -> the float32 master weight, exact. A weight that somebody else
    has set to zero is zero, whatever its remainder."""
    high = weight.view(torch.int16).to(torch.int32)
    low = torch.where((weight == 0) & (remainder < 0), 0, remainder.to(torch.int32))
    return ((high << 16) + low).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 master weight -> the nearest bf16 one (halves away from zero), and the int16 `join` adds."""
    bits = torch.where(master.isnan(), torch.nan, master).view(torch.int32)  # other NaNs may overflow below
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def follow(master: Tensor, weight: Tensor) -> Tensor:
    """The float32 master of a 16-bit weight: `master`, or the weight where somebody else has changed it.

    By the distance, at most half a unit in the last place: Inductor may leave out the rounding in
    `master.to(weight.dtype)`."""
    near, (half, least) = weight.float(), half_a_unit(weight.dtype)
    return torch.where((master - near).abs() <= near.abs() * half + least, master, near)


def half_a_unit(dtype: torch.dtype) -> tuple[float, float]:
    """Half a unit in the last place of x, at most: this times abs(x), and that much more."""
    limits = torch.finfo(dtype)
    return limits.eps / 2, limits.tiny * limits.eps


# -- the states of a parameter --


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is. Detached."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_small(parameter: Tensor) -> bool:
    """By the size of the whole parameter, so that all ranks agree."""
    return parameter.numel() < SMALL


def fresh(parameter: Tensor, master: str | None) -> State:
    """The state before a first step. Packed moments: [blocks, 128]; `step`: float32 on the CPU as torch's."""
    mine = local(parameter)
    state: State = {"step": torch.tensor(0.0, dtype=torch.float32)}
    for key, dtype in _MOMENTS.items():
        if is_small(parameter):
            state[key] = torch.zeros(mine.shape, dtype=torch.float32, device=mine.device)
        else:
            count = -(-mine.numel() // BLOCK)
            state[key] = torch.zeros(count, BLOCK, dtype=dtype, device=mine.device)
            state[f"{key}_scale"] = torch.ones(count, 1, device=mine.device)
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
    """What torch.optim.AdamW keeps: `step`, and float32 moments of the parameter's shape, DTensors if it is
    one. A master weight comes as `master_param`, which torch.optim.AdamW ignores."""
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
        if is_small(parameter):
            values = kept.clone()
        else:
            values = from_blocks(unpack(kept, state[f"{key}_scale"]), mine.shape)
        found[key] = like(values)
    if "remainder" in state:
        found[MASTER] = like(from_blocks(join(to_blocks(mine), state["remainder"]), mine.shape))
    elif "master" in state:
        kept = state["master"]
        found[MASTER] = like((kept if is_small(parameter) else from_blocks(kept, mine.shape)).clone())
    return found


def packed(parameter: Tensor, saved: Mapping[str, Any], master: str | None, name: str) -> State:
    """The state from what torch.optim.AdamW, or `vanilla`, has saved. ValueError, with the parameter's
    `name`, if it is anything else; nothing is changed."""
    missing = [key for key in ("step", *_MOMENTS) if key not in saved]
    if missing:
        keys = ", ".join(sorted(saved)) or "nothing"
        absent = " and no ".join(missing)
        raise ValueError(f"{name}: the checkpoint has no {absent} but {keys}: it is not of torch.optim.AdamW")
    if "max_exp_avg_sq" in saved:
        what = f"{name}: the checkpoint is of amsgrad=True"
        raise ValueError(f"{what}, which fp8compile.optim.AdamW does not do")
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
            fix = "load it by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            raise ValueError(f"{what} is a whole tensor in the checkpoint, the parameter is sharded: {fix}")
        if value.placements != parameter.placements or value.device_mesh != parameter.device_mesh:
            value = value.redistribute(parameter.device_mesh, parameter.placements)
    elif isinstance(value, DTensor):
        fix = "save it with full_state_dict=True"
        raise ValueError(f"{what} is sharded in the checkpoint, the parameter is not: {fix}")
    return local(value).to(local(parameter).device, torch.float32)
