"""The form of an FP8 matmul whose operands have several scales, by device: known before anything is compiled.
`scaled_mm` implements the forms.

    rowwise        `_scaled_mm` with a scale a row of a and a row of b: cuBLASLt on Hopper, CUTLASS elsewhere,
                   hipBLASLt on AMD
    rowwise after  `_scaled_mm` with scales of 1 and a float32 result, whose rows and columns are multiplied
                   afterwards: where `rowwise` lacks the output's dtype, or is slow
    blockwise      `_scaled_mm` with 1 x 128 and 128 x 128 blocks: cuBLASLt on Hopper
    triton         the same blocks by a kernel of our own (`block_gemm`): any device with FP8, any sizes
    mx             `_scaled_mm` with 1 x 32 blocks and E8M0 scales: the tensor cores of Blackwell. The scale
                   of a 32 x 32 block is repeated for its rows
    emulated       a bf16 matmul of the values that the FP8 operands stand for; exact products, since FP8
                   times a power of two is a bf16 number, but none of FP8's speed
    reference      float32 on a CPU: development and tests

`how` chooses; `devices.architectures` says what the hardware has. The documentation of cuBLASLt lists its
demands in the section on scaling factors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from .. import compat
from ..config.recipe import ROW, WHOLE, Block
from ..devices import support
from ..devices.gpu import Gpu

ROWWISE, AFTER, BLOCKWISE = "rowwise", "rowwise after", "blockwise"
TRITON, MX, EMULATED = "triton", "mx", "emulated"
TENSORWISE, REFERENCE = "tensorwise", "reference"
GROUPED = "grouped"

LINE, SQUARE, MX_BLOCK, MX_TILE = Block(1, 128), Block(128, 128), Block(1, 32), Block(32, 32)
BLOCKS, MX_BLOCKS = (LINE, SQUARE), (MX_BLOCK, MX_TILE)


def how(
    gpu: Gpu | None,
    a_block: Sequence[int],
    b_block: Sequence[int],
    m: Any,
    n: Any,
    k: Any,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
    launches: bool = True,
) -> str:
    """The form of `out[m, n] = a[m, k] @ b[n, k]^T`, one of those above.

    `gpu`: None for a CPU. `a_block` and `b_block` are (rows, columns) that share a scale, as in
    `recipe.Block`; at least one is not (0, 0). Sizes are ints, or SymInts where only a run knows them.
    `launches`: whether kernels of our own may be launched in this graph.
    """
    if gpu is None:
        return REFERENCE
    a, b = Block(*a_block), Block(*b_block)
    if {a, b} <= {ROW, WHOLE}:
        return _rowwise(gpu, out_dtype, fast_accum)
    if a in MX_BLOCKS and b in MX_BLOCKS:
        return MX if support.has_mx(gpu) else EMULATED
    if a in BLOCKS and b in BLOCKS:
        if support.has_blocks(gpu) and _cublas_blocks(a, b, m, n, k):
            return BLOCKWISE
        return TRITON if launches else EMULATED
    return EMULATED


def how_grouped(
    gpu: Gpu | None, a_block: Sequence[int], b_block: Sequence[int], launches: bool = True
) -> str:
    """The form of a matmul of groups: GROUPED, TRITON, EMULATED or, on a CPU, REFERENCE."""
    if gpu is None:
        return REFERENCE
    a, b = Block(*a_block), Block(*b_block)
    rows = {a, b} <= {ROW, WHOLE}
    if rows and gpu.architecture.grouped:
        return GROUPED
    fits = rows or a == LINE and b in BLOCKS or a == MX_BLOCK and b in MX_BLOCKS
    return TRITON if fits and launches else EMULATED


def _rowwise(gpu: Gpu, out_dtype: torch.dtype, fast_accum: bool) -> str:
    """ROWWISE: the matmul multiplies the scales; AFTER: the scales are multiplied after it."""
    architecture = gpu.architecture
    if architecture.row_dtypes is not None:
        return ROWWISE if str(out_dtype).removeprefix("torch.") in architecture.row_dtypes else AFTER
    if support.has_blocks(gpu):
        return ROWWISE
    if sys.platform == "win32":  # CUTLASS's kernels are not built there
        return AFTER
    # its row-wise kernel promotes sums slowly; torchao scales afterwards, too
    if architecture.slow_rows and not fast_accum:
        return AFTER
    return AFTER if out_dtype == torch.float32 and not compat.versions.rowwise_returns_float32() else ROWWISE


def _cublas_blocks(a: Block, b: Block, m: Any, n: Any, k: Any) -> bool:
    """True if cuBLASLt takes the sizes and blocks by `_scaled_mm`. (Sizes that only a run knows may not fit.)

    cuBLASLt has no product of 128 x 128 blocks with 128 x 128 blocks. It expects the scales of a row of 128 x
    128 blocks to be stored as a multiple of four. `_scaled_mm` neither checks this nor pads the scales
    (pytorch#166752: wrong results), so the number of blocks in a row has to be a multiple of four. Each
    column of the scales of 1 x 128 blocks begins at a multiple of 16 bytes, and rows are tested in multiples
    of 16 only.
    """
    if not all(isinstance(size, int) for size in (m, n, k)) or a == b == SQUARE:
        return False
    return k % (128 if a == b else 512) == 0 and m % 16 == 0 and n % 16 == 0
