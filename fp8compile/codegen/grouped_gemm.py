"""The launch of `triton_grouped.fp8_grouped`, the FP8 matmul of groups of rows, where ATen has none.

    fprop, dgrad    y[rows of e] = a[rows of e] @ b[e]^T
    wgrad           y[e] = a[:, columns of e] @ b[:, columns of e]^T

How many tiles a group needs is data. A program of fprop or dgrad finds its group by itself: it adds up the
tiles of all groups. There are at most M / rows of a tile + E tiles of rows; programs beyond the last tile end
at once. A wgrad has E * R * C / tile programs, and each one walks the columns of its group. An empty group's
result is zeros.

Scales of operands, of matrices and of rows are multiplied with the float32 sum at the end. Scales of 1 x 128
and 128 x 128 blocks are multiplied with the sum of each 128 products, as in `block_gemm`. Blocks of 1 x 32 go
to the tensor cores that scale them; elsewhere they become bf16 numbers, which hold them exactly, and are
multiplied in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .. import compat
from ..config.recipe import ROW, WHOLE, Block
from ..devices import support
from ..devices.gpu import Gpu
from ..ir.fx_utils import Emitter, is_data, value
from ..ir.grouped import ALIGN
from . import block_gemm, launch
from .indexing import quotient, size_of
from .lowerings import columns_first, rows_first
from .scaled_mm_kind import LINE, MX_BLOCK, MX_BLOCKS, MX_TILE, SQUARE

# (BLOCK_R, BLOCK_C, warps, stages) for blocks of 1 x 32. The last two: where bf16 copies take registers
MX_TILES = ((128, 128, 8, 2), (64, 128, 4, 2))
SMALL_MX_TILES = ((64, 64, 4, 2), (64, 128, 8, 2))  # for 99 KB of shared memory
WIDENED_MX_TILES = ((64, 128, 8, 2), (128, 64, 8, 2))
AMD_MX_TILES = ((64, 128, 4, 2), (32, 128, 4, 2))


def configurations(gpu: Gpu | None, shared: int, b_block: Block) -> tuple[block_gemm.Tile, ...]:
    """The tiles to choose from at the first launch, default first. `shared`: bytes that a block can share."""
    if b_block not in MX_BLOCKS:
        return block_gemm.configurations(gpu, shared, LINE if b_block == LINE else SQUARE)
    if gpu is not None and gpu.gfx:
        return AMD_MX_TILES if shared > 64 << 10 else AMD_MX_TILES[::-1]
    if not support.has_mx(gpu):
        return WIDENED_MX_TILES
    return SMALL_MX_TILES if shared < 160 << 10 else MX_TILES


def launch_grouped(node: Node, inline: Callable[..., Node], gpu: Gpu | None, product: Any) -> Node:
    """Launch the kernel before `node`; returns the node of the result. `inline` writes a plain torch function
    before a node. `product`: a `GroupedProduct` of nodes."""
    from .triton_grouped import LINE_OF_ROW, STEP, fp8_grouped

    a, b, a_inv, b_inv, offs, out_dtype, fast_accum, a_block, b_block = product
    emit = Emitter(node.graph, node, node)
    launcher = launch.Launcher(node.graph, 0, node)
    m, k = (size_of(size) for size in value(a).shape)
    groups, of_rows = int(value(offs).shape[0]), value(b).dim() == 3
    n, aligned = int(value(b).shape[-2]), max(ALIGN, a_block.columns)
    constants, numbers = launcher.size_arguments(emit, ("M", "m", m, 1), ("K", "k16", k, 16))
    constants |= {
        "N": n,
        "E": groups,
        "LANES": max(16, 1 << (groups - 1).bit_length()),
        "OF_ROWS": of_rows,
        "B_MATRIX": int(value(b).stride(0)) if of_rows else 0,
        "B_ROW": int(value(b).stride(1)) if of_rows else 0,
        "B_COLUMN": int(value(b).stride(2)) if of_rows else 1,
        "A_KIND": _kind(a_block, value(a_inv)),
        "B_KIND": _kind(b_block, value(b_inv)),
        "NATIVE_MX": support.has_mx(gpu),
        "FAST": fast_accum,
        "EVEN": (k % STEP.value if of_rows else aligned % STEP.value) == 0,
    }
    scales = []
    for name, inverse, block in (("A", a_inv, a_block), ("B", b_inv, b_block)):
        # Inductor keeps no strides of copies whose sizes are data (`GraphLowering.run_node`): read as is
        as_it_is = value(inverse).dim() == 1 or any(map(is_data, value(inverse).shape))
        if not as_it_is:
            inverse = inline(node, columns_first if block == LINE else rows_first, inverse)
        elif block == LINE:
            constants[f"{name}_KIND"] = LINE_OF_ROW.value
        scales.append(inverse)
    out = launcher.new(emit, (m, n) if of_rows else (groups, m, n), out_dtype)
    tensors = {"a": a, "b": b, "a_inv": scales[0], "b_inv": scales[1], "offs": offs, "y": out}
    tiles = configurations(gpu, block_gemm.shared_memory(value(node).device), b_block)
    grids = []
    for rows, columns, *_ in tiles:
        tall = quotient(m, rows) + groups if of_rows else groups * quotient(m + rows - 1, rows)
        grids.append((launcher.number(emit, tall * -(-n // columns)), 1, 1))
    kernel = launch.tuned(fp8_grouped, tiles)
    compat.triton.launch(emit, kernel, grids, {**tensors, **numbers}, constants, contracts=True)
    return out


def launch_order(node: Node) -> list[Node]:
    """Launch `triton_grouped.fp8_group_order` for a `group_order`; returns the nodes of its results."""
    from .triton_grouped import fp8_group_order

    args: Any = node.args
    offs, tokens, align = args
    emit = Emitter(node.graph, node, node)
    launcher = launch.Launcher(node.graph, 0, offs)
    count, m = int(value(offs).shape[0]), size_of(value(tokens) if isinstance(tokens, Node) else tokens)
    lanes = max(16, 1 << count.bit_length())
    block = max(16, align, 8192 // lanes)
    constants, numbers = launcher.size_arguments(emit, ("M", "m", m, 1))
    constants |= {"E": count, "LANES": lanes, "ALIGN": align}
    made = [launcher.new(emit, map(size_of, result.shape), torch.int32) for result in value(node)]
    places = size_of(value(node)[0].shape[0])
    grid = (launcher.number(emit, quotient(places + block - 1, block)), 1, 1)
    tensors = {"offs": offs, **dict(zip(("rows", "ends", "groups"), made, strict=True))}
    kernel = launch.tuned(fp8_group_order, ((block, 1, 4),))
    compat.triton.launch(emit, kernel, [grid], {**tensors, **numbers}, constants)
    return made


def _kind(block: Block, inverse: Tensor) -> int:
    """What has a scale of its own, as the kernel is told."""
    from . import triton_grouped as kernel

    if block in (WHOLE, ROW) and inverse.dim() == 3 and inverse.shape[1] == 1:
        return kernel.MATRIX.value
    kinds = {WHOLE: kernel.WHOLE, ROW: kernel.ROW, LINE: kernel.LINE, SQUARE: kernel.SQUARE}
    kinds |= {MX_BLOCK: kernel.MX, MX_TILE: kernel.MX_TILE}
    return kinds[block].value
