"""scatters: write the backward of a permutation as a lookup of rows.

Experts permute their results back to the order of the tokens, `y = x[inverse]`. Autograd does not know that
no row is read twice, so its backward fills zeros and adds each row:

    inverse = index_put(.., [order], arange(n))          order: the second result of a sort
    gx = index_put(zeros, [inverse], gy, accumulate)     ->     gx = gy[order]

A lookup fuses with what reads it, the casts of the gradient included; a scatter does not. If gy holds each
row of dy several times, one for each expert of a token, the lookup reads dy: gx = dy[order // copies].
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from ...ir.fx_utils import SAME, VIEWS, Emitter, arg, aten, behind, call_function, same_shape, value
from ...ir.matmul import offs_of
from ...passes.joint import Joint

SORTS = (aten.sort.default, aten.sort.stable)


def scatters(joint: Joint) -> int:
    """Returns how many scatters were replaced, in a graph with grouped matmuls."""
    graph = joint.graph
    grouped = graph.find_nodes(op="call_function", target=aten._grouped_mm.default)
    if not any(offs_of(node) is not None for node in grouped):
        return 0
    replaced = 0
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        order = _order(node)
        if order is None:
            continue
        emit, given = Emitter(graph, node, node), arg(node, 2)
        whole, copies = _copied(given)
        if copies > 1:
            order = emit(aten.div.Tensor_mode, order, copies, rounding_mode="floor")
        node.replace_all_uses_with(emit(aten.index.Tensor, whole, [order]))
        graph.erase_node(node)
        replaced += 1
    return replaced


def _order(node: Node) -> Node | None:
    """The permutation whose inverse a scatter adds by; None for any other scatter."""
    if len(node.args) < 4 or not node.args[3]:
        return None
    zeros, indices, given = (arg(node, i) for i in range(3))
    if not call_function(zeros, (aten.full.default,)) or arg(zeros, 1) != 0 or value(given).dim() != 2:
        return None
    inverse = behind(indices[0], SAME)
    if len(indices) > 1 or not call_function(inverse, (aten.index_put.default,)):
        return None
    if any(map(bool, inverse.args[3:])):  # it accumulates
        return None
    at, counted = arg(inverse, 1), behind(arg(inverse, 2), SAME)
    order = behind(at[0], SAME)
    if len(at) > 1 or not _is_permutation(order) or not _counts(counted, value(order).shape):
        return None
    rows = (value(given).shape[:1], value(zeros).shape[:1], value(inverse).shape)
    return order if all(same_shape(shape, value(order).shape) for shape in rows) else None


def _is_permutation(node: Any) -> bool:
    taken = call_function(node, (operator.getitem,)) and arg(node, 1) == 1
    return bool(taken and call_function(arg(node, 0), SORTS) and value(node).dim() == 1)


def _counts(node: Any, shape: Any) -> bool:
    """True if this is arange(n), of this shape. In the joint graph it is an iota."""
    if str(getattr(node, "target", "")) != "prims.iota.default":
        return False
    given = node.kwargs
    return given.get("start", 0) == 0 and given.get("step", 1) == 1 and same_shape(value(node).shape, shape)


def _copied(given: Node) -> tuple[Node, int]:
    """(dy, copies) if `given` holds each row of dy so often, one below the other; (given, 1) for others."""
    expanded = behind(given, (*VIEWS, aten.clone.default))
    if not call_function(expanded, (aten.expand.default,)):
        return given, 1
    single, shape = arg(expanded, 0), value(expanded).shape
    repeats = value(single).dim() == len(shape) == 3 and isinstance(shape[1], int)
    if not repeats or value(single).shape[1] != 1:
        return given, 1
    rows = behind(single, VIEWS)
    fits = value(rows).dim() == 2 and same_shape(value(rows).shape, (shape[0], shape[2]))
    return (rows, shape[1]) if fits and same_shape(value(given).shape[1:], shape[2:]) else (given, 1)
