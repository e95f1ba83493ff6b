"""The kernel that casts a weight again if its scale has changed. `in_step` launches it, and only then imports
this module: it needs Triton."""

import triton
import triton.language as tl

from ...codegen.triton_casts import fp8_of
from ...ir import scale as arithmetic

LARGEST = tl.constexpr(arithmetic.LARGEST)
SMALLEST = tl.constexpr(arithmetic.SMALLEST)
EXPONENT = tl.constexpr(arithmetic.EXPONENT)
MANTISSA = tl.constexpr(arithmetic.MANTISSA)


# The same in plain torch is `in_step.recast`: change both.
# `test_the_kernel_casts_as_the_reference` in tests/features/weight_cache/test_in_step.py compares them.
@triton.jit(do_not_specialize_on_alignment=["inverse", "used", "amax"])  # elements of vectors
def fp8_recast(
    weight,
    rows,
    columns,
    inverse,
    used,
    amax,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    APART: tl.constexpr,
    REACH: tl.constexpr,
    FP8_MAX: tl.constexpr,
    SATURATES: tl.constexpr,
    BY_PTX: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # weight: [HEIGHT, WIDTH]; rows, columns: its copies, as in `fp8_adamw`; inverse: float32 [1], is written;
    # used: float32 [1], the inverse of the scale that the copies have; amax: int32 [1]; REACH: what the scale
    # brings the amax to
    largest = tl.load(amax).to(tl.float32, bitcast=True)
    usable = (largest > 0) & (largest < float("inf"))
    wide = REACH / tl.where(usable, largest, 1.0).to(tl.float64)
    wide = tl.where(wide > LARGEST, LARGEST, tl.where(wide < SMALLEST, SMALLEST, wide))
    scale = tl.where(usable, wide, 1.0).to(tl.float32)
    scale = (scale.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
    now = (1.0 / scale.to(tl.float64)).to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(inverse, now)
    before = tl.load(used)
    if (before != now) | ((before.to(tl.int32, bitcast=True) & MANTISSA) != 0):  # no power of two, or tiny
        wide_tiles: tl.constexpr = (WIDTH + BLOCK_C - 1) // BLOCK_C
        tiles: tl.constexpr = (HEIGHT + BLOCK_R - 1) // BLOCK_R * wide_tiles
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            row = tl.arange(0, BLOCK_R).to(tl.int64) + tile // wide_tiles * BLOCK_R
            col = tl.arange(0, BLOCK_C).to(tl.int64) + tile % wide_tiles * BLOCK_C
            at = row[:, None] * WIDTH + col[None, :]
            inside = (row < HEIGHT)[:, None] & (col < WIDTH)[None, :]
            x = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
            to: tl.constexpr = (columns if rows is None else rows).dtype.element_ty
            y8 = fp8_of(x, scale, FP8_MAX, to, SATURATES, BY_PTX)
            if rows is not None:
                tl.store(rows + at, y8, mask=inside)
            if columns is not None:
                there = col[:, None] * APART + row[None, :]
                tl.store(columns + there, tl.trans(y8), mask=(row < HEIGHT)[None, :] & (col < WIDTH)[:, None])
