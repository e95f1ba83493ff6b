"""A group: the nodes that one generated kernel computes. `passes.fuse` finds groups, `kernel` writes them.

A group walks a matrix [R, C] once. Its *inputs* are tensors in memory; its *outputs* are the results that are
read outside:

    copy        [R, C]            FP8: value * scale, saturated
    transposed  [C, R padded]     the same, transposed; rows padded with zeros to a multiple of 16
    value       as the node is    high precision
    row         as the node is    one element a row: a norm's statistics
    blocks      as `replaces` is  one number a block of a tile: its amax, its scale, or the inverse of that
    amax        [1]               the largest magnitude, into a slot of the graph's vector of amaxes
    column_amax [C, 1] or [E, C]  the largest magnitude of each column, or of each in each group, into a part
                                  of that vector
    number      [1]               a scale for the whole matrix that each program computes from an amax, or its
                                  inverse
    sum         [C]               column sums, from a partial sum of each program: a bias gradient, say

Sums over a row and the amax of a row must be known before what is made of them (`blocks`). The amax of a
block that a tile holds whole (1 x 128 elements), and the scale computed from it, take no pass.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..ir.fx_utils import arg, aten, reached
from .composites import composite
from .expressions import HEAVY, supported
from .indexing import REDUCTIONS, Domain, Index, in_memory, lookups, sizes, unravel
from .scales import SPAN, Scale, amax_of, made_in_place


@dataclass(frozen=True)
class Output:
    content: str
    node: Node  # what is stored, cast, or reduced
    replaces: Node  # the graph's node that this output stands for
    scale: Scale | None = None  # of a cast; for `blocks`: which block each number is for
    dtype: torch.dtype | None = None
    fp8_max: float = 0.0
    divide: bool = False  # by the inverse of the scale, which `scale` then is
    groups: Node | int | None = None  # of a column amax for each group, as in `Scale`
    spaced: bool = False  # of a copy whose rows may be parts of longer rows: how long they are is an argument


DEEPEST = 64  # operators in a chain; a longer chain is cut: the kernel reads a value in its middle


class Group:
    """Grows: follows values back to what they are computed from.

    `stop(node)` says which tensors are in memory already and are read, not computed. A node that cannot be
    computed in place is read, too.
    """

    def __init__(self, domain: Domain, stop: Callable[[Node], bool]):
        self.domain, self.stop = domain, stop
        self.outputs: list[Output] = []
        self.inputs: dict[Node, None] = {}  # in the order of their first use
        self.members: dict[Node, None] = {}  # what is computed in the kernel
        self.levels: dict[Node, int] = {}  # sums over a row: their pass, from 0
        self.loads: set[tuple[Node, Index]] = set()
        self.tiles: dict[Node, None] = {}  # a tile's amaxes of blocks, scales, inverses
        self.seen: dict[tuple[Node, Index], int] = {}
        self.depth = 0

    @property
    def passes(self) -> int:
        """Passes over a row block before the last one, if it does not hold whole rows."""
        return 1 + max(self.levels.values(), default=-1)

    @property
    def scales(self) -> dict[Node, Scale]:
        """The scales that the kernel reads, for the matrix or a block. (Those of rows, columns: inputs.)"""
        scales = [x.scale for x in self.outputs if x.scale is not None and x.scale.node not in self.tiles]
        return {scale.node: scale for scale in scales if scale.granularity in ("one", "tile")}

    @property
    def block(self) -> tuple[int, int]:
        """(rows, columns): the sides of a tile must be multiples of these."""
        span = self.span
        blocks = [x for x in self._blocks if not (span and x.of_span)]
        return max((x.rows for x in blocks), default=1), max((x.columns for x in blocks), default=1)

    @property
    def span(self) -> int:
        """Columns that a program takes strip by strip; 0 if there is no span. A span serves blocks of 1 x 128
        together with blocks of 128 x 1, where a tile that holds both would not fit into the registers. A
        group with passes has no span: `fuse` takes such a group apart."""
        tall = any(x.rows == SPAN for x in self._blocks)
        fits = all(x.of_span or x.columns < SPAN for x in self._blocks)
        both = tall and fits and any(x.of_span for x in self._blocks)
        large = self.heavy or sum(map(self.domain.is_full, self.inputs)) > 1
        return SPAN if both and large and not self.passes else 0

    @property
    def grouped(self) -> list[Node | int]:
        """Where columns have an amax or a scale for each group of rows: `Scale.groups` of each."""
        found = [x.groups or (x.scale.groups if x.scale is not None else None) for x in self.outputs]
        return [x for x in found if x is not None]

    @property
    def groups(self) -> Node | None:
        """The group of each `grouped.ALIGN` rows, if groups are of different sizes."""
        return next((x for x in self.grouped if isinstance(x, Node)), None)

    @property
    def heavy(self) -> bool:
        """True if the group computes an exp or the like, which takes many registers."""
        return any(node.target in HEAVY for node in self.members)

    @property
    def sole_inputs(self) -> set[Node]:
        """bfloat16 inputs from each of which alone a transposed copy is computed, by an exp or the like."""
        found: set[Node] = set()
        for output in self.with_content("transposed"):
            chain = [*reached([output.node], lambda x: x.all_input_nodes if x in self.members else ())]
            read = {x for x in chain if x in self.inputs and self.domain.is_full(x)}
            if len(read) == 1 and any(x.target in HEAVY for x in chain if x in self.members):
                found |= {x for x in read if x.meta["val"].dtype == torch.bfloat16}
        return found

    @property
    def _blocks(self) -> list[Scale]:
        return [x.scale for x in self.outputs if x.scale is not None and x.scale.granularity == "tile"]

    @property
    def stored(self) -> list[Output]:
        """The outputs with a pointer of their own."""
        return self.with_content("copy", "transposed", "value", "row", "blocks", "number")

    @property
    def sums(self) -> list[Output]:
        """These share one pointer: [blocks of rows, sums * columns]."""
        return self.with_content("sum")

    @property
    def amaxes(self) -> list[Output]:
        return self.with_content("amax")

    @property
    def column_amaxes(self) -> list[Output]:
        return self.with_content("column_amax")

    def with_content(self, *contents: str) -> list[Output]:
        return [x for x in self.outputs if x.content in contents]

    # -- growing --

    def output(self, output: Output) -> None:
        """Visit the values that an output is computed from."""
        node, scale, domain = output.node, output.scale, self.domain
        self(node, domain.index_of_row(node) if output.content == "row" else domain.index(node))
        if scale is not None and scale.granularity == "tile":
            self.tile(scale)
        elif scale is not None and scale.granularity != "one":
            self(scale.node, unravel(scale.granularity, sizes(scale.node)))

    def tile(self, scale: Scale) -> None:
        """Visit scales of blocks. If the tile computes them: visit the tensor that they scale."""
        amax = amax_of(scale.node)
        if amax is None or self.stop(amax) or self.stop(scale.node):
            return
        source = arg(amax, 0)
        index = self.domain.full(sizes(source))
        if index is None or not made_in_place(scale, source):
            return
        self(source, index)
        node = scale.node
        while node is not amax:
            self.tiles[node] = None
            node = arg(node, 0)
        self.tiles[amax] = None

    def __call__(self, node: Node, index: Index) -> int:
        """Visit a value; returns after how many passes it is known."""
        key = (node, index)
        if key not in self.seen:
            self.depth += 1
            self.seen[key] = self._visit(node, index)
            self.depth -= 1
        return self.seen[key]

    def _visit(self, node: Node, index: Index) -> int:
        for rows in lookups(index):
            self.inputs[rows] = None
            self.loads.add((rows, self.domain.index_of_row(rows)))
        if (not lookups(index) or self._narrower(node)) and not self.stop(node) and self.depth < DEEPEST:
            reduced = self._reduction(node, index)
            if reduced is not None:
                return reduced
            operands = self.domain.operands(node, index)
            if operands is not None and not any(_is_random(x[0]) for x in operands if isinstance(x, tuple)):
                level = max((self(*x) for x in operands if isinstance(x, tuple)), default=0)
                self.members[node] = None
                if found := composite(node):
                    self.members.update(dict.fromkeys(found.inner))
                return level
        self.inputs[node] = None
        self.loads.add((node, in_memory(index)))
        return 0

    def _narrower(self, node: Node) -> bool:
        """True if a value of other rows than the walk's is made of one of fewer bytes (FP8, say). Others are
        read."""
        made = node
        while not self.stop(node) and supported(node):
            inputs = [x for x in node.all_input_nodes if sizes(x) == sizes(node)]
            if len(inputs) != 1:
                return False
            node = inputs[0]
        return bool(node.meta["val"].itemsize < made.meta["val"].itemsize)

    def _reduction(self, node: Node, index: Index) -> int | None:
        whole, part = statistics_of(node)
        found = self.domain.reduction(whole)
        if found is None or not found[1] or index != self.domain.row_index(node):
            return None
        level = self(found[0], self.domain.index(found[0]))
        if part == "var":  # by its definition: the mean first
            mean = next((user for user in whole.users if statistics_of(user)[1] == "mean"), None)
            if mean is None or self._reduction(mean, index) is None:
                return None
            level += 1
        self.levels[node] = level
        self.members[node] = None
        if whole is not node:
            self.members[whole] = None
        return level + 1


def statistics_of(node: Node) -> tuple[Node, str]:
    """(the reduction, which of its results) for a result of one (var_mean has two), else (node, "")."""
    if node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        if isinstance(source, Node) and source.target is aten.var_mean.correction:
            return source, ("var", "mean")[int(node.args[1])]  # type: ignore[arg-type]
    single = node.target in REDUCTIONS and node.target is not aten.var_mean.correction
    if node.op == "call_function" and single:
        return node, str(node.target).split(".")[1]
    return node, ""


def _is_random(node: Node) -> bool:
    """True if this node draws random numbers. Kernels read what is made of them (a dropout mask) instead."""
    return "inductor_prims" in str(node.target) or "rand" in str(node.target)


def title(group: Group) -> str:
    """The kernel's name: the operators of the user's code that it fuses, then the kinds of its outputs."""
    names: dict[str, None] = {}
    for node in group.members:
        packet = getattr(node.meta.get("original_aten"), "overloadpacket", None)
        name = getattr(packet, "__name__", "")
        if name and name not in _QUIET:
            names[name.strip("_")] = None
    names = {name: None for name in names if f"{name}_backward" not in names}
    contents = {x.content for x in group.outputs}
    done = [word for content, word in _DONE.items() if content in contents]
    return "_".join(["fp8", *list(names)[:4], *done])


_DONE = {
    "copy": "cast",
    "transposed": "transpose",
    "blocks": "scale",
    "amax": "amax",
    "column_amax": "columns",
    "sum": "sum",
}
_QUIET = "view _unsafe_view reshape t transpose permute expand clone detach alias _to_copy mm addmm".split()
