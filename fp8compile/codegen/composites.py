"""Functions that ATen takes apart into several operators, and that a kernel computes as a whole: GELU, exact
and by tanh, SiLU, and their derivatives.

    x * 0.5 * (erf(x * 0.707) + 1)     as     x_phi = ..; x * x_phi

A kernel of the derivative and the function, whose factor of x they share, takes 13 instructions an element
less so for the exact GELU, 20 for that by tanh, and 24 for SiLU with torch 2.11 (sm_90). Which operators they
are says torch: the function is traced, and a node is the function if the same operators compute it, in
float32. (Where a model spells a function out in half precision, each operator rounds, and each is computed.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from .. import compat
from .expressions import COMPOSITES

Match = dict[Node, Node]  # a node of the function's own trace -> the node of the graph


@dataclass(frozen=True)
class Composite:
    """A node that is a function of `arguments`. `inner`: the nodes between."""

    function: Callable[..., Any]
    arguments: tuple[Node, ...]
    inner: tuple[Node, ...]

    def text(self, operands: list[str]) -> tuple[list[str], str]:
        """Statements, which other functions of the same operands may share, and the expression after them."""
        *statements, form = (line.format(*operands) for line in COMPOSITES[self.function])
        return statements, form


def composite(node: Node) -> Composite | None:
    """The function that a node computes as the last of several operators."""
    for function, (*arguments, last) in _traces().items():
        found: Match = {}
        if _same(last, node, found):
            inner = [x for pattern, x in found.items() if pattern not in arguments and x is not node]
            return Composite(function, tuple(found[x] for x in arguments), tuple(inner))
    return None


def _same(pattern: Node, node: Any, found: Match) -> bool:
    if not isinstance(node, Node) or pattern in found:
        return found.get(pattern) is node
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return False
    found[pattern] = node
    if pattern.op == "placeholder":
        return True
    if node.target != pattern.target or node.kwargs or len(node.args) != len(pattern.args):
        return False
    pairs = zip(pattern.args, node.args, strict=True)
    return all(_same(a, b, found) if isinstance(a, Node) else a == b for a, b in pairs)


@functools.cache
def _traces() -> dict[Callable[..., Any], tuple[Node, ...]]:
    """Of each function, the arguments and the last operator of its trace."""
    traces = {}
    for function in COMPOSITES:
        given = [torch.empty(1, device="meta") for _ in range(function.__code__.co_argcount)]
        with compat.dynamo.compiling():
            graph = make_fx(function, decomposition_table=compat.inductor.decompositions())(*given).graph
        for node in graph.nodes:
            node.meta.clear()
        *_, output = graph.nodes
        traces[function] = (*graph.find_nodes(op="placeholder"), output.args[0])
    return traces
