"""lower: replace our operators by ATen, in the forward and the backward graph, after the partitioner.

    x8 = fp8compile.quantize(x, scale, e4m3, 448, False)
    y = fp8compile.scaled_mm(x8, w8, inv_x, inv_w, None, bf16, True)

becomes, on a GPU,

    f = x.to(float32) * scale; x8 = where(isinf(x), nan, clamp(f)).to(e4m3)
    y = aten._scaled_mm(x8, permute(w8), inv_x, inv_w, None, None, bf16, True)

This is the warm graph: a delayed scale is the stored one, and no cast waits for its tensor's amax.
"""

from __future__ import annotations

import operator
from itertools import groupby

from torch.fx import GraphModule, Node

from .. import ops
from ..codegen import aten as forms
from ..codegen.inline import Inliner
from ..errors import Fp8CompileError
from ..graph import value


def lower(gm: GraphModule) -> int:
    """Lower a partitioned graph in place; returns how many operators were replaced. None of ours is left."""
    return _Lowering(gm).run()


class _Lowering:
    def __init__(self, gm: GraphModule):
        self.gm, self.inline = gm, Inliner()
        self.rows: dict[Node, Node] = {}  # the first stage of each amax

    def run(self) -> int:
        graph, ours = self.gm.graph, {op.name(): getattr(self, op._schema.name.split("::")[1]) for op in ops.ALL}
        replaced = 0
        for node in list(graph.nodes):
            name = node.target.name() if node.op == "call_function" and hasattr(node.target, "_schema") else ""
            if name not in ours:
                continue
            result = ours[name](node, *node.args)
            if result is not None:
                node.replace_all_uses_with(result)
            graph.erase_node(node)
            replaced += 1
        graph.eliminate_dead_code()
        left = [node.name for node in graph.nodes if ops.NAMESPACE in str(node.target)]
        if left:
            raise Fp8CompileError(f"operators of fp8compile survived the lowering: {', '.join(left)}")
        graph.lint()
        self.gm.recompile()
        return replaced

    def amax(self, node: Node, x: Node) -> Node:
        rows = self.inline(node, forms.row_amax, x)
        result = self.inline(node, forms.last_amax, rows)
        self.rows[result] = rows
        return result

    def gather(self, node: Node, amaxes: list[Node]) -> Node:
        rows = [self.rows.get(amax, amax) for amax in amaxes]
        groups = [list(group) for _, group in groupby(rows, lambda r: (str(value(r).shape), value(r).dtype))]
        vectors = [self.inline(node, forms.last_amaxes, group) for group in groups]
        return vectors[0] if len(vectors) == 1 else self.inline(node, forms.concatenate, vectors)

    def snapshot(self, node: Node, page: Node) -> Node:
        return self.inline(node, forms.scaling.snapshot_of, page)

    def delayed_scale(self, node: Node, scales: Node, amax: Node, slot: int, fp8_max: float, margin: int) -> Node:
        return self.inline(node, forms.stored_scale, scales, slot)

    def delayed_inverse(self, node: Node, scales: Node, scale: Node, slot: int) -> Node:
        return self.inline(node, forms.stored_inverse, scales, slot)

    def current_scale(self, node: Node, *args) -> Node:
        return self.inline(node, forms.scaling.scale_of, *args)

    def inverse(self, node: Node, *args) -> Node:
        return self.inline(node, forms.scaling.inverse_of, *args)

    def update(self, node: Node, *args) -> Node:
        return self.inline(node, forms.scaling.next_page, *args)

    def quantize(self, node: Node, x: Node, scale: Node, dtype, fp8_max: float, transposed: bool) -> Node:
        form = forms.quantize_transposed if transposed else forms.quantize
        return self.inline(node, form, x, scale, dtype, fp8_max)

    def quantize_both(self, node: Node, x: Node, scale: Node, dtype, fp8_max: float) -> Node | None:
        for item in list(node.users):
            if item.op != "call_function" or item.target is not operator.getitem:
                raise Fp8CompileError(f"{node.name}: its copies are taken one by one, not by {item.format_node()}")
            item.replace_all_uses_with(self.quantize(item, x, scale, dtype, fp8_max, bool(item.args[1])))
            self.gm.graph.erase_node(item)
        return None

    def scaled_mm(self, node: Node, *args) -> Node:
        form = ops.product if value(node).device.type == "cpu" else forms.scaled_mm_gpu
        return self.inline(node, form, *args)
