"""The products of FP8 values that the reference operators compute, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def spread(scale: Tensor, shape: Sequence, block: Sequence[int]) -> Tensor:
    """Expand one scale a block to one an element of a copy of this `shape` (or to a tensor that broadcasts to it)."""
    if scale.dim() == 1:  # one for all
        return scale
    for dim, size in enumerate(block):
        if size > 1:
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return scale


def product(
    a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """a @ b^T of FP8 values with float32 sums, times both inverses, plus bias, rounded once. Also runs compiled on CPUs."""
    out = torch.mm(a.to(torch.float32), b.to(torch.float32).t()) * (a_inv * b_inv)
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(out_dtype)


def block_product(
    a: Tensor,
    b: Tensor,
    a_inv: Tensor,
    b_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    a_block: Sequence[int],
    b_block: Sequence[int],
) -> Tensor:
    """a @ b^T of FP8 values, each times its block's scale_inv, with float32 sums, plus bias, rounded once.

    A scale_inv for a whole row multiplies the sum. One that changes along the contraction multiplies the values, which is exact
    in float32 if it is a power of two.
    """
    inverses = []
    values = []
    for copy, inverse_, block in ((a, a_inv, a_block), (b, b_inv, b_block)):
        whole = block[1] == 0
        values.append(copy.to(torch.float32) if whole else copy.to(torch.float32) * spread(inverse_, copy.shape, block))
        inverses.append(inverse_.reshape(-1) if whole else None)
    out = torch.mm(values[0], values[1].t())
    if inverses[0] is not None:
        out = out * inverses[0].unsqueeze(1)
    if inverses[1] is not None:
        out = out * inverses[1]
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(out_dtype)
