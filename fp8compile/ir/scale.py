"""The arithmetic of a scale: one place, for the reference operators, the lowered graphs and the state.

    scale     = fp8_max / (amax * 2**margin)         multiplies into FP8
    scale_inv = 1 / scale                            divides back

A server divides by the inverse instead (`served_inverse_of`):

    scale_inv = max(amax, least) / fp8_max           values are divided by it

All are float32, computed in float64 and rounded once, so that eager and compiled code agree bitwise whatever
instructions a compiler picks for a float32 division.

The functions are written in plain torch with no data-dependent control flow: they run eagerly, on fake
tensors and as nodes of a graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny  # with finite inverses
EXPONENT, MANTISSA = 0x7F800000, 0x007FFFFF  # bits of a float32


def scale_of(amax: Tensor, fp8_max: float, margin: int, power_of_2: bool = False) -> Tensor:
    """The scale (float32, shape of `amax`) that brings it to `fp8_max / 2**margin`; 1 for 0, inf and NaN.

    With `power_of_2`, the largest power of two that is not above that scale: the mantissa is cut off, as
    TransformerEngine and torchao do. The inverse is the E8M0 scale of OCP Microscaling formats, rounded up.
    """
    # full_like, because torch computes number / tensor as number * reciprocal, which rounds twice
    scale = scale_to(amax, torch.full_like(amax, fp8_max / 2.0**margin, dtype=torch.float64))
    return to_power_of_2(scale) if power_of_2 else scale


def to_power_of_2(scale: Tensor) -> Tensor:
    """The largest power of two that is not above each scale, float32: its mantissa is cut off."""
    return (scale.view(torch.int32) & EXPONENT).view(torch.float32)


def scale_to(amax: Tensor, reach: Tensor) -> Tensor:
    """The scale that brings `amax` to `reach` (float64, of the same shape or one number)."""
    wide = amax.to(torch.float64)
    scale = (reach / wide).clamp(SMALLEST, LARGEST)
    usable = (wide > 0) & (wide < float("inf"))
    return torch.where(usable, scale, torch.ones_like(scale)).to(torch.float32)


def served_inverse_of(amax: Tensor, fp8_max: float, least: float, power_of_2: bool = False) -> Tensor:
    """The inverse of a scale as servers compute it, float32: `max(amax, least) / fp8_max`; 1 for inf and NaN.

    With `power_of_2`, the smallest power of two that is not below it (UE8M0).
    """
    wide = amax.to(torch.float64).clamp(min=least)
    inverse = (wide / torch.full_like(wide, fp8_max)).to(torch.float32)
    inverse = torch.where(wide < float("inf"), inverse, torch.ones_like(inverse))
    return (inverse.view(torch.int32) + MANTISSA & EXPONENT).view(torch.float32) if power_of_2 else inverse


def inverse_of(scale: Tensor) -> Tensor:
    """1 / scale, float32."""
    wide = scale.to(torch.float64)
    return (torch.ones_like(wide) / wide).to(torch.float32)
