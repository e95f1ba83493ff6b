"""Matmuls of operands with several scales, as plain torch functions for a graph on a GPU; `multiply.how` chooses among them.

In all: a [M, K] and b [N, K] FP8, row-major; the inverse of a scale, float32, one a block, [rows / block rows, columns / block
columns] rounded up, or [1] for one scale; bias [N] or None. The result is [M, N] of `out_dtype`.

cuBLASLt and CUTLASS add a bias in half precision only, in the result's dtype (`fusable`). Any other is added to a float32
product by whatever reads it, which Inductor fuses: the sum is rounded once.

`_scaled_mm` finds the kind of scaling from shapes and strides, so scales are written into memory of their own and seen through
`as_strided`, which Inductor keeps. `_scaled_mm_v2`, which is told the kind, is not used: Inductor's lowering of it passes its
scales on to the first one (2.13), in the wrong orientation, or refuses them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ir import ops
from .lowerings import row_major

aten = torch.ops.aten

MX_COLUMNS = 32  # elements that share an E8M0 scale


def fusable(bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Can the matmul itself add this bias (or has nothing to add)?"""
    return bias is None or bias.dtype == out_dtype and out_dtype != torch.float32


def product_dtype(bias: Tensor | None, out_dtype: torch.dtype) -> torch.dtype:
    """What the matmul itself returns."""
    return out_dtype if fusable(bias, out_dtype) else torch.float32


def scaled(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """`_scaled_mm` with scales as it wants them, and a bias of any dtype."""
    fused = bias if fusable(bias, out_dtype) else None
    made = product_dtype(bias, out_dtype)
    out = aten._scaled_mm.default(a, b.t(), a_scale, b_scale, fused, None, made, fast_accum)
    return out if fused is bias else finished(out, bias, out_dtype)


def finished(product: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """A float32 product plus a bias, rounded once."""
    return (product if bias is None else product + bias.to(torch.float32)).to(out_dtype)


def rowwise(
    a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """A scale a row of a and a row of b, or one for all: [M, 1] and [1, N] inside of the matmul."""
    a_scale = _stored(_rows(a_inv, a), [a.shape[0], 1])
    b_scale = _stored(_rows(b_inv, b), [1, b.shape[0]])
    return scaled(a, b, a_scale, b_scale, bias, out_dtype, fast_accum)


def rowwise_after(
    a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """The same with the scales multiplied by whatever reads the float32 product: of numbers up to 448 * 448 * K."""
    one = torch.ones(1, 1, dtype=torch.float32, device=a.device)
    product = aten._scaled_mm.default(a, b.t(), one, one, None, None, torch.float32, fast_accum)
    return finished(product * _rows(a_inv, a).reshape(-1, 1) * _rows(b_inv, b).reshape(1, -1), bias, out_dtype)


def blockwise(
    a: Tensor,
    b: Tensor,
    a_inv: Tensor,
    b_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    a_block: Sequence[int],
    b_block: Sequence[int],
) -> Tensor:
    """Blocks of 1 x 128 and 128 x 128 by cuBLASLt. Sums of 128 products are always promoted to float32 there.

    a's scales are [M, K / 128], column by column in memory, or [M / 128, K / 128], row by row; b's the transposes of such.
    """
    a_scale = _block_scale(a_inv, a_block)
    b_scale = _block_scale(b_inv, b_block).t()
    return scaled(a, b, a_scale, b_scale, bias, out_dtype, False)


def mx(a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Blocks of 1 x 32 by the tensor cores of Blackwell. Their K is a multiple of 32: if K may be none, copies are padded."""
    a, b = _padded(a), _padded(b)
    return scaled(a, b, swizzled(a_inv), swizzled(b_inv), bias, out_dtype, False)


def emulated(
    a: Tensor,
    b: Tensor,
    a_inv: Tensor,
    b_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    a_block: Sequence[int],
    b_block: Sequence[int],
) -> Tensor:
    """A bf16 matmul with float32 sums of the values that the operands stand for. What is one scale a row comes after it."""
    x, x_rows = dequantized(a, a_inv, a_block)
    y, y_rows = dequantized(b, b_inv, b_block)
    if x_rows is None and y_rows is None and bias is None and out_dtype == torch.bfloat16:
        return torch.mm(x, y.t())
    product = aten.mm.dtype(x, y.t(), torch.float32)
    if x_rows is not None:
        product = product * x_rows.reshape(-1, 1)
    if y_rows is not None:
        product = product * y_rows.reshape(1, -1)
    return finished(product, bias, out_dtype)


def dequantized(copy: Tensor, inverse: Tensor, block: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """The values of an operand in bf16, and what its rows are to be multiplied with yet (None: nothing).

    Exact where the inverses are powers of two: an FP8 number has 4 significant bits at most, bf16 has 8, and as many exponents
    as float32.
    """
    if block[1] == 0:
        return copy.to(torch.bfloat16), inverse
    return (copy.to(torch.float32) * ops.spread(inverse, copy.shape, block)).to(torch.bfloat16), None


def swizzled(inverse: Tensor) -> Tensor:
    """[rows, K / 32] powers of two -> E8M0 in the order of cuBLASLt's 1D block scales, flat: 128 x 4 scales at a time, four
    rows that are 32 apart beside each other. Rounded up to whole tiles, with zeros.

    A float32 power of two is its exponent's bits alone, which are E8M0's (bias 127); 2^-127, the least, is zero in both.
    """
    rows, columns = inverse.shape
    tall, wide = ops.blocks(rows, 128), ops.blocks(columns, 4)
    exponents = ((inverse.view(torch.int32) >> 23) & 255).to(torch.uint8)
    exponents = torch.nn.functional.pad(exponents, (0, 4 * wide - columns, 0, 128 * tall - rows))
    tiles = exponents.view(tall, 4, 32, wide, 4).permute(0, 3, 2, 1, 4)
    return _stored(tiles, [tall * wide * 512]).view(torch.float8_e8m0fnu)


def columns_first(inverse: Tensor) -> Tensor:
    """[rows, blocks] -> [blocks, rows], in row-major order."""
    return _stored(inverse.t(), [inverse.shape[1], inverse.shape[0]])


def rows_first(inverse: Tensor) -> Tensor:
    """[rows, blocks] in row-major order: a weight's transposed copy has its scales as a permuted view."""
    return _stored(inverse, list(inverse.shape))


def copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _block_scale(inverse: Tensor, block: Sequence[int]) -> Tensor:
    return columns_first(inverse).t() if block[0] == 1 else rows_first(inverse)


def _rows(inverse: Tensor, copy: Tensor) -> Tensor:
    """One inverse a row, [rows, 1], whether there is one or many."""
    return inverse.reshape(1, 1).expand(copy.shape[0], 1) if inverse.dim() == 1 else inverse


def _stored(x: Tensor, shape: Sequence) -> Tensor:
    """x as `shape` in row-major order: as it is, or in memory of its own."""
    # a symbolic size must not be asked whether it is 1
    known = all(isinstance(size, int) for size in x.shape)
    if not (known and x.is_contiguous() and x.storage_offset() == 0):  # as_strided counts from where the storage begins
        x = x.clone(memory_format=torch.contiguous_format)
    return row_major(x, shape)


def _padded(copy: Tensor) -> Tensor:
    """[rows, K] with zeros up to a multiple of 32 columns."""
    rows, columns = copy.shape
    if isinstance(columns, int) and columns % MX_COLUMNS == 0:
        return copy
    whole = ops.blocks(columns, MX_COLUMNS) * MX_COLUMNS
    return _stored(torch.nn.functional.pad(copy.view(torch.uint8), (0, whole - columns)), [rows, whole]).view(copy.dtype)
