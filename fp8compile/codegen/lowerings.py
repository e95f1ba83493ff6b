"""Our operators as plain torch functions for Inductor to fuse.

An amax is taken in two stages, rows first: Inductor puts the first stage into the producer's or the cast's
kernel, and the second stages of a graph are gathered into one reduction for all tensors with equally many
rows.

Matmuls are in `scaled_mm`; at the end of this file are the memory layouts in which they expect the inverses
of scales. An inverse is float32, one a block: [rows / block rows, columns / block columns], rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ir import merged, ops
from ..ir.fx_utils import aten, is_data
from ..ir.schemas import FP8Copy


def row_amax(x: Tensor) -> Tensor:
    """First stage: [R, C] -> [R] float32, [1] if x is empty, [R + 1] where R is data and may be 0. NaN
    propagates."""
    if is_data(x.shape[0]):
        return torch.nn.functional.pad(x.abs().to(torch.float32).amax(-1), (0, 1))
    if x.numel() == 0:
        return x.new_zeros(1, dtype=torch.float32)
    # float32 before the reduction, not after: the reduction can then write straight into the gathered vector
    return x.abs().to(torch.float32).amax(-1)


def last_amaxes(rows: list[Tensor]) -> Tensor:
    """Second stage of n tensors with equally many rows: n x [R] -> [n]."""
    return rows[0].amax(0, keepdim=True) if len(rows) == 1 else torch.cat(rows).view(len(rows), -1).amax(1)


def amax_blocks(x: Tensor, transposed: bool, block: Sequence[int], order: Tensor | None = None) -> Tensor:
    """The amax of each block of a copy, float32: `ops.amax_blocks`, along the tensor as it lies in memory."""
    if transposed and order is not None:
        x = ops.ordered(x, order)
    if x.numel() == 0:
        rows, columns = (x.shape[1], ops.padded_rows(x.shape[0])) if transposed else x.shape
        return x.new_zeros([ops.blocks(rows, block[0]), ops.blocks(columns, block[1])], dtype=torch.float32)
    sizes = (block[1], block[0]) if transposed else (block[0], block[1])  # along the rows and columns of x
    values = x.abs().to(torch.float32)
    counts = [ops.blocks(whole, size) for size, whole in zip(sizes, x.shape, strict=True)]
    sizes = tuple(size or whole for size, whole in zip(sizes, x.shape, strict=True))  # type: ignore[assignment]
    missing = [count * size - whole for count, size, whole in zip(counts, sizes, x.shape, strict=True)]
    if not all(isinstance(extra, int) and extra == 0 for extra in missing):
        values = torch.nn.functional.pad(values, (0, missing[1], 0, missing[0]))
    amax = values.view(counts[0], sizes[0], counts[1], sizes[1]).amax((1, 3))
    return amax.t().contiguous() if transposed else amax


def quantize(made: FP8Copy, dense: bool) -> Tensor:
    """[R, C] -> [R, C] or, `transposed`, [C, R padded to a multiple of 16]; row-major, in strides that
    Inductor has to keep if `dense`. Left to itself, Inductor would pad rows, which ATen's row-wise kernel for
    sm_89 does not expect, and would transpose the copy where the input is transposed, which no FP8 matmul
    takes. Not `dense` is for `joined`, which copies it."""
    x, scale, how = made.source, made.scale, (made.dtype, made.fp8_max, made.divide)
    if not made.transposed:
        copy = ops.cast(x, ops.spread(scale, x.shape, made.block), *how)
        return _dense(copy, *x.shape) if dense else copy
    padded_already = made.rows is not None
    x = ops.ordered(x, made.rows) if padded_already else x
    rows, columns = x.shape
    padded = rows if padded_already else ops.padded_rows(rows)
    if scale.dim() == 2:
        scale = ops.spread(scale, [columns, rows], made.block).t()
    copy = ops.cast(x, scale, *how).t()
    if not padded_already and not (isinstance(rows, int) and rows == padded):
        copy = torch.nn.functional.pad(copy.to(torch.float32), (0, padded - rows)).to(made.dtype)
    return _dense(copy, columns, padded) if dense else copy


def _dense(copy: Tensor, rows: int, columns: int) -> Tensor:
    """`copy` as [rows, columns] in memory of its own, without gaps."""
    return row_major(copied(copy), [rows, columns])  # a pad has other strides in a trace than in eager mode


def row_major(x: Tensor, shape: Sequence) -> Tensor:
    """x as `shape` in row-major order, which Inductor has to keep. x must begin its memory, and fill it."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return aten.as_strided.default(x, list(shape), strides, 0)


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """Copies side by side, row-major, in strides that Inductor has to keep. The writing kernel casts them."""
    whole = merged.joined(parts, dim)
    return row_major(whole, whole.shape)


def transposed(x: Tensor) -> Tensor:
    """`ops.transposed`, row-major, in strides for Inductor to keep: it knows none of a view as a dtype."""
    copy = ops.transposition(x)
    return row_major(copy, copy.shape)


def dequantize(data: Tensor, inv: Tensor, dtype: torch.dtype, block: Sequence[int] = (0, 0)) -> Tensor:
    """`ops.dequantize`; where 1 x N elements share a scale, without a copy of the scales for each element."""
    columns = data.shape[-1]
    lines = inv.dim() == 2 and block[0] == 1 and block[1] > 1
    if lines and isinstance(columns, int) and columns % block[1] == 0:
        parts = data.to(torch.float32).view(-1, columns // block[1], block[1]) * inv.unsqueeze(-1)
        return parts.view(-1, columns).to(dtype)
    return ops.values(data, inv, dtype, block)


# -- inverses of scales --


def swizzled(inverse: Tensor, rows: Any, tall: int) -> Tensor:
    """[rows / tall, K / 32] powers of two -> E8M0 in the order of cuBLASLt's 1D block scales, flat: tile by
    tile of 128 x 4 scales. In a tile, the scales of four rows that are 32 apart stand beside each other.
    Zeros fill up the last tiles. `tall`: the rows that share a scale, 1 or 32.

    A float32 power of two has a mantissa of zeros, and its exponent bits are its E8M0 bits (bias 127). In
    both formats the exponent bits of 2^-127, the smallest E8M0 number, are zero.
    """
    given, columns = inverse.shape
    high, wide = ops.blocks(rows, 128), ops.blocks(columns, 4)
    exponents = ((inverse.view(torch.int32) >> 23) & 255).to(torch.uint8)
    exponents = torch.nn.functional.pad(exponents, (0, 4 * wide - columns, 0, 128 // tall * high - given))
    tiles = exponents.view(high, 4, 32 // tall, wide, 4).expand(high, 4, 32, wide, 4).permute(0, 3, 2, 1, 4)
    return stored(tiles, [high * wide * 512]).view(torch.float8_e8m0fnu)


def aligned(inverse: Tensor) -> Tensor:
    """One number, at a multiple of 16 bytes: cuBLASLt refuses one that begins elsewhere (CUDA 13.0, H200)."""
    return inverse if inverse.storage_offset() % 4 == 0 else copied(inverse)


def columns_first(inverse: Tensor) -> Tensor:
    """[rows, blocks] -> [blocks, rows], in row-major order."""
    return stored(inverse.t(), [inverse.shape[1], inverse.shape[0]])


def rows_first(inverse: Tensor) -> Tensor:
    """[rows, blocks] in row-major order. (The scales of a weight's transposed copy are a permuted view.)"""
    return stored(inverse, list(inverse.shape))


def of_blocks(inverse: Tensor, block: Sequence[int]) -> Tensor:
    """[rows, blocks] in cuBLASLt's order: 1 x 128 blocks column by column, 128 x 128 blocks row by row."""
    return columns_first(inverse).t() if block[0] == 1 else rows_first(inverse)


def of_rows(inverse: Tensor, copy: Tensor) -> Tensor:
    """One inverse for each row of `copy`, [rows, 1], also where all rows share one."""
    return inverse.reshape(1, 1).expand(copy.shape[0], 1) if inverse.dim() == 1 else inverse


def stored(x: Tensor, shape: Sequence) -> Tensor:
    """x as `shape` in row-major order: x itself, or a copy where x may have gaps, another order or an
    offset."""
    # a symbolic size must not be asked whether it is 1
    known = all(isinstance(size, int) for size in x.shape)
    # as_strided counts from where the storage begins
    if not (known and x.is_contiguous() and x.storage_offset() == 0):
        x = copied(x)
    return row_major(x, shape)


def copied(x: Tensor) -> Tensor:
    """A copy of x in memory of its own, row by row."""
    return x.clone(memory_format=torch.contiguous_format)
