"""The intermediate representation: a handful of functional operators in the namespace `fp8compile::`.

The passes write them into the joint graph and lower them to ATen before Inductor generates code. Their eager
implementations below, plain torch on any device, are the reference: a cold call runs on them (see `runtime`).

    amax(x)                                         [..] -> [1] float32
    current_scale(amax, ...)                        the scale of the tensor's own amax
    delayed_scale(scales, amax, slot, ...)          the slot's scale from earlier calls
    inverse(scale) / delayed_inverse(...)           what divides back
    quantize(x, scale, dtype, fp8_max, transposed)  [R, C] -> FP8 [R, C], or [C, R padded to 16]
    quantize_both(x, scale, dtype, fp8_max)         [R, C] -> both of them
    scaled_mm(a, b, a_inv, b_inv, bias, ...)        [M, K], [N, K] -> [M, N]
    snapshot(page) -> scales; gather(amaxes) -> vector; update(page, scales, vector) -> page

Layout: both operands of `scaled_mm` have the contracted dimension last ("K-major", what Hopper's FP8 tensor cores take).
A tensor whose rows are contracted (tokens, in wgrad) is quantized transposed, its rows padded with zeros to a multiple
of 16, so any number of tokens will do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import scaling

NAMESPACE = "fp8compile"


def _op(schema: str, fake=None):
    """Define the decorated function as operator `fp8compile::<name>`, with itself as implementation on every device. `fake`:
    its result's shape alone, where that is much quicker to find (a deep model has hundreds)."""

    def define(function):
        name = function.__name__
        torch.library.define(f"{NAMESPACE}::{name}", schema)
        torch.library.impl(f"{NAMESPACE}::{name}", "CompositeExplicitAutograd")(function)
        if fake is not None:
            torch.library.register_fake(f"{NAMESPACE}::{name}", fake)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return define


def padded_rows(rows):
    """`rows` rounded up to a multiple of 16 (at least 16): the contracted size of a transposed copy. Takes int or SymInt."""
    if isinstance(rows, int):
        return max(16, -(-rows // 16) * 16)
    return (rows + 15) // 16 * 16


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float) -> Tensor:
    """`x * scale` in float32, saturated to +-fp8_max, infinities and NaN to NaN, rounded to nearest even in `dtype`."""
    x = x.to(torch.float32)
    scaled = (x * scale).clamp(-fp8_max, fp8_max)
    return torch.where(x.abs() == float("inf"), float("nan"), scaled).to(dtype)


def _number(like: Tensor, *_) -> Tensor:
    return torch.empty(1, dtype=torch.float32, device=like.device)


def _copy(x: Tensor, _scale: Tensor, dtype: torch.dtype, _fp8_max: float, transposed: bool) -> Tensor:
    shape = [x.shape[1], padded_rows(x.shape[0])] if transposed else list(x.shape)
    return torch.empty(shape, dtype=dtype, device=x.device)


def _copies(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float) -> tuple[Tensor, Tensor]:
    return _copy(x, scale, dtype, fp8_max, False), _copy(x, scale, dtype, fp8_max, True)


def _product(
    a: Tensor, b: Tensor, _a_inv: Tensor, _b_inv: Tensor, _bias: Tensor | None, out_dtype: torch.dtype, _fast: bool
) -> Tensor:
    return torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)


@_op("(Tensor x) -> Tensor", _number)
def amax(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return x.abs().amax().to(torch.float32).reshape(1)


@_op("(Tensor amax, float fp8_max, int margin) -> Tensor", _number)
def current_scale(amax: Tensor, fp8_max: float, margin: int) -> Tensor:
    return scaling.scale_of(amax, fp8_max, margin)


@_op("(Tensor scale) -> Tensor", _number)
def inverse(scale: Tensor) -> Tensor:
    return scaling.inverse_of(scale)


@_op("(Tensor page) -> Tensor")
def snapshot(page: Tensor) -> Tensor:
    """`[slots, 4]`: the scale, its inverse and the age of each slot, as they are before this call moves them."""
    return scaling.snapshot_of(page)


@_op("(Tensor scales, Tensor amax, int slot, float fp8_max, int margin) -> Tensor", _number)
def delayed_scale(scales: Tensor, amax: Tensor, slot: int, fp8_max: float, margin: int) -> Tensor:
    """The slot's scale; while the slot is cold, that of the current amax. (The lowering keeps the first half only.)"""
    stored = scales[slot, scaling.SCALE].reshape(1)
    cold = scales[slot, scaling.AGE] < 0
    return torch.where(cold, scaling.scale_of(amax, fp8_max, margin), stored)


@_op("(Tensor scales, Tensor scale, int slot) -> Tensor", _number)
def delayed_inverse(scales: Tensor, scale: Tensor, slot: int) -> Tensor:
    return scaling.inverse_of(scale)


@_op("(Tensor x, Tensor scale, ScalarType dtype, float fp8_max, bool transposed) -> Tensor", _copy)
def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float, transposed: bool) -> Tensor:
    if not transposed:
        return cast(x, scale, dtype, fp8_max).contiguous()
    rows = x.shape[0]
    padded = torch.nn.functional.pad(x.t(), (0, padded_rows(rows) - rows))
    return cast(padded, scale, dtype, fp8_max).contiguous()


@_op("(Tensor x, Tensor scale, ScalarType dtype, float fp8_max) -> (Tensor, Tensor)", _copies)
def quantize_both(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float) -> tuple[Tensor, Tensor]:
    return quantize(x, scale, dtype, fp8_max, False), quantize(x, scale, dtype, fp8_max, True)


def product(
    a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """a @ b^T of FP8 values with float32 sums, unscaled, plus bias, rounded once. Exact products: also what a CPU runs."""
    out = torch.mm(a.to(torch.float32), b.to(torch.float32).t()) * (a_inv * b_inv)
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(out_dtype)


@_op(
    "(Tensor a, Tensor b, Tensor a_inv, Tensor b_inv, Tensor? bias, ScalarType out_dtype, bool fast_accum) -> Tensor", _product
)
def scaled_mm(
    a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    return product(a, b, a_inv, b_inv, bias, out_dtype, fast_accum)


@_op("(Tensor[] amaxes) -> Tensor")
def gather(amaxes: list[Tensor]) -> Tensor:
    return torch.cat(amaxes)


@_op("(Tensor page, Tensor scales, Tensor amax) -> Tensor")
def update(page: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
    return scaling.next_page(page, scales, amax)


ALL = (
    amax,
    current_scale,
    inverse,
    snapshot,
    delayed_scale,
    delayed_inverse,
    quantize,
    quantize_both,
    scaled_mm,
    gather,
    update,
)
