"""Casts to FP8 for kernels that are written by hand and launched directly. They import this module when they
are launched: it needs Triton."""

import triton
import triton.language as tl

from .expressions import E4M3_BY_PTX

PTX = tl.constexpr(E4M3_BY_PTX)


@triton.jit
def converted(y, TO: tl.constexpr, BY_PTX: tl.constexpr):
    # float32 -> FP8, E4M3 where BY_PTX
    if BY_PTX:
        return tl.inline_asm_elementwise(PTX, "=r,f,f,f,f", [y], tl.uint8, True, 4).to(TO, bitcast=True)
    else:
        return y.to(TO)


@triton.jit
def fp8_of(
    x,
    scale,
    FP8_MAX: tl.constexpr,
    TO: tl.constexpr,
    SATURATES: tl.constexpr,
    BY_PTX: tl.constexpr,
):
    # `ir.ops.cast`: x is float32. SATURATES: conversions saturate, and keep NaN
    y = tl.where(tl.abs(x) == float("inf"), float("nan"), x * scale)
    if not SATURATES:
        y = tl.where(y > FP8_MAX, FP8_MAX, tl.where(y < -FP8_MAX, -FP8_MAX, y))
    return converted(y, TO, BY_PTX)
