"""A group: what one generated kernel computes. Found by `passes.fuse`, written by `kernel`.

A group walks a matrix [R, C] once. Its *inputs* are tensors in memory; its *outputs* are what someone outside reads:

    copy        [R, C]            FP8: value * scale, saturated
    transposed  [C, R padded]     the same, transposed; rows padded with zeros to a multiple of 16
    value       as the node is    high precision
    row         as the node is    one element a row: a norm's statistics
    amax        [1]               the largest magnitude, into a slot of the graph's vector of amaxes
    sum         [C]               column sums, by partial ones of each block of rows: a bias gradient, say

Sums over a row (a norm's mean and variance) take a pass of their own over the row block before: it is read again from the
cache, not from memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from .domain import REDUCTIONS, Domain, Index, sizes

aten = torch.ops.aten


@dataclass(frozen=True)
class Output:
    kind: str
    node: Node  # what is stored, cast, or reduced
    replaces: Node  # the graph's node that this output stands for
    scale: Node | None = None
    dtype: torch.dtype | None = None
    fp8_max: float = 0.0


@dataclass(eq=False)
class Group:
    domain: Domain
    outputs: list[Output]
    inputs: dict[Node, None] = field(default_factory=dict)  # in the order of their first use
    members: dict[Node, None] = field(default_factory=dict)  # what is computed in the kernel
    levels: dict[Node, int] = field(default_factory=dict)  # sums over a row: the pass that computes them, from 0
    loads: set[tuple[Node, Index]] = field(default_factory=set)

    @property
    def passes(self) -> int:
        """Passes over a row block before the last one."""
        return 1 + max(self.levels.values(), default=-1)

    @property
    def scales(self) -> list[Node]:
        return list(dict.fromkeys(x.scale for x in self.outputs if x.scale is not None))

    def of_kind(self, *kinds: str) -> list[Output]:
        return [x for x in self.outputs if x.kind in kinds]


DEEPEST = 64  # operators in a chain: a longer one is cut, and read in the middle


class Walk:
    """Follows values back to what they are computed from; fills in a group's inputs, members and levels.

    `stop(node)` says which tensors are in memory already and are read, not computed. A node that cannot be computed in place
    is read, too.
    """

    def __init__(self, domain: Domain, stop: Callable[[Node], bool]):
        self.domain, self.stop = domain, stop
        self.inputs: dict[Node, None] = {}
        self.members: dict[Node, None] = {}
        self.levels: dict[Node, int] = {}
        self.loads: set[tuple[Node, Index]] = set()
        self.seen: dict[tuple[Node, Index], int] = {}
        self.depth = 0

    def __call__(self, node: Node, index: Index) -> int:
        """Visit a value; returns after how many passes it is known."""
        key = (node, index)
        if key not in self.seen:
            self.depth += 1
            self.seen[key] = self._visit(node, index)
            self.depth -= 1
        return self.seen[key]

    def _visit(self, node: Node, index: Index) -> int:
        if not self.stop(node) and self.depth < DEEPEST:
            reduced = self._reduction(node, index)
            if reduced is not None:
                return reduced
            operands = self.domain.operands(node, index)
            if operands is not None and not any(_is_random(x[0]) for x in operands if isinstance(x, tuple)):
                level = max((self(*x) for x in operands if isinstance(x, tuple)), default=0)
                self.members[node] = None
                return level
        self.inputs[node] = None
        self.loads.add((node, index))
        return 0

    def _reduction(self, node: Node, index: Index) -> int | None:
        whole, part = statistics_of(node)
        found = self.domain.reduction(whole)
        if found is None or not found[1] or index != self.domain.row_index(node):
            return None
        source = found[0]
        full = self.domain.full(sizes(source))
        assert full is not None
        level = self(source, full)
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
    """(the reduction, which of its results) of a node that is one: var_mean has two."""
    if node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        if isinstance(source, Node) and source.target is aten.var_mean.correction:
            return source, ("var", "mean")[int(node.args[1])]  # type: ignore[arg-type]
    if node.op == "call_function" and node.target in REDUCTIONS and node.target is not aten.var_mean.correction:
        return node, str(node.target).split(".")[1]
    return node, ""


def _is_random(node: Node) -> bool:
    """Numbers out of nothing: stop behind them, at the mask that is made of them."""
    return "inductor_prims" in str(node.target) or "rand" in str(node.target)
