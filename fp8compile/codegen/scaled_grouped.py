"""The lowering of FP8 matmuls of groups (`ir.grouped.grouped_mm`), and the choice between their forms.

    grouped        `aten._scaled_grouped_mm`, the first version: Inductor has no lowering for the second. It
                   takes a scale for each row of both operands, so one scale is spread over a vector. Its
                   result is bf16
    triton         a kernel of our own (`grouped_gemm`): any GPU with FP8, any blocks
    emulated       `aten._grouped_mm`, in bf16, of the values that the FP8 operands stand for: none of FP8's
                   speed
    reference      float32 on a CPU, where the operator stays as it is

ATen takes b transposed, as a view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import compat
from ..config.recipe import ROW
from ..devices.gpu import gpu_of
from ..ir import ops
from ..ir.fx_utils import Emitter, arg, aten, element, element_of, is_data, value
from ..ir.grouped import grouped_mm, order_of_groups, taken
from ..ir.schemas import GroupedProduct, product_of
from . import launch
from .grouped_gemm import launch_grouped, launch_order
from .indexing import quotient, sizes
from .lowerings import copied, stored
from .scaled_mm import form_of
from .scaled_mm_kind import GROUPED, TRITON


def lower_order(node: Node, inline: Callable[..., Node]) -> None:
    """Replace a `group_order`'s results by those of a kernel, or of plain torch if none can be launched."""
    items = list(node.users)
    if compat.triton.reorders():
        made = [inline(node, _of_order, *node.args, which) for which in range(3)]
    else:
        node.args = (_neighbours(node, inline, arg(node, 0)), *node.args[1:])
        made = launch_order(node)
    for item in items:
        item.replace_all_uses_with(made[int(item.args[1])])  # type: ignore[arg-type]
        node.graph.erase_node(item)


def _neighbours(node: Node, inline: Callable[..., Node], offs: Node) -> Node:
    """Ends of groups that are neighbours in memory, as our kernels read them."""
    return offs if value(offs).stride(0) == 1 else inline(node, copied, offs)


def _of_order(offs: Tensor, rows: Any, align: int, which: int) -> Tensor:
    return order_of_groups(offs, rows, align)[which]


def lower_grouped_mm(
    node: Node, inline: Callable[..., Node], scales: tuple[Node, Node] | None = None
) -> Node:
    """Insert the form of a `grouped_mm` before it (`scales`: `spread_scales`). Returns the result's node."""
    if scales is not None:
        return inline(node, multiplied, product_of(node), *scales)
    form = form_of(node)
    if form == TRITON:
        product = product_of(node)
        product = product._replace(offs=_neighbours(node, inline, product.offs))
        return launch_grouped(node, inline, gpu_of(value(node).device), product)
    function, args = call_of(node, form)
    return inline(node, function, *args)


def call_of(node: Node, form: str) -> tuple[Callable[..., Tensor], tuple]:
    """The function and the arguments of a matmul in this form, which is not TRITON."""
    return (grouped if form == GROUPED else emulated), (product_of(node),)


def spread_scales(graph: Graph, inline: Callable[..., Node]) -> dict[Node, tuple[Node, Node]]:
    """For matmuls by ATen whose operands have one scale each: these scales, spread over the vectors that it
    takes. One kernel writes those of several matmuls if the scales are stored ones, there from the start."""
    chunks: list[list[Node]] = []  # which are spread together
    for node in graph.find_nodes(op="call_function", target=grouped_mm):
        if form_of(node) != GROUPED or any(value(inverse).dim() != 1 for inverse in _inverses(node)):
            continue
        # no part of a vector can be taken by such a size, up to torch 2.11
        if is_data(value(product_of(node).a).shape[0]):
            continue
        if chunks and len(chunks[-1]) < TOGETHER and all(map(_are_stored, (node, chunks[-1][0]))):
            if all(element_of(inverse)[0] < chunks[-1][0] for inverse in _inverses(node)):  # type: ignore[index]
                chunks[-1].append(node)
                continue
        chunks.append([node])
    return {node: scales for chunk in chunks for node, scales in _spread(chunk, inline).items()}


TOGETHER = 4  # matmuls: Inductor writes a concatenation of up to 8 tensors by one kernel


def _are_stored(node: Node) -> bool:
    return all(element_of(inverse) is not None for inverse in _inverses(node))


def _inverses(node: Node) -> tuple[Node, Node]:
    x = product_of(node)
    return x.a_inv, x.b_inv


def _spread(nodes: list[Node], inline: Callable[..., Node]) -> dict[Node, tuple[Node, Node]]:
    """The vectors of these matmuls, (of a, of b), in one tensor that is written before the first of them."""
    emit = Emitter(nodes[0].graph, nodes[0], nodes[0])
    number = launch.Launcher(nodes[0].graph, 0, arg(nodes[0], 0)).number
    inverses: list[Node] = []
    shapes: list[list[Any]] = []
    for node in nodes:
        x = product_of(node)
        (rows, _), (*count, columns, _) = sizes(x.a), sizes(x.b)
        groups = value(x.offs).shape[0]
        shapes += [[groups, columns] if count else [groups * columns], [rows] if count else [groups * rows]]
        for inverse in (x.b_inv, x.a_inv):
            found = element_of(inverse) if inverse > nodes[0] else None
            inverses.append(element(emit, *found) if found is not None else inverse)
    # each begins at a multiple of 16 bytes
    lengths = [quotient(sympy.Mul(*shape) + 3, 4) * 4 for shape in shapes]
    whole = inline(nodes[0], _concatenated, inverses, [number(emit, length) for length in lengths])
    views, start = [], sympy.Integer(0)
    for shape, length in zip(shapes, lengths, strict=True):
        part = emit(aten.slice.Tensor, whole, 0, number(emit, start), number(emit, start + sympy.Mul(*shape)))
        views.append(emit(aten.view.default, part, shape) if len(shape) > 1 else part)
        start += length
    return {node: (views[2 * i + 1], views[2 * i]) for i, node in enumerate(nodes)}


def _concatenated(inverses: list[Tensor], lengths: list) -> Tensor:
    return torch.cat([inverse.expand(length) for inverse, length in zip(inverses, lengths, strict=True)])


def grouped(x: GroupedProduct) -> Tensor:
    """Scales of rows or of whole tensors. In a wgrad each group has a scale for each row: [E * R], group
    after group."""
    count = x.offs.shape[0]
    a_size = x.a.shape[0] if x.b.dim() == 3 else count * x.a.shape[0]
    a_scale = _vector(x.a_inv, [a_size])
    b_scale = _vector(x.b_inv, [count, x.b.shape[1]] if x.b.dim() == 3 else [count * x.b.shape[0]])
    return multiplied(x, a_scale, b_scale)


def multiplied(x: GroupedProduct, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """a_scale [M], b_scale [E, N]; in a wgrad [E * R] and [E * C]."""
    given = x.a, x.b.transpose(-2, -1), a_scale, b_scale, x.offs
    out = aten._scaled_grouped_mm.default(*given, None, None, torch.bfloat16, x.fast_accum)
    return out.to(x.out_dtype)


def _vector(inverse: Tensor, shape: Sequence) -> Tensor:
    """Inverses as `shape`, in memory of their own: one for all is repeated."""
    if inverse.dim() == 1:
        return inverse.expand(shape).clone()
    if inverse.dim() == 3 and inverse.shape[1] == 1 != shape[1]:  # one a matrix
        inverse = inverse.expand(shape[0], shape[1], 1).clone()
    return stored(inverse, shape)


def emulated(x: GroupedProduct) -> Tensor:
    """A bf16 matmul of the values that the operands stand for. They are exact where scales are powers of two,
    and else rounded to 8 significant bits."""
    a, b = _values(x.a, x.a_inv, x.offs, x.a_block), _values(x.b, x.b_inv, x.offs, x.b_block)
    return aten._grouped_mm.default(a, b.transpose(-2, -1), x.offs).to(x.out_dtype)


def _values(copy: Tensor, inverse: Tensor, offs: Tensor, block: Sequence[int]) -> Tensor:
    wide = copy.to(torch.float32)
    if inverse.dim() == 1:
        factor = inverse
    elif copy.dim() == 3:
        factor = inverse
        for dim, size in enumerate(block, 1):
            factor = factor.repeat_interleave(size, dim) if size > 1 else factor
    elif tuple(block) == ROW and inverse.shape[1] != 1:  # one for each row of each group, [E, R]
        column = torch.arange(copy.shape[1], device=copy.device)
        group = (column.unsqueeze(1) >= offs).sum(1).clamp(max=offs.shape[0] - 1)
        factor = taken(inverse, group).t()
    else:
        factor = ops.spread(inverse, copy.shape, block)
    return (wide * factor).to(torch.bfloat16)


def amax_of_groups(x: Tensor, offs: Tensor, *_: Tensor) -> Tensor:
    """[E, C] float32: the largest magnitude of each column in each group, by a maximum of the bits of
    magnitudes: the bits of NaN are above those of infinity."""
    count = offs.shape[0]
    row = torch.arange(x.shape[0], device=x.device)
    group = (row.unsqueeze(1) >= offs).sum(1).unsqueeze(1).expand(x.shape)
    bits = x.abs().to(torch.float32).view(torch.int32)
    made = torch.zeros(count + 1, x.shape[1], dtype=torch.int32, device=x.device)
    return made.scatter_reduce(0, group, bits, "amax").narrow(0, 0, count).view(torch.float32)
