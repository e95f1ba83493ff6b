"""What `quantize` has written: the canonical form, with one cast a layout of each operand.

A pass that rewrites the form reads it here, replaces what it has to, and keeps these tables true: nothing
else knows which operand a node belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.fx import Graph, Node

from ..ir.fx_utils import Emitter
from ..ir.matmul import Matmul
from .plan import Operand


class Copy(NamedTuple):
    """A layout in which matmuls read an operand."""

    operand: Operand
    shape: str  # as a matrix
    transposed: bool


@dataclass
class Written:
    """`casts`: the node of each copy. `scales`: (scale, inverse) by copy; an operand with one scale has it
    under `whole`. `amaxes`: of each operand that has one scale. `products`: the FP8 matmul of each matmul.
    `late`: the operands that are read in backward. `groups`: for operands whose amax is that of a rank's
    part, the ranks with the other parts."""

    graph: Graph
    start: Node  # readers of inputs go before it
    casts: dict[Copy, Node] = field(default_factory=dict)
    scales: dict[Copy, tuple[Node, Node]] = field(default_factory=dict)
    amaxes: dict[Operand, Node] = field(default_factory=dict)
    products: dict[Matmul, Node] = field(default_factory=dict)
    late: set[Operand] = field(default_factory=set)
    groups: dict[Operand, str] = field(default_factory=dict)

    def copies(self, operand: Operand) -> list[Copy]:
        return [copy for copy in self.casts if copy.operand is operand]

    def pairs(self) -> Iterator[tuple[Copy, Copy]]:
        """Both layouts of a tensor, where both are cast: the plain one, the transposed one."""
        for copy in list(self.casts):
            other = copy._replace(transposed=True)
            if not copy.transposed and other in self.casts:
                yield copy, other

    def at(self, anchor: Node, operand: Operand, **meta) -> Emitter:
        """An emitter for nodes of `operand` right before `anchor`."""
        tag = "is_backward" if operand.backward else "is_forward"
        return Emitter(self.graph, anchor, operand.reader, **{"partitioner_tag": tag, **meta})

    def after(self, node: Node, operand: Operand, **meta) -> Emitter:
        """An emitter for nodes of `operand` right after `node`, or after all inputs if `node` is an input."""
        return self.at(self.start if node.op == "placeholder" else node.next, operand, **meta)

    def erase(self, node: Node) -> None:
        if node is self.start:
            self.start = node.next
        self.graph.erase_node(node)

    def replace_scale(self, operand: Operand, scale: Node, inverse: Node) -> None:
        """Let all read another scale of an operand that has one; `scale` may itself be made of the old."""
        old, old_inverse = self.scales[whole(operand)]
        self.scales[whole(operand)] = scale, inverse
        old_inverse.replace_all_uses_with(inverse)
        self.erase(old_inverse)
        old.replace_all_uses_with(scale, lambda user: user is not scale)
        if not old.users:
            self.erase(old)


def whole(operand: Operand) -> Copy:
    """The key of the one scale of an operand."""
    return Copy(operand, "", False)
