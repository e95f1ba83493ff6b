"""The kernel of a step that also writes the FP8 copies of the weight. `update` launches it, and only then
imports this module: it needs Triton."""

import triton
import triton.language as tl

from ..codegen.triton_casts import converted, fp8_of
from .states import FIRST, LARGEST, SECOND, SMALLEST

FIRST_BITS = tl.constexpr(0x7FFFFF - LARGEST[FIRST][0])
FIRST_EXPONENT = tl.constexpr(LARGEST[FIRST][1])
SECOND_BITS = tl.constexpr(0x7FFFFF - LARGEST[SECOND][0])
SECOND_EXPONENT = tl.constexpr(LARGEST[SECOND][1])
SECOND_LEAST = tl.constexpr(SMALLEST)


# The same step in plain torch is `update.update`, and the cast `update.cast_into`: change both.
# `test_the_kernel_is_the_update` in tests/optim/test_adamw_kernel.py compares them bitwise.
@triton.jit(do_not_specialize_on_alignment=["inverse", "amax"])  # elements of vectors
def fp8_adamw(
    weight,
    gradient,
    first,
    first_scale,
    second,
    second_scale,
    kept,
    rows,
    columns,
    inverse,
    amax,
    sign,
    decay,
    size,
    correction,
    blend1,
    blend2,
    eps,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    APART: tl.constexpr,
    HALF: tl.constexpr,
    LEAST: tl.constexpr,
    FP8_MAX: tl.constexpr,
    SATURATES: tl.constexpr,
    BY_PTX: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # weight, gradient, first, second, kept: [HEIGHT, WIDTH], as in `update`; a row has WIDTH / BLOCK_C blocks
    # of states. rows: FP8 [HEIGHT, WIDTH] or None; columns: FP8 [WIDTH, HEIGHT], rows APART elements apart,
    # or None; inverse: float32 [1], of the scale of both; amax: int32 [1]. HALF, LEAST: as in `states.follow`
    tiles: tl.constexpr = WIDTH // BLOCK_C
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles * BLOCK_R + tl.arange(0, BLOCK_R)
    col = program % tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    at = row[:, None] * WIDTH + col[None, :]
    block = row * tiles + program % tiles
    if HEIGHT // BLOCK_R * BLOCK_R == HEIGHT:
        in_row = tl.full([BLOCK_R], 1, tl.int1)
    else:
        in_row = row < HEIGHT
    inside = in_row[:, None] & (col < WIDTH)[None, :]
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * sign
    m = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    m = m * tl.load(first_scale + block, mask=in_row, other=1.0)[:, None]
    m = m + blend1 * (g - m)
    v = tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
    v = v * tl.load(second_scale + block, mask=in_row, other=1.0)[:, None]
    v = v + blend2 * (g * g - v)
    old = tl.load(weight + at, mask=inside, other=0.0)
    if kept is None:
        master = old.to(tl.float32)
    elif kept.dtype.element_ty == tl.int16:
        low = tl.load(kept + at, mask=inside, other=0).to(tl.int32)
        low = tl.where((old.to(tl.float32) == 0) & (low < 0), 0, low)
        high = old.to(tl.int16, bitcast=True).to(tl.int32)
        master = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        master = tl.load(kept + at, mask=inside, other=0.0)
        near = old.to(tl.float32)
        master = tl.where(tl.abs(master - near) <= tl.abs(near) * HALF + LEAST, master, near)
    master = master * decay - size * (m / (tl.sqrt(v) * correction + eps))

    largest = tl.max(tl.where(tl.abs(m) < float("inf"), tl.abs(m), 0.0), 1)
    biased = ((largest.to(tl.int32, bitcast=True) + FIRST_BITS) >> 23) - FIRST_EXPONENT
    biased = tl.maximum(biased, 1)  # a power of two: its inverse is exact, and so are products by it
    tl.store(first_scale + block, (biased << 23).to(tl.float32, bitcast=True), mask=in_row)
    m = m * ((254 - biased) << 23).to(tl.float32, bitcast=True)[:, None]
    m = tl.where(tl.abs(m) == float("inf"), float("nan"), m)
    tl.store(first + at, converted(m, tl.float8e4nv, BY_PTX), mask=inside)

    largest = tl.max(tl.where(tl.abs(v) < float("inf"), tl.abs(v), 0.0), 1)
    biased = ((largest.to(tl.int32, bitcast=True) + SECOND_BITS) >> 23) - SECOND_EXPONENT
    biased = tl.maximum(biased, 1)
    tl.store(second_scale + block, (biased << 23).to(tl.float32, bitcast=True), mask=in_row)
    scaled = v * ((254 - biased) << 23).to(tl.float32, bitcast=True)[:, None]
    scaled = tl.where((v > 0) & (scaled < SECOND_LEAST), SECOND_LEAST, scaled)
    tl.store(second + at, scaled.to(tl.float16), mask=inside)

    if kept is None:
        new = master.to(weight.dtype.element_ty)
    elif kept.dtype.element_ty == tl.int16:
        bits = tl.where(master != master, float("nan"), master).to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        tl.store(kept + at, (bits - (high << 16)).to(tl.int16), mask=inside)
        new = high.to(tl.int16).to(weight.dtype.element_ty, bitcast=True)
    else:
        tl.store(kept + at, master, mask=inside)
        new = master.to(weight.dtype.element_ty)
    tl.store(weight + at, new, mask=inside)

    x = new.to(tl.float32)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(amax, tl.max(tl.max(tl.where(inside, bits, 0), 1), 0), sem="relaxed")
    bits = (254 << 23) - tl.load(inverse).to(
        tl.int32, bitcast=True
    )  # of the scale, if that is a power of two
    to: tl.constexpr = (columns if rows is None else rows).dtype.element_ty
    y8 = fp8_of(x, bits.to(tl.float32, bitcast=True), FP8_MAX, to, SATURATES, BY_PTX)
    if rows is not None:
        tl.store(rows + at, y8, mask=inside)
    if columns is not None:
        there = col[:, None] * APART + row[None, :]
        tl.store(columns + there, tl.trans(y8), mask=in_row[None, :] & (col < WIDTH)[:, None])
