"""The products of FP8 values that the reference operators compute, in plain torch.

On a CPU operands are multiplied in float32. On a GPU float32 has no tensor cores (an H100 has 67 TFLOP/s, in
bf16 989), and takes 4 bytes an element. There operands are bf16 copies. bf16 has 8 significant bits and the
exponents of float32, so it holds every FP8 value exactly. Products of two are exact in float32, and only the
order of the sums differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config.recipe import WHOLE, Block

NARROW, WIDE = torch.bfloat16, torch.float32


def on_tensor_cores(x: Tensor) -> bool:
    return x.device.type == "cuda"


def spread(scale: Tensor, shape: Sequence, block: Sequence[int]) -> Tensor:
    """One scale a block as one an element of a copy of this `shape` (or a tensor that broadcasts to it). Of a
    stack, each matrix has its own."""
    if scale.dim() == 1:  # one for all
        return scale
    for dim, size in zip((-2, -1), block, strict=True):
        if size > 1:
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return scale


def multiplied(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a [M, K] @ b [N, K]^T in float32, on a CPU in `out`: every matmul of the reference. Operands are FP8,
    or what `scaled_values` returns."""
    if not on_tensor_cores(a):
        return torch.mm(a.to(WIDE), b.to(WIDE).t(), out=out)
    return torch.ops.aten.mm.dtype(a.to(NARROW), b.to(NARROW).t(), WIDE)


class ScaledProduct(NamedTuple):
    """The arguments of `product` and `block_product`: a [M, K] and b [N, K], FP8, row-major; the
    inverses of their scales, float32, one a block, [rows / block rows, columns / block columns] rounded up,
    or [1] for one scale; bias, [N] or None. The result is [M, N] of `out_dtype`."""

    a: Tensor
    b: Tensor
    a_inv: Tensor
    b_inv: Tensor
    bias: Tensor | None
    out_dtype: torch.dtype
    fast_accum: bool
    a_block: Block = WHOLE
    b_block: Block = WHOLE


def product(*given: Any) -> Tensor:
    """a @ b^T of FP8 values with float32 sums, times both inverses, plus bias, rounded once."""
    x = ScaledProduct(*given)
    return _finished(multiplied(x.a, x.b), [x.a_inv * x.b_inv], x.bias, x.out_dtype)


def block_product(*given: Any) -> Tensor:
    """a @ b^T of FP8 values, each times its block's scale_inv, with float32 sums, plus bias, rounded once.

    A scale_inv for a whole row multiplies the sum. One that changes along the contraction multiplies the
    values, which is exact in float32, and in bf16, if it is a power of two.
    """
    x, values, factors = ScaledProduct(*given), [], []
    operands = (x.a, x.a_inv, x.a_block, (-1, 1)), (x.b, x.b_inv, x.b_block, (-1,))
    for copy, inverse, block, shape in operands:
        whole = block[1] == 0
        values.append(copy if whole else scaled_values(copy, inverse, block))
        factors += [inverse.reshape(shape)] if whole else []
    return _finished(multiplied(*values), factors, x.bias, x.out_dtype)


def _finished(out: Tensor, factors: Sequence[Tensor], bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """A float32 product times factors, plus bias, rounded once. In place on a GPU: logits are gigabytes."""
    in_place = on_tensor_cores(out)
    for factor in factors:
        out = out.mul_(factor) if in_place else out * factor
    if bias is not None:
        out = out.add_(bias) if in_place else out + bias.to(WIDE)
    return out.to(out_dtype)


def scaled_values(copy: Tensor, inverse: Tensor, block: Sequence[int]) -> Tensor:
    """[R, K] FP8 values times one scale_inv a block: in float32, on a GPU in bf16.

    There, a scale_inv that is no power of two rounds each value to 8 significant bits: as much as a bf16
    result is rounded, and a sixteenth of what a cast to E4M3 rounds. Scales multiplied afterwards would be
    exact, but each block of the contraction would need a matmul of its own, and to add up [M, N] float32 in
    memory takes as long as to multiply in float32.
    """
    if not on_tensor_cores(copy):
        return copy.to(WIDE) * spread(inverse, copy.shape, block)
    return _in_place(copy, inverse, block)


def _in_place(copy: Tensor, inverse: Tensor, block: Sequence[int]) -> Tensor:
    """The same in bf16, multiplied in float32 and rounded once, without a float32 copy."""
    if inverse.dim() == 1:
        return _narrow(copy).mul_(inverse)
    (rows, columns), counts = copy.shape, inverse.shape
    high, wide = (size or whole for size, whole in zip(block, copy.shape, strict=True))
    missing = counts[1] * wide - columns, counts[0] * high - rows
    if any(missing):  # in one byte an element; FP8 zeros are zero bytes
        padded = torch.nn.functional.pad(copy.view(torch.uint8), (0, missing[0], 0, missing[1]))
        copy = padded.view(copy.dtype)
    values = _narrow(copy).view(counts[0], high, counts[1], wide).mul_(inverse.unsqueeze(1).unsqueeze(3))
    return values.view(counts[0] * high, -1).narrow(0, 0, rows).narrow(1, 0, columns)


def _narrow(copy: Tensor) -> Tensor:
    return copy.to(NARROW, memory_format=torch.contiguous_format)
