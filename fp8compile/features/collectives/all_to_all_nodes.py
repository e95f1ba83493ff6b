"""All-to-alls of a graph, which take rows to the ranks of their experts, and back.

    came = wait_tensor(all_to_all_single(local [512, 128], got, sent, group)); rows = index(came, [by_expert])

`rows` is made of the result of the `AllToAll` by steps that move values and compute none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from ... import compat
from ...ir.fx_utils import PERMUTES, SAME, VIEWS, arg, aten, call_function

LOOKUPS = (aten.index.Tensor, aten.index_select.default)
MOVES = (*VIEWS, *SAME, *PERMUTES, *LOOKUPS, aten.clone.default, aten.slice.Tensor)


@dataclass(frozen=True)
class AllToAll:
    """`node` is the collective, `wait` its result."""

    node: Node
    wait: Node

    @property
    def local(self) -> Node:
        """This rank's rows, those for the first rank first."""
        return arg(self.node, 0)

    @property
    def group(self) -> str:
        return arg(self.node, 3)


def moved_from(node: Node) -> Node | None:
    """The tensor whose values a node moves, and maybe puts zeros between; None if it computes something else."""
    if call_function(node, MOVES):
        return arg(node, 0)
    if call_function(node, (aten.cat.default,)):
        parts = arg(node, 0)
    elif call_function(node, (aten.where.self,)):
        parts = node.args[1:]
    else:
        return None
    others = [part for part in parts if not _zeros(part)]
    return others[0] if len(others) == 1 else None


def _zeros(node: Node) -> bool:
    if call_function(node, (aten.scalar_tensor.default,)):
        return bool(arg(node, 0) == 0)
    if call_function(node, (aten.full.default, aten.full_like.default)):
        return bool(arg(node, 1) == 0)
    return call_function(node, (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default))


def all_to_all_of(node: Node) -> AllToAll | None:
    """The all-to-all whose values `node` holds; None for any other tensor."""
    while not call_function(node, compat.WAIT):
        source = moved_from(node)
        if source is None:
            return None
        node = source
    return AllToAll(arg(node, 0), node) if call_function(arg(node, 0), compat.ALL_TO_ALL) else None
