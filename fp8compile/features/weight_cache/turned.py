"""turned: which copies of weights need not be kept between calls, with `cache_weights` and `recast_weights=True`.

    dgrad reads w8t = quantize(w, scale, transposed=True)    ->    w8t = transposed(w8), in backward

fprop reads w8, which is kept. Where both layouts have the same scales, they hold the same bytes: one scale a tensor, or square
blocks. Then backward transposes the copy of the other layout, which moves 2 bytes a parameter, and one byte a parameter is kept
instead of two. With scales of rows, or of 1 x 32 elements, both are kept.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch.fx import Graph, Node

from ... import compat
from ...ir import merged, ops
from ...ir.casts import copies_at
from ...ir.fx_utils import PERMUTES, Emitter, arg, behind, call_function, same_shape, value


def turned(copies: Iterable[Node], moving: Container[Node]) -> dict[Node, Node]:
    """Copy that is not to be kept -> the copy of the other layout, of which backward makes it. `copies`: those that may be
    spared; `moving`: all nodes that leave the graph. Changes nothing."""
    casts = [node for node in copies if node.target in (ops.quantize, merged.side_by_side)]
    found: dict[Node, Node] = {}
    for late in casts:
        if late not in found.values() and all(user not in moving and compat.is_backward(user) for user in late.users):
            other = next((x for x in casts if x not in found and _turns(x, late)), None)
            if other is not None:
                found[late] = other
    return found


def turn(graph: Graph, copy: Node, other: Node) -> None:
    """Let the readers of a copy have `other`, transposed where the first of them is."""
    emit = Emitter(graph, min(copy.users), copy, recompute=compat.MUST_RECOMPUTE, ac_graph_id=None)
    copy.replace_all_uses_with(emit(ops.transposed, other))


def _turns(copy: Node, late: Node) -> bool:
    """Is `late` bitwise the transposition of `copy`?"""
    rows, columns = value(copy).shape
    if not same_shape(value(late).shape, (columns, ops.padded_rows(rows))):
        return False
    if call_function(copy, (merged.side_by_side,)) and call_function(late, (merged.side_by_side,)):
        parts, others = arg(copy, 0), arg(late, 0)
        if len(parts) != len(others) or {arg(copy, 1), arg(late, 1)} != {0, 1}:
            return False
        full = all(same_shape(value(b).shape, value(a).shape[::-1]) for a, b in zip(parts, others, strict=True))
        return full and all(map(_both_layouts, parts, others))
    return _both_layouts(copy, late)


def _both_layouts(one: Node, other: Node) -> bool:
    """Are these casts of one tensor in both layouts, with the same scale for each element?"""
    if not (call_function(one, (ops.quantize,)) and call_function(other, (ops.quantize,))):
        return False
    (a,), (b,) = copies_at(one), copies_at(other)
    square = a.rows is b.rows is None and a.block[0] == a.block[1] and a.transposed is not b.transposed
    alike = a._replace(scale=None, transposed=True) == b._replace(scale=None, transposed=True)
    return square and alike and behind(a.scale, PERMUTES) is behind(b.scale, PERMUTES)
