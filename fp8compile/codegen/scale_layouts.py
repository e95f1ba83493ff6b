"""How matmuls want the inverses of scales in memory, as plain torch functions.

An inverse is float32, one a block: [rows / block rows, columns / block columns], rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ir import ops
from .lowerings import row_major


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
    return stored(tiles, [tall * wide * 512]).view(torch.float8_e8m0fnu)


def columns_first(inverse: Tensor) -> Tensor:
    """[rows, blocks] -> [blocks, rows], in row-major order."""
    return stored(inverse.t(), [inverse.shape[1], inverse.shape[0]])


def rows_first(inverse: Tensor) -> Tensor:
    """[rows, blocks] in row-major order: a weight's transposed copy has its scales as a permuted view."""
    return stored(inverse, list(inverse.shape))


def of_blocks(inverse: Tensor, block: Sequence[int]) -> Tensor:
    """[rows, blocks] as cuBLASLt has them: of 1 x 128 blocks column by column, of 128 x 128 blocks row by row."""
    return columns_first(inverse).t() if block[0] == 1 else rows_first(inverse)


def of_rows(inverse: Tensor, copy: Tensor) -> Tensor:
    """One inverse a row of `copy`, [rows, 1], whether there is one or many."""
    return inverse.reshape(1, 1).expand(copy.shape[0], 1) if inverse.dim() == 1 else inverse


def stored(x: Tensor, shape: Sequence) -> Tensor:
    """x as `shape` in row-major order: as it is, or in memory of its own."""
    # a symbolic size must not be asked whether it is 1
    known = all(isinstance(size, int) for size in x.shape)
    if not (known and x.is_contiguous() and x.storage_offset() == 0):  # as_strided counts from where the storage begins
        x = copied(x)
    return row_major(x, shape)


def copied(x: Tensor) -> Tensor:
    """In memory of its own, row by row."""
    return x.clone(memory_format=torch.contiguous_format)
