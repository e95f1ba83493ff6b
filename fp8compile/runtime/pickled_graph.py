"""A partitioned graph as data that can be pickled, for another process, and the graph of that data.

It keeps what an interpreter needs: the operators and their arguments, the names of nodes, and which operand a
cast quantizes. A graph that needs more (an attribute, a nested graph) is not pickled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from .. import compat
from ..errors import Unpicklable
from ..ir.metadata import OPERAND


@dataclass(frozen=True)
class Ref:
    """Stands for the node with this number."""

    number: int


@dataclass(frozen=True)
class Named:
    """Stands for the operator of this name in `torch.ops`."""

    name: str


@dataclass(frozen=True)
class PickledNode:
    """One node. Its `target` and arguments have a `Ref` for each node and a `Named` for each operator."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    operand: Any = None


class Interpreted(GraphModule):
    """A graph for an interpreter: no Python code is made of it, which would take longer than all the rest."""

    def recompile(self) -> Any:
        return None


def pickled(graph: Graph) -> tuple[PickledNode, ...]:
    """The nodes of a graph in order. Unpicklable says what cannot be pickled."""
    numbers: dict[Node, int] = {}

    def plain(x: Any) -> Any:
        return Ref(numbers[x]) if isinstance(x, Node) else _named(x)

    steps = []
    for node in graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise Unpicklable(f"{node.op} {node.name}")
        target, args, kwargs = (map_aggregate(x, plain) for x in (node.target, node.args, node.kwargs))
        steps.append(PickledNode(node.op, node.name, target, args, kwargs, node.meta.get(OPERAND)))
        numbers[node] = len(numbers)
    return tuple(steps)


def unpickled(steps: Iterable[PickledNode]) -> GraphModule:
    """A graph that computes the same, with the nodes' names, and no metadata but the operands of casts."""
    graph, nodes = Graph(), list[Node]()

    def real(x: Any) -> Any:
        return nodes[x.number] if isinstance(x, Ref) else _operator(x.name) if isinstance(x, Named) else x

    compat.inductor.random_prims()  # registers Inductor's own operators
    for step in steps:
        target, args, kwargs = (map_aggregate(x, real) for x in (step.target, step.args, step.kwargs))
        nodes.append(graph.create_node(step.op, target, args, kwargs, name=step.name))  # type: ignore[arg-type]
        if step.operand is not None:
            nodes[-1].meta[OPERAND] = step.operand
    return Interpreted({}, graph)


def _named(x: Any) -> Any:
    """An operator by its name; anything else as it is."""
    if not isinstance(x, (compat.OpOverload, compat.HigherOrderOperator)):
        return x
    made = Named(str(x) if isinstance(x, compat.OpOverload) else f"higher_order.{x.name()}")
    if _operator(made.name) is not x:
        raise Unpicklable(f"the operator {x}")
    return made


def _operator(name: str) -> Any:
    return attrgetter(name)(torch.ops)
