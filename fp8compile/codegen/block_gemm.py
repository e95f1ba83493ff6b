"""A matmul of FP8 operands with a scale a block of 128 along the contraction, as a kernel of our own.

    for each 128 of K:   acc += (a[:, k] @ b[:, k]^T) * a_inv[row, k] * b_inv[col, k]

Where cuBLASLt lacks it (`multiply.how`): any GPU but Hopper, sizes that are unknown or uneven. wgrad contracts over tokens, so
its K is a multiple of 16 and often none of 128. The tensor cores sum 128 products at a time, then the sums go on in float32:
what DeepSeek-V3 (arXiv:2412.19437, section 3.3.2) does to keep the short accumulators of FP8 exact enough.

Either operand's blocks are 1 x 128 or 128 x 128. A tile has at most 128 rows and columns, so of the latter it needs one number
a step; of the former a column of [K / 128, rows], which is copied into that order first, for neighbours to be read together.

Programs walk the result in groups of GROUP rows of tiles: what runs at a time shares its operands in the cache. Sizes that are
known are constants of the source, others are arguments, K as a number of 16s, which lets the compiler read 16 bytes at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from .. import compat
from ..devices.gpu import Gpu, gpu_of
from ..ir import ops
from ..ir.fx_utils import Emitter, aten, value
from . import scaled_mm, scaled_mm_kind
from .expressions import TRITON_DTYPE
from .indexing import quotient, size_of
from .launch import Launcher

NAME = "fp8_gemm"  # what the names of kernels begin with
STEP = 128  # of K: a scale's
GROUP = 8

# (BLOCK_R, BLOCK_C, warps, stages), the default first. A stage takes 128 bytes of shared memory a row and column of the tile.
# With 1 x 128 blocks of b, a thread holds a scale for each of its columns: there, tiles are small enough that nothing spills.
TILES = ((128, 128, 8, 3), (64, 128, 4, 4), (128, 64, 8, 4))
COLUMN_TILES = ((64, 128, 4, 4), (128, 64, 8, 4))
SMALL_TILES = ((128, 128, 8, 3), (64, 128, 4, 3), (64, 64, 4, 4))  # for 99 KB of shared memory
AMD_TILES = ((128, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 2))
AMD_COLUMN_TILES = ((64, 64, 4, 2), (64, 128, 4, 2))

Tile = tuple[int, int, int, int]

_SOURCE = """import triton
import triton.language as tl


@triton.jit
def {name}({parameters}, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    # a: {dtype} [{rows}, {inner}]; b: {other} [{columns}, {inner}]; scales of {a_block} and {b_block}; y: {out}
    tall = ({rows} + BLOCK_R - 1) // BLOCK_R
    wide = ({columns} + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0)
    first = program // ({group} * wide) * {group}
    height = tl.minimum(tall - first, {group})
    block_r = first + program % ({group} * wide) % height
    block_c = program % ({group} * wide) // height
    row = block_r * BLOCK_R + tl.arange(0, BLOCK_R)
    col = block_c * BLOCK_C + tl.arange(0, BLOCK_C)
    # outside of the matrix its first row is read: nothing is masked in the loop
    from_row = tl.where(row < {rows}, row, 0).to(tl.int64)
    from_col = tl.where(col < {columns}, col, 0).to(tl.int64)
    k = tl.arange(0, {step})
    a_at = a + from_row[:, None] * {inner} + k[None, :]
    b_at = b + from_col[:, None] * {inner} + k[None, :]
{a_start}
{b_start}
    acc = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for step in range(0, {blocks}):
        x = tl.load(a_at{mask})
        w = tl.load(b_at{mask})
        x_inv = tl.load(a_scale)
        w_inv = tl.load(b_scale)
        part = tl.dot(x, tl.trans(w))
        acc += {scaled}
        a_at += {step}
        b_at += {step}
        a_scale += {a_next}
        b_scale += {b_next}
{bias}    to = row.to(tl.int64)[:, None] * {columns} + col[None, :]
    tl.store(y + to, acc.to({out}), mask=(row[:, None] < {rows}) & (col[None, :] < {columns}))
"""

_BIAS = """    acc += tl.load(bias + from_col).to(tl.float32)[None, :]
"""


def source(
    sizes: Sequence[int | str],
    dtypes: tuple[torch.dtype, torch.dtype],
    blocks: tuple[Sequence[int], Sequence[int]],
    out_dtype: torch.dtype,
    bias: bool,
) -> tuple[str, str]:
    """(name, source). `sizes`: M, N and K, each a number or the name of an argument; K's is its number of 16s."""
    rows, columns, inner = sizes
    names = [size for size in sizes if isinstance(size, str)]
    wide = [block[0] != 1 for block in blocks]
    length = f"({inner} * 16)" if isinstance(inner, str) else str(inner)
    steps = f"(({length} + {STEP - 1}) // {STEP})" if isinstance(inner, str) else str(-(-inner // STEP))
    starts = [_start(*operand, steps) for operand in (("a", "row", wide[0]), ("b", "col", wide[1]))]
    text = [TRITON_DTYPE[dtype].removeprefix("tl.") for dtype in dtypes]
    kinds = ["128x128" if square else "1x128" for square in wide]
    name = f"{NAME}_{kinds[0]}_{kinds[1]}"
    whole = isinstance(inner, int) and inner % STEP == 0
    return name, _SOURCE.format(
        name=name,
        parameters=", ".join(["a", "b", "a_inv", "b_inv", *(["bias"] if bias else []), "y", *names]),
        rows=rows,
        columns=columns,
        inner=length,
        blocks=steps,
        step=STEP,
        group=GROUP,
        dtype=text[0],
        other=text[1],
        a_block=kinds[0],
        b_block=kinds[1],
        a_start=starts[0],
        b_start=starts[1],
        a_next=1 if wide[0] else rows,
        b_next=1 if wide[1] else columns,
        mask="" if whole else f", mask=(k < {length} - step * {STEP})[None, :], other=0.0",
        scaled=_SCALED[wide[0], wide[1]],
        bias=_BIAS if bias else "",
        out=TRITON_DTYPE[out_dtype],
    )


# by whether the blocks of a and b are square: one number, or one a row or column
_SCALED = {
    (False, False): "part * x_inv[:, None] * w_inv[None, :]",
    (False, True): "part * (x_inv * w_inv)[:, None]",
    (True, False): "part * (x_inv * w_inv)[None, :]",
    (True, True): "part * (x_inv * w_inv)",
}


def _start(operand: str, axis: str, square: bool, steps: str) -> str:
    """Where the first scales of a tile are."""
    if square:
        return f"    {operand}_scale = {operand}_inv + block_{axis[0]} * BLOCK_{axis[0].upper()} // {STEP} * {steps}"
    return f"    {operand}_scale = {operand}_inv + from_{axis}"


def configurations(gpu: Gpu | None, shared: int, b_block: Sequence[int]) -> tuple[Tile, ...]:
    """The tiles to choose from at the first launch, the default first. `shared`: bytes of shared memory a block can have."""
    columns = b_block[0] == 1
    if gpu is not None and gpu.gfx:
        return AMD_COLUMN_TILES if columns else AMD_TILES
    if shared < 160 << 10:
        return SMALL_TILES
    return COLUMN_TILES if columns else TILES


@functools.cache
def function(name: str, text: str, tiles: tuple[Tile, ...]) -> Any:
    """The JIT function of a source, with its configurations. One for all that are the same."""
    import triton

    jitted = compat.load_kernel(name, text)
    made = [triton.Config({"BLOCK_R": r, "BLOCK_C": c}, num_warps=warps, num_stages=stages) for r, c, warps, stages in tiles]
    return triton.autotune(configs=made, key=[])(jitted)


def block_mm(node: Node, inline: Callable[..., Node], *args: Any) -> Node:
    """Lower an `ops.block_mm`: put what computes it before `node`; `inline` puts a plain torch function there.

    Returns the node of the result. The way is `multiply.how`'s.
    """
    a, b, a_inv, b_inv, bias, out_dtype, fast_accum, a_block, b_block = args
    a_block, b_block = tuple(a_block), tuple(b_block)
    gpu = gpu_of(value(node).device)
    (m, k), n = value(a).shape, value(b).shape[0]
    made = scaled_mm.product_dtype(None if bias is None else value(bias), out_dtype)
    way = scaled_mm_kind.how(gpu, a_block, b_block, m, n, k, made, fast_accum, not compat.reorders())
    operands = (a, b, a_inv, b_inv, bias, out_dtype)
    if way == scaled_mm_kind.REFERENCE:
        return inline(node, ops.block_product, *args[:7], a_block, b_block)
    if way == scaled_mm_kind.ROWWISE:
        return inline(node, scaled_mm.rowwise, *operands, fast_accum)
    if way == scaled_mm_kind.AFTER:
        return inline(node, scaled_mm.rowwise_after, *operands, fast_accum)
    if way == scaled_mm_kind.BLOCKWISE:
        return inline(node, scaled_mm.blockwise, *operands, a_block, b_block)
    if way == scaled_mm_kind.MX:
        return inline(node, scaled_mm.mx, *operands)
    if way == scaled_mm_kind.TRITON:
        return launch_gemm(node, inline, gpu, *operands, a_block, b_block)
    return inline(node, scaled_mm.emulated, *operands, a_block, b_block)


def launch_gemm(
    node: Node,
    inline: Callable[..., Node],
    gpu: Gpu | None,
    a: Node,
    b: Node,
    a_inv: Node,
    b_inv: Node,
    bias: Node | None,
    out_dtype: torch.dtype,
    a_block: tuple[int, int],
    b_block: tuple[int, int],
) -> Node:
    """Launch the kernel before `node`; returns the node of the result."""
    emit = Emitter(node.graph, node, node)
    launcher = Launcher(node.graph, 0, node)
    m, k, n = (size_of(size) for size in (*value(a).shape, value(b).shape[0]))
    known: list[int | str] = []
    numbers: dict[str, Any] = {}
    for name, size in (("m", m), ("n", n), ("k16", k)):
        if size.is_Integer:
            known.append(int(size))
        else:
            known.append(name)
            numbers[name] = launcher.number(emit, quotient(size, 16) if name == "k16" else size)
    a_inv, b_inv = (
        inline(node, scaled_mm.columns_first if block[0] == 1 else scaled_mm.rows_first, inverse)
        for inverse, block in ((a_inv, a_block), (b_inv, b_block))
    )
    if bias is not None and value(bias).stride(0) != 1:
        bias = inline(node, scaled_mm.copied, bias)
    sizes = [launcher.number(emit, size) for size in (m, n)]
    out = emit(aten.empty.memory_format, sizes, dtype=out_dtype, device=value(node).device, pin_memory=False)
    tensors = {"a": a, "b": b, "a_inv": a_inv, "b_inv": b_inv, **({} if bias is None else {"bias": bias}), "y": out}
    dtypes = value(a).dtype, value(b).dtype
    name, text = source(known, dtypes, (a_block, b_block), out_dtype, bias is not None)
    tiles = configurations(gpu, shared_memory(value(node).device), b_block)
    programs = [quotient(m + r - 1, r) * quotient(n + c - 1, c) for r, c, *_ in tiles]
    grids = [(launcher.number(emit, count), 1, 1) for count in programs]
    compat.launch(emit, function(name, text, tiles), grids, {**tensors, **numbers})
    return out


def shared_memory(device: torch.device) -> int:
    """Bytes that a block of threads can have on a device."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))
