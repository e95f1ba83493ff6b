"""Bytes that a group's kernel moves, and bytes that Inductor's own kernels would move for the same nodes.

Sizes may be symbols; figures are for the sizes that the graph was traced with.
"""

from __future__ import annotations

import sympy
import torch
from torch.fx import Graph, Node

from ..devices.cost import STRIDED
from ..ir.fx_utils import aten, behind, hint, pointwise
from . import blocks
from .expressions import supported
from .group import Group
from .indexing import REDUCTIONS, VIEWS, product, sizes
from .scales import of_amax

_PARTS = (aten.slice.Tensor, aten.select.int)  # views of memory
_MOVES = (*_PARTS, aten.cat.default, aten.constant_pad_nd.default, aten.amax.default, aten.index.Tensor)


class Sizes:
    """Numbers for symbolic expressions: the values that a graph's symbols had when it was traced."""

    def __init__(self, graph: Graph):
        self.values: dict[sympy.Symbol, int] = {}
        for node in graph.find_nodes(op="placeholder"):
            given = node.meta.get("val")
            for size in given.shape if isinstance(given, torch.Tensor) else [given]:
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and hint(size):
                    self.values[size.node.expr] = hint(size)

    def __call__(self, expr: sympy.Expr) -> int:
        if not expr.free_symbols:
            return int(expr)
        return int(expr.subs({symbol: self.values.get(symbol, 4096) for symbol in expr.free_symbols}))

    def bytes_of(self, node: Node) -> int:
        return self(product(sizes(node))) * int(node.meta["val"].dtype.itemsize)


def fusable(node: Node, ours: tuple) -> bool:
    """True if Inductor fuses this node with its neighbours. `ours`: our operators that become such nodes."""
    if node.op != "call_function":
        return False
    return pointwise(node) or node.target in (*VIEWS, *REDUCTIONS, *_MOVES, *ours) or supported(node)


def compare(group: Group, sizes_of: Sizes, stored: set[Node], ours_too: tuple) -> tuple[int, int]:
    """(bytes of the group's kernel, bytes of Inductor's for the same). `stored`: what other groups wrote.

    Inductor reads the inputs once for all outputs along rows, and once more for column sums and column
    amaxes. It reads them once more for amaxes of blocks of several rows, if the blocks are one column wide or
    come after sums over rows; and for a transposed copy after sums over rows, which its reductions, a row at
    a time, do not write.

    Second reads of a group's own loops (`walks`) are left out: with them, norms with a cast would go to
    Inductor, which was not measured to be faster.
    """
    scales = [node for node, scale in group.scales.items() if scale.granularity == "tile"]
    reads = sum(map(sizes_of.bytes_of, (*group.inputs, *scales)))
    ours = theirs = reads
    if blocks.apart(group):
        ours += reads
    # Inductor would compute an input in place if nobody else reads it: then writing it is our cost
    for x in group.inputs:
        made = behind(x, (*VIEWS, *_PARTS))
        nobody_else = set(x.users) <= set(group.members)
        if nobody_else and made not in stored and fusable(made, ours_too):
            ours += sizes_of.bytes_of(x)
    for output in group.outputs:
        elements = sizes_of(product(sizes(output.node)))
        if output.content in ("copy", "transposed"):
            ours += elements * (1 if blocks.made_of(output, group) is None else 2)
            theirs += int(elements * (STRIDED if output.content == "transposed" else 1))
        elif output.content in ("value", "row", "blocks", "column_amax"):
            written = sizes_of.bytes_of(output.replaces) * (2 if output.content == "column_amax" else 1)
            ours += written
            theirs += written
        elif output.content == "amax":
            theirs += 8 * sizes_of(group.domain.rows)
        else:
            ours += elements * 8 // blocks.height(group)  # partial sums, written and read
    if group.with_content("sum", "column_amax"):
        theirs += reads
    if group.passes and group.with_content("transposed"):
        theirs += reads
    if any(x.rows > 1 and (x.columns == 1 or group.passes) for x in map(of_amax, group.tiles)):
        theirs += reads
    return ours, theirs
