"""The lowering of FP8 matmuls: the forms that a matmul can take, and the choice between them.

`lower_mm` chooses the form that one of our operators becomes. Where operands have several scales, it depends on the device, the
blocks and the sizes: `scaled_mm_kind.how`.

Arguments of all forms: a [M, K] and b [N, K], FP8, row-major; a_inv and b_inv, the inverses of their scales, float32, one a
block, [rows / block rows, columns / block columns] rounded up, or [1] for one scale; bias, [N] or None. The result is [M, N] of
`out_dtype`. All forms are plain torch functions, except for the Triton kernel (`block_gemm`).

cuBLASLt and CUTLASS add a bias in half precision only, in the result's dtype (`fusable`). Any other bias is added to a float32
product after the matmul. Inductor fuses this sum into the kernel that reads it, and the sum is rounded once.

`_scaled_mm` finds the kind of scaling from shapes and strides. So scales are written into memory of their own and read through
`as_strided`, whose strides Inductor keeps (`scale_layouts`). `_scaled_mm_v2` is told the kind, but it is not used: Inductor
(2.13) lowers it to `_scaled_mm` with the scales in the wrong orientation, or refuses the scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .. import compat
from ..config.recipe import WHOLE
from ..devices.gpu import gpu_of
from ..ir import ops
from ..ir.fx_utils import value
from ..ir.metadata import FORM
from . import scaled_mm_kind
from .block_gemm import launch_gemm
from .scale_layouts import of_blocks, of_rows, stored, swizzled
from .scaled_mm_kind import AFTER, BLOCKWISE, EMULATED, MX, REFERENCE, ROWWISE, TENSORWISE, TRITON

Inline = Callable[..., Node]  # writes a plain torch function into the graph, before a node

aten = torch.ops.aten

MX_COLUMNS = 32  # elements that share an E8M0 scale


def lower_mm(node: Node, inline: Inline) -> Node:
    """Insert the form of an `ops.scaled_mm` or `ops.block_mm` before its node. Returns the node of the result."""
    args: Any = node.args
    form = form_of(node)
    if form != TRITON:
        function, given = call_of(node, form)
        return inline(node, function, *given)
    a, b, a_inv, b_inv, bias, out_dtype, _, *blocks = args
    return launch_gemm(node, inline, gpu_of(value(node).device), a, b, a_inv, b_inv, bias, out_dtype, *map(tuple, blocks))


def form_of(node: Node) -> str:
    """The form of a matmul: one of those of `scaled_mm_kind`, or TENSORWISE, where each operand has one scale."""
    if FORM in node.meta:
        return node.meta[FORM]
    args: Any = node.args
    gpu = gpu_of(value(node).device)
    if node.target is ops.scaled_mm:
        return REFERENCE if gpu is None else TENSORWISE
    a, b, _, _, bias, out_dtype, fast_accum, a_block, b_block = args
    (m, k), n = value(a).shape, value(b).shape[0]
    made = product_dtype(None if bias is None else value(bias), out_dtype)
    return scaled_mm_kind.how(gpu, a_block, b_block, m, n, k, made, fast_accum, not compat.triton.reorders())


def call_of(node: Node, form: str) -> tuple[Callable[..., Tensor], tuple]:
    """The function and the arguments (nodes and constants) of a matmul in this form, which is not TRITON."""
    args: Any = node.args
    *operands, fast_accum = args[:7]
    blocks = tuple(map(tuple, args[7:]))
    if form == REFERENCE:
        return (ops.block_product if blocks else ops.product), (*operands, fast_accum, *blocks)
    forms: dict[str, tuple[Callable[..., Tensor], tuple]] = {
        TENSORWISE: (tensorwise, (fast_accum,)),
        ROWWISE: (rowwise, (fast_accum,)),
        AFTER: (rowwise_after, (fast_accum,)),
        BLOCKWISE: (blockwise, blocks),
        MX: (mx, blocks),
        EMULATED: (emulated, blocks or (WHOLE, WHOLE)),
    }
    function, more = forms[form]
    return function, (*operands, *more)


def fusable(bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Can the matmul itself add this bias, or is there none to add?"""
    return bias is None or bias.dtype == out_dtype and out_dtype != torch.float32


def product_dtype(bias: Tensor | None, out_dtype: torch.dtype) -> torch.dtype:
    """The dtype that the matmul itself returns."""
    return out_dtype if fusable(bias, out_dtype) else torch.float32


def scaled(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """`_scaled_mm` with scales in the layout that it expects, and a bias of any dtype."""
    fused = bias if fusable(bias, out_dtype) else None
    made = product_dtype(bias, out_dtype)
    out = aten._scaled_mm.default(a, b.t(), a_scale, b_scale, fused, None, made, fast_accum)
    return out if fused is bias else finished(out, bias, out_dtype)


def finished(product: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """A float32 product plus a bias, rounded once."""
    return (product if bias is None else product + bias.to(torch.float32)).to(out_dtype)


def tensorwise(
    a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """A scale for a and one for b."""
    # views, not `as_strided` without an offset: there, Inductor 2.11 drops the offset of the input (pytorch#175325)
    return scaled(a, b, a_inv.view(1, 1), b_inv.view(1, 1), bias, out_dtype, fast_accum)


def rowwise(
    a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """A scale for each row of a and of b, or one for all rows: `_scaled_mm` takes them as [M, 1] and [1, N]."""
    a_scale = stored(of_rows(a_inv, a), [a.shape[0], 1])
    b_scale = stored(of_rows(b_inv, b), [1, b.shape[0]])
    return scaled(a, b, a_scale, b_scale, bias, out_dtype, fast_accum)


def rowwise_after(
    a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """The same, but the scales are multiplied with the float32 result of the matmul, numbers up to 448 * 448 * K. Inductor
    fuses this into the kernel that reads the result."""
    one = torch.ones(1, 1, dtype=torch.float32, device=a.device)
    product = aten._scaled_mm.default(a, b.t(), one, one, None, None, torch.float32, fast_accum)
    return finished(product * of_rows(a_inv, a).reshape(-1, 1) * of_rows(b_inv, b).reshape(1, -1), bias, out_dtype)


def blockwise(
    a: Tensor,
    b: Tensor,
    a_inv: Tensor,
    b_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    a_block: Sequence[int],
    b_block: Sequence[int],
) -> Tensor:
    """Blocks of 1 x 128 and 128 x 128 by cuBLASLt. Sums of 128 products are always promoted to float32 there.

    The scales of a are [M, K / 128], column by column in memory, or [M / 128, K / 128], row by row. Those of b are the
    transposes of such tensors, with N for M.
    """
    a_scale = of_blocks(a_inv, a_block)
    b_scale = of_blocks(b_inv, b_block).t()
    return scaled(a, b, a_scale, b_scale, bias, out_dtype, False)


def mx(
    a: Tensor,
    b: Tensor,
    a_inv: Tensor,
    b_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    a_block: Sequence[int],
    b_block: Sequence[int],
) -> Tensor:
    """Blocks of 1 x 32 or 32 x 32 by the tensor cores of Blackwell. Their K is a multiple of 32: copies are padded unless K is
    known to be one."""
    a_scale, b_scale = swizzled(a_inv, a.shape[0], a_block[0]), swizzled(b_inv, b.shape[0], b_block[0])
    return scaled(_padded(a), _padded(b), a_scale, b_scale, bias, out_dtype, False)


def emulated(
    a: Tensor,
    b: Tensor,
    a_inv: Tensor,
    b_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    a_block: Sequence[int],
    b_block: Sequence[int],
) -> Tensor:
    """A bf16 matmul, with float32 sums, of the values that the operands stand for. Scales of one a row are multiplied with its
    result."""
    x, x_rows = dequantized(a, a_inv, a_block)
    y, y_rows = dequantized(b, b_inv, b_block)
    if x_rows is None and y_rows is None and bias is None and out_dtype == torch.bfloat16:
        return torch.mm(x, y.t())
    product = aten.mm.dtype(x, y.t(), torch.float32)
    if x_rows is not None:
        product = product * x_rows.reshape(-1, 1)
    if y_rows is not None:
        product = product * y_rows.reshape(1, -1)
    return finished(product, bias, out_dtype)


def dequantized(copy: Tensor, inverse: Tensor, block: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """The values of an operand in bf16, and the factors that its rows have still to be multiplied with (None: no factors).

    Exact where the inverses are powers of two: an FP8 number has 4 significant bits at most, bf16 has 8, and as many exponents
    as float32.
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
    return stored(torch.nn.functional.pad(copy.view(torch.uint8), (0, whole - columns)), [rows, whole]).view(copy.dtype)
