"""Our operators as plain torch functions for Inductor to fuse, by device.

What the shapes below are for:

* amax is taken in two stages, rows first: Inductor puts the first stage into the producer's or the cast's kernel, and
  the second stages of a graph are gathered into one reduction for all tensors with equally many rows.
* Scales of a direction are copied out of the page once; a slot's scale is a view of that copy (`as_strided` makes
  Inductor keep it as one buffer), so there is no one-number kernel a slot.
* On a CPU an FP8 matmul is a float32 matmul of the FP8 values: products are exact, the sum is float32, the result is
  rounded once. On a GPU it is `aten._scaled_mm`, second operand column-major.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops

aten = torch.ops.aten


def row_amax(x: Tensor) -> Tensor:
    """First stage: [R, C] -> [R] float32, [1] if x is empty. NaN propagates."""
    if x.numel() == 0:
        return x.new_zeros(1, dtype=torch.float32)
    # float32 here and not later: what is reduced can then be written where it is gathered
    return x.abs().to(torch.float32).amax(-1)


def last_amax(rows: Tensor) -> Tensor:
    """Second stage: [R] -> [1]."""
    return rows.amax(0, keepdim=True)


def last_amaxes(rows: list[Tensor]) -> Tensor:
    """Second stage of n tensors with equally many rows: n x [R] -> [n]."""
    return last_amax(rows[0]) if len(rows) == 1 else torch.cat(rows).view(len(rows), -1).amax(1)


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float) -> Tensor:
    return ops.cast(x, scale, dtype, fp8_max).contiguous()


def quantize_transposed(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float) -> Tensor:
    """[R, C] -> [C, R padded to a multiple of 16], row-major and kept so."""
    columns, rows = x.shape[1], x.shape[0]
    padded = ops.padded_rows(rows)
    copy = ops.cast(x, scale, dtype, fp8_max).t()
    if not (isinstance(rows, int) and rows == padded):
        copy = torch.nn.functional.pad(copy.to(torch.float32), (0, padded - rows)).to(dtype)
    copy = copy.clone(memory_format=torch.contiguous_format)  # a pad's strides are not the same traced and in eager
    return aten.as_strided.default(copy, [columns, padded], [padded, 1], 0)


def concatenate(vectors: list[Tensor]) -> Tensor:
    return torch.cat(vectors)


def scaled_mm_gpu(
    a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """cuBLASLt adds a bias in half precision only; any other is added by whatever reads the product."""
    fused = bias if bias is not None and bias.dtype == out_dtype and out_dtype != torch.float32 else None
    product_dtype = out_dtype if bias is None or fused is not None else torch.float32
    scale_a = aten.as_strided.default(a_inv, [1, 1], [1, 1])
    scale_b = aten.as_strided.default(b_inv, [1, 1], [1, 1])
    out = aten._scaled_mm.default(a, b.t(), scale_a, scale_b, fused, None, product_dtype, fast_accum)
    if bias is not None and fused is None:
        out = (out + bias.to(torch.float32)).to(out_dtype)
    return out
