"""The part of `quantize` that writes merged matmuls (see `merge`).

    w8 = side_by_side([wq8, wk8], 0); y = scaled_mm(x8, w8, inv_x, inv_w); q = slice(y, 1, 0, Nq); k = slice(y, 1, Nq, ..)
    dy8 = side_by_side([dq8, dk8], 1); w8t = side_by_side([wq8t, wk8t], 1); dx = scaled_mm(dy8, w8t, ..)
    dy8t = side_by_side([dq8t, dk8t], 0); dw = scaled_mm(dy8t, x8t, ..); dwq = slice(dw, 0, 0, Nq); ..

The copies are written as without merging, but with a scale for all of them. `place` lets the kernels that cast write into one
buffer, so that `side_by_side` is no copy.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Graph, Node

from .. import compat
from ..ir import merged, ops
from ..ir.fx_utils import CASTS, SAME, VIEWS, Emitter, Matrix, arg, aten, call_function, modules_of, restride, value
from ..ir.matmul import GEMMS, RESULT, Gemm, Matmul
from .merge import SUMS, Merged
from .plan import Operand

Copies = tuple[tuple[Operand, Matrix, bool], ...]  # of one operand of all members; or of both operands of one matmul


class Writer(Protocol):
    """The part of `quantize._Writer` that is needed."""

    graph: Graph
    start: Node
    replaced: dict[Node, Node]
    partners: dict[Operand, tuple[Operand, ...]]

    def operands(self, matmul: Matmul) -> list[tuple[Operand, Matrix, bool]]: ...
    def copy(self, operand: Operand, matrix: Matrix, transposed: bool) -> Node: ...
    def scale_of(self, operand: Operand, matrix: Matrix, transposed: bool) -> tuple[Node, Node]: ...
    def at(self, anchor: Node, operand: Operand, **meta) -> Emitter: ...


class Products:
    """Writes each merged matmul when the first of its members is to be replaced."""

    def __init__(self, writer: Writer, groups: Iterable[Merged]):
        self.writer = writer
        self.of: dict[Matmul, tuple[Merged, Gemm]] = {}
        self.written: dict[tuple, Node] = {}
        for group in groups:
            for gemm, members in group.gemms.items():
                self.of.update(dict.fromkeys(members, (group, gemm)))
                for side in self.sides(members):
                    partners = tuple(operand for operand, _, _ in side)
                    if len(set(partners)) > 1:
                        writer.partners.update(dict.fromkeys(partners, partners))

    def replace(self, matmul: Matmul) -> bool:
        """Replace a matmul, and all that are merged with it; False if it is merged with none."""
        if matmul not in self.of:
            return False
        group, gemm = self.of[matmul]
        members = group.gemms[gemm]
        if matmul is members[0]:
            {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}[gemm](group, members)
        return True

    def fprop(self, group: Merged, members: Sequence[Matmul]) -> None:
        first = min(x.node for x in members)
        emit = Emitter(self.writer.graph, first, first)
        biases = [addend for x in members if (addend := x.addend) is not None]
        bias = emit(aten.cat.default, biases) if biases else None
        if "dgrad" in group.gemms:
            self.weights(group)
        made = self.product(emit, members, 0, bias)
        parts = self.slices(emit, made, members, 1)
        dense = {"memory_format": torch.contiguous_format}
        parts = [emit(aten.clone.default, x, **dense) if m in group.apart else x for m, x in zip(members, parts, strict=True)]
        for matmul, part in zip(members, parts, strict=True):
            self.instead(matmul.node, part)
            restride(self.writer.graph, part)

    def dgrad(self, group: Merged, members: Sequence[Matmul]) -> None:
        total = group.total
        assert total is not None
        emit = Emitter(self.writer.graph, total, members[0].node)
        made = self.product(emit, members, 1)
        ours = {x.node for x in members}
        node = members[0].node
        while node is not total:  # what the sum did with one of them, and what else it adds
            before, (node,) = node, node.users
            if not call_function(node, SUMS):
                made = emit(node.target, made, *node.args[1:], **node.kwargs)
            elif (rest := _without(emit, next(x for x in node.args if x is not before), ours)) is not None:  # type: ignore[arg-type]
                made = emit(node.target, made, rest)
        total.replace_all_uses_with(made)
        self.writer.replaced[total] = made

    def wgrad(self, group: Merged, members: Sequence[Matmul]) -> None:
        last = max(x.node for x in members)
        emit = Emitter(self.writer.graph, last, last)
        made = self.product(emit, members, 0)
        for matmul, part in zip(members, self.slices(emit, made, members, 0), strict=True):
            self.instead(matmul.node, part)

    def product(self, emit: Emitter, members: Sequence[Matmul], dim: int, bias: Node | None = None) -> Node:
        """The FP8 matmul of all members. `dim`: the dimension of K-major copies along which they are side by side."""
        sides = self.sides(members)
        copies = [self.side(side, dim) for side in sides]
        inverses = [self.writer.scale_of(*side[0])[1] for side in sides]
        first = members[0]
        fast = first.recipe.use_fast_accum[GEMMS.index(first.gemm)]
        return emit(ops.scaled_mm, *copies, *inverses, bias, value(first.node).dtype, fast)

    def side(self, side: Copies, dim: int) -> Node:
        """The copies of one operand of all members: one copy, if they share the tensor, or one buffer."""
        if _key(side) in self.written:
            return self.written[_key(side)]
        parts = [self.writer.copy(*part) for part in side]
        operand = side[0][0]
        if len(set(parts)) == 1:
            return parts[0]
        recompute = operand.reader.meta.get("recompute")
        return self.writer.at(max(parts).next, operand, recompute=recompute)(merged.side_by_side, parts, dim)

    def weights(self, group: Merged) -> None:
        """Write the weights' copies in both layouts, if the forward keeps those that dgrad reads."""
        plain, turned = (self.sides(group.gemms[gemm])[1] for gemm in ("fprop", "dgrad"))
        operand = plain[0][0]
        if operand.recipe.recast_weights is True or "recompute" in operand.reader.meta:
            return
        copies = [[self.writer.copy(*part) for part in side] for side in (plain, turned)]
        emit = self.writer.at(max(x for parts in copies for x in parts).next, operand, recompute=compat.MUST_SAVE)
        both = emit(merged.both_sides, *copies)
        for i, side in enumerate((plain, turned)):
            self.written[_key(side)] = emit(operator.getitem, both, i)

    def sides(self, members: Sequence[Matmul]) -> list[Copies]:
        return list(zip(*map(self.writer.operands, members), strict=True))

    def slices(self, emit: Emitter, made: Node, members: Sequence[Matmul], dim: int) -> list[Node]:
        ends = [0]
        for matmul in members:
            ends.append(ends[-1] + (matmul.n if dim else matmul.m))
        parts = [emit(aten.slice.Tensor, made, dim, *ends[i : i + 2]) for i in range(len(members))]
        for part, matmul in zip(parts, members, strict=True):
            part.meta |= modules_of(matmul.node)
        return parts

    def instead(self, node: Node, part: Node) -> None:
        part.meta[RESULT] = node.meta.get(RESULT)
        node.replace_all_uses_with(part)
        self.writer.replaced[node] = part
        if node is self.writer.start:
            self.writer.start = node.next
        self.writer.graph.erase_node(node)


def _key(side: Copies) -> tuple:
    return tuple((operand, transposed) for operand, _, transposed in side)


def _without(emit: Emitter, node: Node, ours: set[Node]) -> Node | None:
    """A sum without some of its terms: the node itself if it has none of them, None if no other term is left."""
    if node in ours:
        return None
    if not call_function(node, (*SUMS, *VIEWS, *SAME, *CASTS)):
        return node
    terms: list[Any] = list(node.args[:2]) if call_function(node, SUMS) else [arg(node, 0)]
    rest = [x if not isinstance(x, Node) else _without(emit, x, ours) for x in terms]
    if rest == terms:
        return node
    left = [x for x in rest if x is not None]
    if len(left) == len(terms):
        return emit(node.target, *left, *node.args[len(left):], **node.kwargs)
    return left[0] if left else None
