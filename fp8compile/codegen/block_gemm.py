"""The launch of `triton_kernels.fp8_gemm`, an FP8 matmul with a scale for each 128 elements of a sum.

    for each 128 of K:   acc += (a[:, k] @ b[:, k]^T) * a_inv[row, k] * b_inv[col, k]

It runs where cuBLASLt has no such matmul (`scaled_mm_kind.how`): on any GPU but Hopper, and for sizes that
are unknown or uneven. wgrad contracts over tokens, so its K is a multiple of 16, but often not of 128. The
tensor cores sum 128 products at a time, and the kernel adds up these sums in float32. DeepSeek-V3
(arXiv:2412.19437, section 3.3.2) does the same, because the short accumulators of FP8 are not exact enough
for long sums.

The blocks of an operand are 1 x 128 or 128 x 128. A tile has at most 128 rows and columns, so with 128 x 128
blocks it needs one number a step. With 1 x 128 blocks it needs a number for each of its rows. These scales
are first copied to [K / 128, rows], so that neighbours are read together.

Programs walk the result in groups of rows of tiles, so that programs that run together share operands in the
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from .. import compat
from ..devices.gpu import Gpu
from ..ir.fx_utils import Emitter, value
from . import launch
from .indexing import quotient, size_of
from .lowerings import columns_first, copied, rows_first

# (BLOCK_R, BLOCK_C, warps, stages), the default first. A stage takes 128 bytes of shared memory for each row
# and each column of the tile. With 1 x 128 blocks of b, a thread holds a scale for each of its columns: those
# tiles are small, so nothing spills.
TILES = ((128, 128, 8, 3), (64, 128, 4, 4), (128, 64, 8, 4))
COLUMN_TILES = ((64, 128, 4, 4), (128, 64, 8, 4))
SMALL_TILES = ((128, 128, 8, 3), (64, 128, 4, 3), (64, 64, 4, 4))  # for 99 KB of shared memory
AMD_TILES = ((128, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 2))
AMD_COLUMN_TILES = ((64, 64, 4, 2), (64, 128, 4, 2))

Tile = tuple[int, int, int, int]


def configurations(gpu: Gpu | None, shared: int, b_block: Sequence[int]) -> tuple[Tile, ...]:
    """The tiles to choose from at the first launch, default first. `shared`: bytes that a block can share."""
    columns = b_block[0] == 1
    if gpu is not None and gpu.gfx:
        return AMD_COLUMN_TILES if columns else AMD_TILES
    if shared < 160 << 10:
        return SMALL_TILES
    return COLUMN_TILES if columns else TILES


def launch_gemm(node: Node, inline: Callable[..., Node], gpu: Gpu | None, product: Any) -> Node:
    """Launch the kernel before `node`; returns the node of the result. `inline` writes a plain torch function
    before a node. `product`: a `ScaledProduct` of nodes."""
    from .triton_kernels import fp8_gemm

    a, b, a_inv, b_inv, bias, out_dtype, _, a_block, b_block = product
    emit = Emitter(node.graph, node, node)
    launcher = launch.Launcher(node.graph, 0, node)
    m, k, n = (size_of(size) for size in (*value(a).shape, value(b).shape[0]))
    wanted = ("M", "m", m, 1), ("N", "n", n, 1), ("K", "k16", k, 16)
    constants, numbers = launcher.size_arguments(emit, *wanted)
    constants |= {"A_SQUARE": a_block[0] != 1, "B_SQUARE": b_block[0] != 1}
    a_inv = inline(node, columns_first if a_block[0] == 1 else rows_first, a_inv)
    b_inv = inline(node, columns_first if b_block[0] == 1 else rows_first, b_inv)
    if bias is None:
        constants["bias"] = None
    elif value(bias).stride(0) != 1:
        bias = inline(node, copied, bias)
    out = launcher.new(emit, (m, n), out_dtype)
    tensors = {"a": a, "b": b, "a_inv": a_inv, "b_inv": b_inv}
    tensors |= {"y": out} if bias is None else {"bias": bias, "y": out}
    tiles = configurations(gpu, shared_memory(value(node).device), b_block)
    programs = [quotient(m + r - 1, r) * quotient(n + c - 1, c) for r, c, *_ in tiles]
    grids = [(launcher.number(emit, count), 1, 1) for count in programs]
    kernel = launch.tuned(fp8_gemm, tiles)
    compat.triton.launch(emit, kernel, grids, {**tensors, **numbers}, constants, contracts=True)
    return out


def shared_memory(device: torch.device) -> int:
    """Bytes that a block of threads can have on a device."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))
