"""The lowering of FP8 matmuls: the forms that a matmul can take. All are plain torch functions of a
`ScaledProduct`, except for the Triton kernel (`block_gemm`).

cuBLASLt and CUTLASS add a bias in half precision only, in the result's dtype (`fusable`). Any other bias is
added to a float32 product after the matmul. Inductor fuses this sum into the kernel that reads it, and the
sum is rounded once.

`_scaled_mm` finds the kind of scaling from shapes and strides. So scales are written into memory of their own
and read through `as_strided`, whose strides Inductor keeps (`lowerings`). `_scaled_mm_v2` is told the kind,
but it is not used: Inductor (2.13) lowers it to `_scaled_mm` with the scales in the wrong orientation, or
refuses the scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from .. import compat
from ..devices.gpu import gpu_of
from ..ir import ops
from ..ir.fx_utils import aten, value
from ..ir.grouped import grouped_mm
from ..ir.metadata import FORM
from ..ir.schemas import ScaledProduct, product_of
from . import scaled_mm_kind
from .block_gemm import launch_gemm
from .lowerings import aligned, of_blocks, of_rows, stored, swizzled
from .scaled_mm_kind import AFTER, BLOCKWISE, EMULATED, MX, REFERENCE, ROWWISE, TENSORWISE, TRITON

Inline = Callable[..., Node]  # writes a plain torch function into the graph, before a node

MX_COLUMNS = 32  # elements that share an E8M0 scale


def lower_mm(node: Node, inline: Inline) -> Node:
    """Insert the form of an `ops.scaled_mm` or `ops.block_mm` before its node. Returns the result's node."""
    form = form_of(node)
    if form == TRITON:
        return launch_gemm(node, inline, gpu_of(value(node).device), product_of(node))
    function, given = call_of(node, form)
    return inline(node, function, *given)


def form_of(node: Node) -> str:
    """The form of a matmul: one of `scaled_mm_kind`'s, or TENSORWISE, where each operand has one scale."""
    if FORM in node.meta:
        return node.meta[FORM]
    gpu, launches = gpu_of(value(node).device), not compat.triton.reorders()
    if node.target is ops.scaled_mm:
        return REFERENCE if gpu is None else TENSORWISE
    x = product_of(node)
    if node.target is grouped_mm:
        return scaled_mm_kind.how_grouped(gpu, x.a_block, x.b_block, launches)
    (m, k), n = value(x.a).shape, value(x.b).shape[0]
    made = product_dtype(None if x.bias is None else value(x.bias), x.out_dtype)
    return scaled_mm_kind.how(gpu, x.a_block, x.b_block, m, n, k, made, x.fast_accum, launches)


def call_of(node: Node, form: str) -> tuple[Callable[..., Tensor], tuple]:
    """The function and the arguments (nodes and constants) of a matmul in this form, which is not TRITON."""
    product = product_of(node)
    if form == REFERENCE and node.target is ops.scaled_mm:
        return ops.product, product[:7]
    if form == REFERENCE:
        return ops.block_product, tuple(product)
    forms = {TENSORWISE: tensorwise, ROWWISE: rowwise, AFTER: rowwise_after}
    forms |= {BLOCKWISE: blockwise, MX: mx, EMULATED: emulated}
    return forms[form], (product,)


def fusable(bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    """True if the matmul itself can add this bias, or if there is none to add."""
    return bias is None or bias.dtype == out_dtype and out_dtype != torch.float32


def product_dtype(bias: Tensor | None, out_dtype: torch.dtype) -> torch.dtype:
    """The dtype that the matmul itself returns."""
    return out_dtype if fusable(bias, out_dtype) else torch.float32


def scaled(x: ScaledProduct, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """`_scaled_mm` with scales in the layout that it expects, and a bias of any dtype."""
    fused = x.bias if fusable(x.bias, x.out_dtype) else None
    made = product_dtype(x.bias, x.out_dtype)
    out = aten._scaled_mm.default(x.a, x.b.t(), a_scale, b_scale, fused, None, made, x.fast_accum)
    return out if fused is x.bias else finished(out, x)


def finished(product: Tensor, x: ScaledProduct) -> Tensor:
    """A float32 product plus a bias, rounded once."""
    return (product if x.bias is None else product + x.bias.to(torch.float32)).to(x.out_dtype)


def tensorwise(x: ScaledProduct) -> Tensor:
    """A scale for a and one for b."""
    # views, not `as_strided` without an offset: Inductor 2.11 drops the input's there (pytorch#175325)
    return scaled(x, aligned(x.a_inv).view(1, 1), aligned(x.b_inv).view(1, 1))


def rowwise(x: ScaledProduct) -> Tensor:
    """A scale for each row of a and of b, or one for all: `_scaled_mm` takes them as [M, 1] and [1, N]."""
    a_scale = stored(of_rows(x.a_inv, x.a), [x.a.shape[0], 1])
    b_scale = stored(of_rows(x.b_inv, x.b), [1, x.b.shape[0]])
    return scaled(x, a_scale, b_scale)


def rowwise_after(x: ScaledProduct) -> Tensor:
    """The same, but the scales are multiplied with the float32 result of the matmul, numbers up to 448 * 448
    * K. Inductor fuses this into the kernel that reads the result."""
    one = torch.ones(1, 1, dtype=torch.float32, device=x.a.device)
    product = aten._scaled_mm.default(x.a, x.b.t(), one, one, None, None, torch.float32, x.fast_accum)
    return finished(product * of_rows(x.a_inv, x.a).reshape(-1, 1) * of_rows(x.b_inv, x.b).reshape(1, -1), x)


def blockwise(x: ScaledProduct) -> Tensor:
    """Blocks of 1 x 128 and 128 x 128 by cuBLASLt. Sums of 128 products are always promoted to float32 there.

    The scales of a are [M, K / 128], column by column in memory, or [M / 128, K / 128], row by row. Those of
    b are the transposes of such tensors, with N for M.
    """
    a_scale = of_blocks(x.a_inv, x.a_block)
    b_scale = of_blocks(x.b_inv, x.b_block).t()
    return scaled(x._replace(fast_accum=False), a_scale, b_scale)


def mx(x: ScaledProduct) -> Tensor:
    """Blocks of 1 x 32 or 32 x 32 by the tensor cores of Blackwell. Their K is a multiple of 32: copies are
    padded unless K is known to be one."""
    a_scale = swizzled(x.a_inv, x.a.shape[0], x.a_block[0])
    b_scale = swizzled(x.b_inv, x.b.shape[0], x.b_block[0])
    return scaled(x._replace(a=_padded(x.a), b=_padded(x.b), fast_accum=False), a_scale, b_scale)


def emulated(x: ScaledProduct) -> Tensor:
    """A bf16 matmul, with float32 sums, of the values that the operands stand for. Scales of one a row are
    multiplied with its result."""
    a, a_rows = dequantized(x.a, x.a_inv, x.a_block)
    b, b_rows = dequantized(x.b, x.b_inv, x.b_block)
    if a_rows is None and b_rows is None and x.bias is None and x.out_dtype == torch.bfloat16:
        return torch.mm(a, b.t())
    product = aten.mm.dtype(a, b.t(), torch.float32)
    if a_rows is not None:
        product = product * a_rows.reshape(-1, 1)
    if b_rows is not None:
        product = product * b_rows.reshape(1, -1)
    return finished(product, x)


def dequantized(copy: Tensor, inverse: Tensor, block: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """The values of an operand in bf16, and factors with which its rows are still to be multiplied, if any.

    Exact where the inverses are powers of two: an FP8 number has 4 significant bits at most, bf16 has 8, and
    as many exponents as float32.
    """
    if block[1] == 0:
        return copy.to(torch.bfloat16), inverse
    return (copy.to(torch.float32) * ops.spread(inverse, copy.shape, block)).to(torch.bfloat16), None


def _padded(copy: Tensor) -> Tensor:
    """[rows, K] with zeros up to a multiple of 32 columns."""
    rows, columns = copy.shape
    if isinstance(columns, int) and columns % MX_COLUMNS == 0:
        return copy
    whole = ops.blocks(columns, MX_COLUMNS) * MX_COLUMNS
    padded = torch.nn.functional.pad(copy.view(torch.uint8), (0, whole - columns))
    return stored(padded, [rows, whole]).view(copy.dtype)
