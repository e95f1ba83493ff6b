"""The oracle's casts: FP8 formats, scales, blocks that share a scale, and the product, written from their
definitions.

    scale = float32(min(FLT_MAX, fp8_max / (amax * 2**margin)))      scale_inv = float32(1 / scale)
    q(x)  = to_fp8(clamp(float32(x) * scale, -fp8_max, fp8_max)),    inf and NaN -> NaN

Nothing here is imported from fp8compile. See reference.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

FLT_MAX, FLT_MIN = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny  # the normal numbers
OCP = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)
FNUZ = (torch.float8_e4m3fnuz, 240.0), (torch.float8_e5m2fnuz, 57344.0)
# name -> ((dtype, max) of activations and weights, (dtype, max) of gradients)
FORMATS = {"hybrid": OCP, "e4m3": (OCP[0], OCP[0])}
FORMATS_FNUZ = {"hybrid": FNUZ, "e4m3": (FNUZ[0], FNUZ[0])}


def float32(value: float) -> float:
    """`value` rounded to float32, as a Python float."""
    return torch.tensor(value, dtype=torch.float64).to(torch.float32).item()


def amax_of(x: Tensor) -> float:
    """max|x| as float32: 0 for an empty tensor, NaN if x contains a NaN."""
    return x.detach().float().abs().max().item() if x.numel() else 0.0


def scales_of(amaxes: Tensor, fp8_max: float, margin: int = 0, rounded: bool = False) -> Tensor:
    """The scales (float32) of tensors or blocks with these amaxes: 1 for an amax of 0, inf or NaN.

    `rounded`: scales are rounded down to a power of two.
    """
    amaxes = amaxes.double()
    scales = (torch.full_like(amaxes, fp8_max) / (amaxes * 2.0**margin)).clamp(FLT_MIN, FLT_MAX).float()
    if rounded:  # frexp returns a fraction in [1/2, 1) and an exponent
        scales = torch.ldexp(torch.ones_like(scales), torch.frexp(scales).exponent - 1)
    return torch.where(amaxes.isfinite() & (amaxes > 0.0), scales, 1.0)


def scale_of(amax: float, fp8_max: float, margin: int = 0, rounded: bool = False) -> float:
    """`scales_of` for one amax."""
    return scales_of(torch.tensor(amax, dtype=torch.float64), fp8_max, margin, rounded).item()


def inverse(scale: float) -> float:
    """scale_inv: FP8 values times scale_inv are the values that they represent."""
    return float32(1.0 / scale)


def cast(x: Tensor, scale: float | Tensor, dtype: torch.dtype, fp8_max: float) -> Tensor:
    """FP8 values of x * scale: saturating, round to nearest even; inf and NaN become NaN."""
    x = x.detach().float()
    y = (x * torch.as_tensor(scale, dtype=torch.float32, device=x.device)).clamp(-fp8_max, fp8_max)
    return torch.where(x.isfinite(), y, torch.full_like(y, math.nan)).to(dtype)


def block_amaxes(x: Tensor, block: tuple[int, int]) -> Tensor:
    """The amax of each block of x [R, C]. Size 0 is the whole dimension; the last blocks may be smaller."""
    size = [each or whole for each, whole in zip(block, x.shape, strict=True)]
    return torch.nn.functional.max_pool2d(x.detach().float().abs()[None], size, ceil_mode=True)[0]


def elements(of_blocks: Tensor, x: Tensor, block: tuple[int, int]) -> Tensor:
    """Spreads one value a block to the elements of x [R, C]."""
    row, column = (torch.arange(whole) // (each or whole) for each, whole in zip(block, x.shape, strict=True))
    return of_blocks[row][:, column]


class Quantized(NamedTuple):
    """An FP8 copy [R, C], whose dimension C a matmul contracts, and the scale_inv of its blocks."""

    values: Tensor
    scale_inv: Tensor
    block: tuple[int, int]

    def exact(self) -> Tensor:
        """The values that the copy represents, in float64, which holds them exactly."""
        return self.values.double() * elements(self.scale_inv, self.values, self.block).double()


def quantize(
    x: Tensor,
    form: tuple[torch.dtype, float],
    block: tuple[int, int] = (0, 0),
    margin: int = 0,
    rounded: bool = False,
    scale: float | None = None,
) -> Quantized:
    """x [R, C] in FP8, with this scale, or else with scales from the amaxes of its blocks."""
    if scale is None:
        scales = scales_of(block_amaxes(x, block), form[1], margin, rounded)
    else:
        scales = torch.full((1, 1), scale, device=x.device)
    inverses = (1.0 / scales.double()).float()
    return Quantized(cast(x, elements(scales, x, block), *form), inverses, block)


def vllm_cast(x: Tensor, block: tuple[int, int] = (1, 128), rounded: bool = False) -> Quantized:
    """x [R, C] in E4M3 as vLLM casts inputs of a layer with scales of blocks, in float32: `ComputeGroupScale`
    and `QuantizeGroup` in its csrc/quantization/w8a8/fp8/per_token_group_quant.cu (main, 2026).

    `rounded`: SCALE_UE8M0. Unlike vLLM, whose maxima and minima drop NaN, what is not finite becomes NaN.
    """
    eps = torch.tensor(1e-10)
    amaxes = torch.maximum(block_amaxes(x, block), eps)
    inverses = amaxes / torch.full_like(amaxes, 448.0)
    if rounded:  # frexp returns a fraction in [1/2, 1) and an exponent
        fraction, exponent = torch.frexp(torch.maximum(inverses, eps))
        inverses = torch.ldexp(torch.ones_like(inverses), exponent - (fraction == 0.5).int())
    inverses = torch.where(amaxes.isfinite(), inverses, 1.0)
    x = x.detach().float()
    y = (x / elements(inverses, x, block)).clamp(-448.0, 448.0)
    return Quantized(torch.where(x.isfinite(), y, math.nan).to(OCP[0][0]), inverses, block)


def scaled_mm(a: Quantized, b: Quantized, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a[m, k] @ b[n, k]^T + bias of FP8 operands, rounded to float32 before the bias and to out_dtype at the
    end.

    The sum runs in float64, which holds every product and most sums exactly, so the oracle depends on no BLAS
    and no CPU.
    """
    out = (a.exact() @ b.exact().t()).float()
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)
