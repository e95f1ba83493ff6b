"""lower: replace our operators in the forward and backward graph, where `fuse` has put no generated kernel.

    x8 = fp8compile.quantize(x, scale, e4m3, 448, False)
    y = fp8compile.scaled_mm(x8, w8, inv_x, inv_w, None, bf16, True)

becomes, on a GPU,

    f = x.to(float32) * scale; x8 = where(isinf(x), nan, clamp(f)).to(e4m3)
    y = aten._scaled_mm(x8, permute(w8), inv_x, inv_w, None, None, bf16, True)

"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import compat
from ..codegen import launch, scaled_grouped, scaled_mm
from ..codegen import lowerings as forms
from ..codegen.inline import Inliner
from ..errors import Fp8CompileError
from ..ir import grouped, merged, ops
from ..ir.fx_utils import arg, call_function, is_data, is_tensor, value
from ..ir.scale import inverse_of, scale_of, served_inverse_of
from ..ir.schemas import copies_at

COMPUTED = (ops.current_scale, ops.served_inverse, ops.inverse, merged.largest, merged.least)
# operators that a plain function of the same arguments replaces
FUNCTIONS: dict[Any, Callable] = {
    ops.current_scale: scale_of,
    ops.inverse: inverse_of,
    ops.served_inverse: served_inverse_of,
    ops.amax_blocks: forms.amax_blocks,
    ops.transposed: forms.transposed,
    ops.dequantize: forms.dequantize,
    merged.largest: merged.largest_of,
    merged.least: merged.least_of,
    merged.side_by_side: forms.joined,
    grouped.group_amax: scaled_grouped.amax_of_groups,
    grouped.of_groups: grouped.scales_of_groups,
}
# those that stay calls on a CPU
CALLED = {ops.amax, ops.amax_blocks, ops.quantize, ops.quantize_both, ops.transposed, ops.dequantize}
CALLED |= {ops.scaled_mm, ops.block_mm, merged.side_by_side, merged.both_sides, *grouped.ALL}
LOWERED = tuple(op for op in ops.OPERATORS if op not in (ops.quantize_both, merged.both_sides))


def lower_scales(graph: Graph) -> int:
    """Lower the scales of whole tensors, unless `fuse` may put them into the kernels that cast; returns how
    many nodes were replaced."""
    return _Lowering(graph).run(COMPUTED, lambda node: value(node).dim() != 2 and not _in_kernels(node))


def _in_kernels(node: Node) -> bool:
    return value(node).device.type in launch.DEVICES and not compat.triton.reorders()


def split_casts(graph: Graph) -> int:
    """Split each `quantize_both` into two `quantize`. Up to the partitioner it is one operator, so that one
    read makes both copies in forward. From here on, a kernel may write only one of the copies."""
    found = _split(graph, ops.quantize_both, lambda node, i: (ops.quantize, copies_at(node)[i].args))
    _split(graph, merged.both_sides, lambda node, i: (merged.side_by_side, (arg(node, i), i)))
    return found


def _split(graph: Graph, target: Any, part: Callable[[Node, int], tuple[Any, tuple]]) -> int:
    """Replace each result of an operator by `part`: the operator, with its arguments, that makes it alone."""
    found = [node for node in graph.find_nodes(op="call_function", target=target) if not stays(node)]
    for node in found:
        for item in node.users:
            if not call_function(item, (operator.getitem,)):
                how = item.format_node()
                raise Fp8CompileError(f"{node.name}: its copies are taken one by one, not by {how}")
        for item in sorted(node.users, key=lambda x: arg(x, 1)):
            with graph.inserting_before(node):
                alone = graph.call_function(*part(node, arg(item, 1)))
            alone.meta.update({**node.meta, **item.meta})
            item.replace_all_uses_with(alone)
            graph.erase_node(item)
        graph.erase_node(node)
    return len(found)


def lower_matmuls(graph: Graph) -> int:
    """Lower the matmuls with one scale an operand; returns how many."""
    return _Lowering(graph).run((ops.scaled_mm,), lambda node: not stays(node))


def lower(graph: Graph) -> int:
    """Lower our remaining operators; returns how many were replaced. Only those that `stays` tells stay."""
    lowering = _Lowering(graph)
    lowering.spread = scaled_grouped.spread_scales(graph, lowering.inline)
    replaced = lowering.run(LOWERED, lambda node: not stays(node))
    compat.triton.eliminate_dead_code(graph)
    return replaced


def stays(node: Node) -> bool:
    """True if this operator stays in the graph, as a call. Those of tensors do on a CPU (`ir.cpu`)."""
    if node.target not in CALLED:
        return False
    return value(next(filter(is_tensor, node.all_input_nodes))).device.type == "cpu"


class _Lowering:
    def __init__(self, graph: Graph):
        self.graph, self.inline = graph, Inliner()
        self.spread: dict[Node, tuple[Node, Node]] = {}  # a grouped matmul's scales, spread over vectors
        self.rows: dict[Node, Node] = {}  # a lowered amax -> its first stage, one number a row

    def run(self, which: tuple, chosen: Callable[[Node], bool] = lambda node: True) -> int:
        """Replace the nodes that call an operator of `which` and are `chosen`; returns how many."""
        replaced = 0
        for node in list(self.graph.nodes):
            if node.op != "call_function" or node.target not in which or not chosen(node):
                continue
            if node.target in FUNCTIONS:
                result = self.inline(node, FUNCTIONS[node.target], *node.args)
            else:
                result = getattr(self, node.target._schema.name.split("::")[1])(node, *node.args)
            if result is not None:
                node.replace_all_uses_with(result)
            self.graph.erase_node(node)
            replaced += 1
        return replaced

    def amax(self, node: Node, x: Node, order: Node | None = None) -> Node:
        x = x if order is None else self.inline(node, ops.ordered, x, order)
        rows = self.inline(node, forms.row_amax, x)
        result = self.inline(node, forms.last_amaxes, [rows])
        self.rows[result] = rows
        return result

    def gather(self, node: Node, amaxes: list[Node]) -> Node:
        """Amaxes lowered here still have a stage of one number a row: neighbours with equally many rows share
        their last reduction. Amaxes from kernels are complete."""
        vectors = [vector for vector, _ in self._vectors(node, amaxes)]
        return vectors[0] if len(vectors) == 1 else self.inline(node, torch.cat, vectors)

    def _vectors(self, node: Node, amaxes: list[Node]) -> list[tuple[Node, int]]:
        """Vectors of amaxes, and how many each has."""
        shapes = {x: str(value(rows).shape) for x, rows in self.rows.items()}
        vectors: list[tuple[Node, int]] = []
        for shape, group in groupby(amaxes, lambda x: shapes.get(x, "")):
            same = list(group)
            if shape:
                rows = [self.rows[x] for x in same]
                vectors.append((self.inline(node, forms.last_amaxes, rows), len(same)))
            else:
                vectors += [(x, 1) for x in same]
        return vectors

    def raised(self, node: Node, amaxes: Node, found: list[Node], rows: list[int]) -> Node | None:
        """On a GPU amaxes are raised where they are, and the copy onto them goes."""
        (write,) = node.users
        if found and not _in_kernels(node):
            vectors, first, firsts = self._vectors(node, found), 0, []
            for _, count in vectors:
                firsts.append(rows[first])
                first += count
            return self.inline(node, ops.raised_of, amaxes, [x for x, _ in vectors], tuple(firsts))
        by_size: dict[str, list[tuple[launch.AmaxPlace, Node]]] = {}
        for x, row in zip(found, rows, strict=True):
            numbers = self.rows.get(x, x)
            by_size.setdefault(str(value(numbers).shape), []).append((launch.AmaxPlace(amaxes, row), numbers))
        launcher = launch.Launcher(self.graph, 0, amaxes)
        for pairs in by_size.values():
            for start in range(0, len(pairs), launcher.MOST_RAISED):
                launcher.raise_amaxes(write, dict(pairs[start : start + launcher.MOST_RAISED]))
        self.graph.erase_node(write)
        return None

    def quantize(self, node: Node, *_) -> Node:
        (copy,) = copies_at(node)
        if copy.rows is not None and is_data(value(copy.source).shape[0]):
            raise Fp8CompileError(
                f"{node.name}: no kernel for a cast whose rows are counted from data; please report this"
            )
        dense = not node.users or any(user.target is not merged.side_by_side for user in node.users)
        return self.inline(node, forms.quantize, copy, dense)

    def group_order(self, node: Node, *_) -> None:
        scaled_grouped.lower_order(node, self.inline)

    def grouped_mm(self, node: Node, *_) -> Node:
        return scaled_grouped.lower_grouped_mm(node, self.inline, self.spread.get(node))

    def scaled_mm(self, node: Node, *_) -> Node:
        return scaled_mm.lower_mm(node, self.inline)

    block_mm = scaled_mm
