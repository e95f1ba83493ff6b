"""hoist: take the casts of weights out of the graph, with `cache_weights`.

    w8, w8t = quantize_both(w, scale); y = scaled_mm(x8, w8, ..)     ->     y = scaled_mm(x8, copy_0, ..)

The copies become inputs of the graph, and the operators that made them a graph of their own, from parameters
to copies. It is called when a weight has changed (`weight_cache`). So under gradient accumulation a weight is
cast once a step and not once a micro-batch.

What moves is what is computed from parameters alone by our operators and by views. That holds for every
recipe, and for merged matmuls, whose copies are one buffer. With `cache_weights` a weight is scaled by its
current amax, so nothing here reads or moves scaling state.

With `recast_weights=True`, one copy of a weight is kept where both layouts have the same scales, and so the
same bytes: one scale a tensor, or square blocks. Backward transposes it, which moves 2 bytes a parameter.
With scales of rows, or of 1 x 32 elements, both are kept.

    dgrad reads w8t = quantize(w, scale, transposed=True)    ->    w8t = transposed(w8), in backward

The inputs of a graph are fixed before it is traced, and the copies are known after `quantize`. So a graph has
`ROOM` inputs to spare for each use of these parameters. The copies take the first of them, which get their
sizes here. What does not fit is cast in the graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.fx import Graph, Node

from ... import compat
from ...ir import merged, ops
from ...ir.fx_utils import (
    CASTS,
    PERMUTES,
    SAME,
    SLICES,
    VIEWS,
    Emitter,
    arg,
    aten,
    become,
    behind,
    call_function,
    is_tensor,
    reached,
    same_shape,
    value,
)
from ...ir.schemas import copies_at

if TYPE_CHECKING:
    from ...passes.joint import Joint

CACHED = "FP8 copies of weights are kept between calls (cache_weights): {:.1f} MB"
ROOM = 4  # in two layouts, each with scales of its own
MADE: tuple = (ops.amax, ops.amax_blocks, ops.current_scale, ops.inverse, ops.quantize, ops.quantize_both)
MADE += (ops.transposed, merged.largest, merged.side_by_side, merged.both_sides)
PASSED_ON = (*VIEWS, *PERMUTES, *SLICES, *SAME, *CASTS, aten.clone.default, operator.getitem)


class Layout(NamedTuple):
    """A tensor that a graph gets from outside."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Cache:
    """The graph's `room` inputs for copies of the parameters `joint.cached`, from position `first` on."""

    first: int = 0
    room: int = 0


@dataclass(frozen=True)
class Hoisted:
    """The casts of a graph. `graph` takes the parameters at the positions `inputs` and returns the copies."""

    graph: Graph
    inputs: tuple[int, ...]
    copies: tuple[Layout, ...]

    @property
    def bytes(self) -> int:
        return sum(math.prod(layout.shape) * layout.dtype.itemsize for layout in self.copies)


def hoist(joint: Joint) -> int:
    """Move the casts, if there are any to move; returns how many copies that are. The amaxes that the state
    reads stay (also that of a weight, where it is the input of another matmul)."""
    written = joint.form
    cache = joint.extras.of(Cache)
    if joint.inference or not joint.cached:
        return 0
    graph, matmuls, amaxes = joint.graph, joint.matmuls, written.amaxes.values()
    placeholders = {compat.dynamo.input_index(node): node for node in graph.find_nodes(op="placeholder")}
    wanted = {matmul.parameter for matmul in matmuls if matmul.fp8 and matmul.recipe.cache_weights}
    known = {node: i for i, node in placeholders.items() if i in joint.cached and node in wanted}
    weights = {node: i for node, i in known.items() if compat.dynamo.is_whole(node)}
    moving, copies = _movable(graph, weights)
    while len(copies) > cache.room:  # many layers with one weight, or slices of it
        del weights[max(weights, key=lambda weight: len(_movable(graph, {weight: weights[weight]})[1]))]
        moving, copies = _movable(graph, weights)
    keep = {matmul.parameter for matmul in matmuls if matmul.fp8 and matmul.recipe.recast_weights is not True}
    sparing = {node: i for node, i in weights.items() if node not in keep}
    alone = _from(graph, sparing) if sparing else {}
    spared = _turned([node for node in copies if node in alone], moving)
    copies = [node for node in copies if node not in spared]
    if not copies:
        return 0
    layouts = tuple(Layout(x.dtype, tuple(x.shape), tuple(x.stride())) for x in map(value, copies))
    made, used = _extracted(copies, weights)
    for i, node in enumerate(copies):
        become(placeholders[cache.first + i], value(node))
        node.replace_all_uses_with(placeholders[cache.first + i], lambda user: user not in moving)
    for node, other in spared.items():
        _turn(graph, node, placeholders[cache.first + copies.index(other)])
    for node in reversed(moving):
        if node not in weights and not node.users and node not in amaxes:
            graph.erase_node(node)
    hoisted = Hoisted(made, used, layouts)
    joint.added += [placeholders[cache.first + i].name for i in range(len(copies))]
    joint.remarks.append(CACHED.format(hoisted.bytes / 1e6))
    joint.results.put(hoisted)
    return len(copies)


def _movable(graph: Graph, weights: Mapping[Node, int]) -> tuple[dict[Node, bool], list[Node]]:
    """As `_from`; and the copies among them that the rest of the graph reads."""
    moving = _from(graph, weights)
    ours = [node for node, is_ours in moving.items() if is_ours and is_tensor(node)]
    copies = [node for node in ours if any(user not in moving for user in node.users)]
    return moving, [node for node in copies if all(isinstance(size, int) for size in value(node).shape)]


def _from(graph: Graph, weights: Mapping[Node, int]) -> dict[Node, bool]:
    """What is computed from these inputs alone, in order; True: one of our operators is on the way. Without
    the views at the end, which the graph takes by itself: two views of one copy are one copy."""
    found = dict.fromkeys(weights, False)
    for node in graph.nodes:
        its = node.all_input_nodes
        from_these = node.op == "call_function" and its and all(x in found for x in its)
        if from_these and node.target in (*MADE, *PASSED_ON):
            found[node] = node.target in MADE or any(found[x] for x in its)
    for node in reversed(list(found)):
        is_view = found[node] and node.target in (*VIEWS, *PERMUTES)
        if is_view and not any(user in found for user in node.users):
            del found[node]
    return found


def _turned(copies: Iterable[Node], moving: Container[Node]) -> dict[Node, Node]:
    """Copy that is not to be kept -> the copy of the other layout, of which backward makes it. `copies`:
    those that may be spared; `moving`: all nodes that leave the graph. Changes nothing."""
    casts = [node for node in copies if node.target in (ops.quantize, merged.side_by_side)]
    found: dict[Node, Node] = {}
    for late in casts:
        is_late = all(user not in moving and compat.dynamo.is_backward(user) for user in late.users)
        if is_late and late not in found.values():
            other = next((x for x in casts if x not in found and _turns(x, late)), None)
            if other is not None:
                found[late] = other
    return found


def _turn(graph: Graph, copy: Node, other: Node) -> None:
    """Let the readers of a copy have `other`, transposed where the first of them is."""
    emit = Emitter(graph, min(copy.users), copy, recompute=compat.inductor.MUST_RECOMPUTE, ac_graph_id=None)
    copy.replace_all_uses_with(emit(ops.transposed, other))


def _turns(copy: Node, late: Node) -> bool:
    """True if `late` is bitwise the transposition of `copy`."""
    rows, columns = value(copy).shape
    if not same_shape(value(late).shape, (columns, ops.padded_rows(rows))):
        return False
    if call_function(copy, (merged.side_by_side,)) and call_function(late, (merged.side_by_side,)):
        parts, others = arg(copy, 0), arg(late, 0)
        if len(parts) != len(others) or {arg(copy, 1), arg(late, 1)} != {0, 1}:
            return False
        pairs = zip(parts, others, strict=True)
        full = all(same_shape(value(b).shape, value(a).shape[::-1]) for a, b in pairs)
        return full and all(map(_both_layouts, parts, others))
    return _both_layouts(copy, late)


def _both_layouts(one: Node, other: Node) -> bool:
    """True if these are casts of one tensor in both layouts, with the same scale for each element."""
    if not (call_function(one, (ops.quantize,)) and call_function(other, (ops.quantize,))):
        return False
    (a,), (b,) = copies_at(one), copies_at(other)
    square = a.rows is b.rows is None and a.block[0] == a.block[1] and a.transposed is not b.transposed
    alike = a._replace(scale=None, transposed=True) == b._replace(scale=None, transposed=True)
    return square and alike and behind(a.scale, PERMUTES) is behind(b.scale, PERMUTES)


def _extracted(copies: Sequence[Node], weights: Mapping[Node, int]) -> tuple[Graph, tuple[int, ...]]:
    """A graph that makes the copies, and the positions of the parameters that it reads."""
    needed = set(reached(copies, lambda node: node.all_input_nodes))
    made = Graph()
    twins: dict[Node, Node] = {}
    for node in sorted(needed):
        is_input = node in weights
        twins[node] = made.placeholder(node.name) if is_input else made.node_copy(node, twins.__getitem__)
        twins[node].meta = dict(node.meta)
    made.output(tuple(twins[node] for node in copies))
    return made, tuple(index for node, index in weights.items() if node in needed)
