"""How an optimizer's tensors are kept in few bytes: pure functions, in plain torch, that Inductor can fuse.

A tensor is cut into blocks of 128 elements, in its logical order; the last block is filled up with zeros. Each block has a
scale of its own, a power of two in float32. A power of two costs no precision, and makes packing exact the second time:
`unpack(pack(unpack(pack(x)))) == unpack(pack(x))`. So a checkpoint in float32 resumes bitwise.

| tensor                  | kept as                                     | bytes an element |
|-------------------------|---------------------------------------------|------------------|
| first moment (exp_avg)  | E4M3 and a scale a block                    | 1.03             |
| second moment (exp_avg_sq) | FP16 and a scale a block                 | 2.03             |
| float32 master weight   | what a bf16 weight lacks of it, as int16    | 2                |

The second moment needs FP16's range: it spreads twice as many decades as the gradient. In E4M3 whatever is below 4e-6 of its
block's largest becomes zero, and the step divides by it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128
FIRST, SECOND = torch.float8_e4m3fn, torch.float16


class Packed(NamedTuple):
    """`data` [blocks, 128] in E4M3 or FP16, and `scale` [blocks, 1] in float32: the values are data * scale."""

    data: Tensor
    scale: Tensor


def blocks(elements: int) -> int:
    """How many blocks hold so many elements."""
    return -(-elements // BLOCK)


def to_blocks(values: Tensor) -> Tensor:
    """Any shape -> [blocks, 128] of the same dtype; a view if that is possible."""
    flat = values.reshape(-1)
    return functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK) if flat.numel() % BLOCK else flat.view(-1, BLOCK)


def from_blocks(values: Tensor, shape: torch.Size) -> Tensor:
    """[blocks, 128] -> `shape`, a view."""
    return values.view(-1)[: shape.numel()].view(shape)


def empty(elements: int, dtype: torch.dtype, device: torch.device) -> Packed:
    """A packed tensor of zeros."""
    count = blocks(elements)
    return Packed(torch.zeros(count, BLOCK, dtype=dtype, device=device), torch.ones(count, 1, device=device))


def power_of_two_scale(amax: Tensor, largest: float) -> Tensor:
    """The smallest power of two s, but at least 2^-126, with amax / s <= largest. `amax` is float32, finite, not negative.

    In float32's bits: amax = (1 + f) 2^e and largest = (1 + F) 2^E give s = 2^(e - E), or its double where f > F."""
    mantissa, exponent = _mantissa_and_exponent(largest)
    biased = ((amax.view(torch.int32) + (0x7FFFFF - mantissa)) >> 23) - exponent
    return (biased.clamp(min=1) << 23).view(torch.float32)


def _mantissa_and_exponent(value: float) -> tuple[int, int]:
    exponent = 0
    while value >= 2:
        value, exponent = value / 2, exponent + 1
    return int((value - 1) * 2**23), exponent


def pack(values: Tensor, dtype: torch.dtype) -> Packed:
    """float32 [blocks, 128] -> its packed form, rounded to nearest. An infinity or NaN does not disturb its block; E4M3
    has no infinity and keeps it as NaN. In FP16 a positive value never becomes zero, because a step divides by it."""
    amax = torch.where(values.isfinite(), values.abs(), 0.0).amax(1, keepdim=True)
    scale = power_of_two_scale(amax, torch.finfo(dtype).max)
    scaled = values / scale
    if dtype == FIRST:  # devices differ in what an infinity becomes
        scaled = torch.where(scaled.isinf(), torch.nan, scaled)
    if dtype == SECOND:
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        scaled = torch.where(values > 0, scaled.clamp(min=smallest), scaled)
    return Packed(scaled.to(dtype), scale)


def unpack(data: Tensor, scale: Tensor) -> Tensor:
    """-> float32 [blocks, 128], exact."""
    return data.float() * scale


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """A bf16 weight and its int16 remainder -> the float32 master weight, exact. A weight that somebody else has set to zero is
    zero, whatever its remainder."""
    high = weight.view(torch.int16).to(torch.int32)
    low = torch.where((weight == 0) & (remainder < 0), 0, remainder.to(torch.int32))
    return ((high << 16) + low).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 master weight -> the nearest bf16 weight (halves away from zero), and the int16 remainder that `join` adds."""
    bits = torch.where(master.isnan(), torch.nan, master).view(torch.int32)  # any other NaN's bits could overflow below
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def follow(master: Tensor, weight: Tensor) -> Tensor:
    """The float32 master of a 16-bit weight: `master`, but where somebody else has changed the weight since, the weight.

    By the distance, at most half a unit in the last place: Inductor may leave out the rounding in `master.to(weight.dtype)`."""
    near, limits = weight.float(), torch.finfo(weight.dtype)
    half = near.abs() * (limits.eps / 2) + limits.tiny * limits.eps
    return torch.where((master - near).abs() <= half, master, near)
