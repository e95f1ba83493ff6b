"""merged: write the matmuls that `merge` has chosen as one.

    w8 = side_by_side([wq8, wk8], 0); y = scaled_mm(x8, w8, inv_x, inv_w)
    q = slice(y, 1, 0, Nq); k = slice(y, 1, Nq, ..)
    dy8 = side_by_side([dq8, dk8], 1); w8t = side_by_side([wq8t, wk8t], 1); dx = scaled_mm(dy8, w8t, ..)
    dy8t = side_by_side([dq8t, dk8t], 0); dw = scaled_mm(dy8t, x8t, ..); dwq = slice(dw, 0, 0, Nq); ..

The copies stay as they are, but with a scale for all of them. `place` lets the kernels that cast write into
one buffer, so that `side_by_side` is no copy.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from ... import compat
from ...ir import merged, ops
from ...ir.fx_utils import CASTS, SAME, VIEWS, Emitter, arg, aten, call_function, modules_of, restride
from ...ir.matmul import Matmul
from ...ir.metadata import RESULT
from ...ir.schemas import product_of
from ...passes.joint import Joint
from ...passes.layouts import weight_kept
from ...passes.plan import Operand, Plan
from ...passes.quantize import current
from ...passes.written import Written, whole
from .merge import SUMS, Merged, MergedGroups


def write_merged(joint: Joint) -> int:
    """Returns how many matmuls became part of another one."""
    operand_of = {node: copy.operand for copy, node in joint.form.casts.items()}
    groups = joint.extras.of(MergedGroups).merged
    for group in groups:
        _Group(joint.form, joint.plan, group, operand_of).write()
    if groups:
        compat.triton.stable_sort(joint.graph)
    return sum(len(group.every) - len(group.gemms) for group in groups)


class _Group:
    def __init__(self, written: Written, plan: Plan, group: Merged, operand_of: Mapping[Node, Operand]):
        self.written, self.graph, self.group, self.operand_of = written, written.graph, group, operand_of
        self.operands: dict[Matmul, tuple[Operand, ...]] = {}
        for matmul in group.every:
            self.operands[matmul] = tuple(plan.of(matrix, role, matmul) for matrix, role in matmul.roles)
        self.wholes: dict[tuple[Node, ...], Node] = {}  # buffers, by the copies in them

    def write(self) -> None:
        for members in self.group.gemms.values():
            for side in (0, 1):
                self.share_scale(list(dict.fromkeys(self.operands[member][side] for member in members)))
        if "dgrad" in self.group.gemms:
            self.weights()
        for gemm, members in self.group.gemms.items():
            {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}[gemm](members)

    def share_scale(self, operands: list[Operand]) -> None:
        """Give operands one scale, that of the largest of them."""
        scales = [self.written.scales[whole(operand)][0] for operand in operands]
        if len(set(scales)) == 1:
            return
        amaxes = [self.written.amaxes[operand] for operand in operands]
        first = operands[0]
        meta = {"recompute": compat.inductor.MUST_SAVE, "ac_graph_id": None}
        emit = self.written.after(max(amaxes), first, recompute=None, ac_graph_id=None)
        largest = emit(merged.largest, amaxes)
        made = current(self.written.after(largest, first, **meta), first, largest)
        for operand in operands:
            self.written.replace_scale(operand, *made)

    def product(self, members: Sequence[Matmul]) -> list[Node]:
        """The FP8 matmuls of the members."""
        return [self.written.products[member] for member in members]

    def views(self, members: Sequence[Matmul]) -> list[Any]:
        """Their arguments: a `ScaledProduct` of nodes for each."""
        return list(map(product_of, self.product(members)))

    def fprop(self, members: Sequence[Matmul]) -> None:
        products = self.product(members)
        first = min(products)
        emit = Emitter(self.graph, first, first)
        biases = [x.bias for x in self.views(members) if x.bias is not None]
        made = self.joined(emit, members, 0, emit(aten.cat.default, biases) if biases else None)
        parts = self.slices(emit, made, members, 1)
        for i, matmul in enumerate(members):
            if matmul in self.group.apart:
                parts[i] = emit(aten.clone.default, parts[i], memory_format=torch.contiguous_format)
        for product, part in zip(products, parts, strict=True):
            self.instead(product, part)
            restride(self.graph, part)

    def dgrad(self, members: Sequence[Matmul]) -> None:
        products, total = self.product(members), self.group.total
        assert total is not None
        node = products[0]
        emit = Emitter(self.graph, total, node)
        made = self.joined(emit, members, 1)
        while node is not total:  # what the sum did with one of them, and what else it adds
            before, (node,) = node, node.users
            if not call_function(node, SUMS):
                made = emit(node.target, made, *node.args[1:], **node.kwargs)
                continue
            other = next(x for x in node.args if x is not before)
            rest = _without(emit, other, {*products})  # type: ignore[arg-type]
            if rest is not None:
                made = emit(node.target, made, rest)
        total.replace_all_uses_with(made)
        self.drop(total)

    def wgrad(self, members: Sequence[Matmul]) -> None:
        products = self.product(members)
        last = max(products)
        emit = Emitter(self.graph, last, last)
        made = self.joined(emit, members, 0)
        for product, part in zip(products, self.slices(emit, made, members, 0), strict=True):
            self.instead(product, part)

    def joined(self, emit: Emitter, members: Sequence[Matmul], dim: int, bias: Node | None = None) -> Node:
        """The FP8 matmul of all members. `dim`: along which their K-major copies lie side by side."""
        views = self.views(members)
        a, b = (self.side([x[side] for x in views], dim) for side in (0, 1))
        return emit(ops.scaled_mm, *views[0]._replace(a=a, b=b, bias=bias)[:7])

    def side(self, parts: list[Any], dim: int) -> Node:
        """The copies of one operand of all members: one copy, if they share the tensor, or one buffer."""
        if len(set(parts)) == 1:
            return parts[0]
        if (key := tuple(parts)) not in self.wholes:
            operand = self.operand_of[parts[0]]
            recompute = operand.reader.meta.get("recompute")
            emit = self.written.at(max(parts).next, operand, recompute=recompute)
            self.wholes[key] = emit(merged.side_by_side, parts, dim)
        return self.wholes[key]

    def weights(self) -> None:
        """Write the weights' copies in both layouts, if the forward keeps those that dgrad reads."""
        plain, late = ([x.b for x in self.views(self.group.gemms[gemm])] for gemm in ("fprop", "dgrad"))
        operand = self.operand_of[plain[0]]
        if not weight_kept(operand):
            return
        for part in (*plain, *late):  # the buffer of all of them is kept instead
            for node in (part, arg(part, 0)):
                node.meta.pop("recompute", None)
        emit = self.written.at(max(*plain, *late).next, operand, recompute=compat.inductor.MUST_SAVE)
        both = emit(merged.both_sides, plain, late)
        for i, parts in enumerate((plain, late)):
            self.wholes[tuple(parts)] = emit(operator.getitem, both, i)

    def slices(self, emit: Emitter, made: Node, members: Sequence[Matmul], dim: int) -> list[Node]:
        ends = [0]
        for matmul in members:
            ends.append(ends[-1] + (matmul.n if dim else matmul.m))
        parts = [emit(aten.slice.Tensor, made, dim, *ends[i : i + 2]) for i in range(len(members))]
        for part, matmul in zip(parts, members, strict=True):
            part.meta |= modules_of(matmul.node)
        return parts

    def instead(self, product: Node, part: Node) -> None:
        part.meta[RESULT] = product.meta.get(RESULT)
        product.replace_all_uses_with(part)
        self.written.erase(product)

    def drop(self, node: Node) -> None:
        """Erase a sum that nothing reads, and what only it reads."""
        stack = {node: None}
        while stack:
            node, _ = stack.popitem()
            if not node.users and call_function(node, (*SUMS, *VIEWS, *SAME, *CASTS, ops.scaled_mm)):
                stack.update(dict.fromkeys(node.all_input_nodes))
                self.written.erase(node)


def _without(emit: Emitter, node: Node, ours: set[Node]) -> Node | None:
    """A sum without some of its terms: the node itself if it has none of them, None if no other is left."""
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
        return emit(node.target, *left, *node.args[len(left) :], **node.kwargs)
    return left[0] if left else None
