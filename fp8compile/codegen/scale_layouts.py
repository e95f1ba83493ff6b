"""The memory layouts in which matmuls expect the inverses of scales, as plain torch functions.

An inverse is float32, one a block: [rows / block rows, columns / block columns], rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ir import ops
from .lowerings import row_major


def swizzled(inverse: Tensor, rows: Any, tall: int) -> Tensor:
    """[rows / tall, K / 32] powers of two -> E8M0 in the order of cuBLASLt's 1D block scales, flat: tile by tile of 128 x 4
    scales. In a tile, the scales of four rows that are 32 apart stand beside each other. Zeros fill up the last tiles. `tall`:
    the rows that share a scale, 1 or 32.

    A float32 power of two has a mantissa of zeros, and its exponent bits are its E8M0 bits (bias 127). In both formats the
    exponent bits of 2^-127, the smallest E8M0 number, are zero.
    """
    given, columns = inverse.shape
    high, wide = ops.blocks(rows, 128), ops.blocks(columns, 4)
    exponents = ((inverse.view(torch.int32) >> 23) & 255).to(torch.uint8)
    exponents = torch.nn.functional.pad(exponents, (0, 4 * wide - columns, 0, 128 // tall * high - given))
    tiles = exponents.view(high, 4, 32 // tall, wide, 4).expand(high, 4, 32, wide, 4).permute(0, 3, 2, 1, 4)
    return stored(tiles, [high * wide * 512]).view(torch.float8_e8m0fnu)


def columns_first(inverse: Tensor) -> Tensor:
    """[rows, blocks] -> [blocks, rows], in row-major order."""
    return stored(inverse.t(), [inverse.shape[1], inverse.shape[0]])


def rows_first(inverse: Tensor) -> Tensor:
    """[rows, blocks] in row-major order. (The scales of a weight's transposed copy are a permuted view.)"""
    return stored(inverse, list(inverse.shape))


def of_blocks(inverse: Tensor, block: Sequence[int]) -> Tensor:
    """[rows, blocks] in cuBLASLt's order: for 1 x 128 blocks column by column, for 128 x 128 blocks row by row."""
    return columns_first(inverse).t() if block[0] == 1 else rows_first(inverse)


def of_rows(inverse: Tensor, copy: Tensor) -> Tensor:
    """One inverse for each row of `copy`, [rows, 1], also where all rows share one."""
    return inverse.reshape(1, 1).expand(copy.shape[0], 1) if inverse.dim() == 1 else inverse


def stored(x: Tensor, shape: Sequence) -> Tensor:
    """x as `shape` in row-major order: x itself, or a copy where x may have gaps, another order or an offset."""
    # a symbolic size must not be asked whether it is 1
    known = all(isinstance(size, int) for size in x.shape)
    if not (known and x.is_contiguous() and x.storage_offset() == 0):  # as_strided counts from where the storage begins
        x = copied(x)
    return row_major(x, shape)


def copied(x: Tensor) -> Tensor:
    """A copy of x in memory of its own, row by row."""
    return x.clone(memory_format=torch.contiguous_format)
