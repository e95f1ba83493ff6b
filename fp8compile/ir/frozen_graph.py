"""A partitioned graph as plain data, which another process can read, and the graph of that data.

It keeps what an interpreter needs: the operators and their arguments, the names of nodes, and which operand a cast quantizes. A
graph that needs more (an attribute, a nested graph, a number that is not known yet) is not frozen.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .. import compat
from ..errors import Unfrozen
from .metadata import OPERAND

PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Ref:
    """Stands for the node with this number."""

    number: int


@dataclass(frozen=True)
class Named:
    """Stands for the operator of this name, as an argument of another one."""

    name: str


@dataclass(frozen=True)
class NodeRecord:
    """One node. `target`: the input's name, or the operator's, as `torch.ops` or `operator` know it; "" for the output."""

    op: str
    name: str
    target: str
    args: Any
    kwargs: Any
    operand: Any = None


class Interpreted(GraphModule):
    """A graph for an interpreter: no Python code is made of it, which would take longer than all the rest."""

    def recompile(self) -> Any:
        return None


def freeze(graph: Graph) -> tuple[NodeRecord, ...]:
    """The nodes of a graph in order. Unfrozen says what cannot be frozen."""
    numbers: dict[Node, int] = {}
    steps = []
    for node in graph.nodes:
        if node.op == "placeholder":
            target = str(node.target)
        elif node.op == "call_function":
            target = _name(node.target)
        elif node.op == "output":
            target = ""
        else:
            raise Unfrozen(f"{node.op} {node.name}")
        args, kwargs = _frozen(node.args, numbers), _frozen(node.kwargs, numbers)
        steps.append(NodeRecord(node.op, node.name, target, args, kwargs, node.meta.get(OPERAND)))
        numbers[node] = len(numbers)
    return tuple(steps)


def thaw(steps: Iterable[NodeRecord]) -> GraphModule:
    """A graph that computes the same, whose nodes have the same names. It has no other metadata than casts' operands."""
    graph, nodes = Graph(), list[Node]()
    for step in steps:
        target: Any = _operator(step.target) if step.op == "call_function" else step.target or "output"
        args, kwargs = _thawed(step.args, nodes), _thawed(step.kwargs, nodes)
        node = graph.create_node(step.op, target, args, kwargs, name=step.name)
        if step.operand is not None:
            node.meta[OPERAND] = step.operand
        nodes.append(node)
    return Interpreted({}, graph)


def _name(target: Any) -> str:
    if isinstance(target, compat.OpOverload):
        name = str(target)
    elif isinstance(target, compat.HigherOrderOperator):
        name = f"higher_order.{target.name()}"
    else:
        name = f"operator.{getattr(target, '__name__', '')}"
    if _operator(name) is not target:
        raise Unfrozen(f"the operator {target}")
    return name


def _operator(name: str) -> Any:
    """The operator of a name, None if there is none."""
    space, *path = name.split(".")
    if space == "operator":
        return getattr(operator, path[0], None)
    compat.inductor.random_prims()  # registers Inductor's own operators
    found: Any = torch.ops
    for part in (space, *path):
        found = getattr(found, part, None)
    return found


def _frozen(value: Any, numbers: dict[Node, int]) -> Any:
    def leaf(x: Any) -> Any:
        if isinstance(x, Node):
            return Ref(numbers[x])
        if isinstance(x, compat.OpOverload):
            return Named(_name(x))
        if type(x) not in PLAIN:
            raise Unfrozen(f"{type(x).__name__} {str(x)[:60]}")
        return x

    return _mapped(value, leaf)


def _thawed(value: Any, nodes: list[Node]) -> Any:
    def leaf(x: Any) -> Any:
        if isinstance(x, Ref):
            return nodes[x.number]
        return _operator(x.name) if isinstance(x, Named) else x

    return _mapped(value, leaf)


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """`leaf` of all that is in an argument, in plain containers: those of `torch.fx.node.map_aggregate` are torch's own."""
    if isinstance(value, dict):
        return {key: _mapped(x, leaf) for key, x in value.items()}
    if isinstance(value, slice):
        return slice(*(_mapped(x, leaf) for x in (value.start, value.stop, value.step)))
    if isinstance(value, (tuple, list)):
        made = [_mapped(x, leaf) for x in value]
        return tuple(made) if isinstance(value, tuple) else made
    return leaf(value)
