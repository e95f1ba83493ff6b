"""Write a plain torch function into a graph: trace it on its arguments' fake values, and copy the trace.

A trace takes longer than all else that a lowering does. So it is made once for each function, shapes and
constants: once a process where all sizes are numbers, once a graph where some are symbols, which mean
something else in another graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import Graph, Node, map_arg
from torch.fx.experimental.proxy_tensor import make_fx

from .. import compat
from ..ir.fx_utils import Emitter, fake_mode_of

MOST = 4096
_of_numbers: dict[Any, Graph] = {}  # the newest traces whose sizes are numbers


class Inliner:
    """`traces`: those of this graph that have symbols."""

    def __init__(self) -> None:
        self.traces: dict[Any, Graph] = {}

    def __call__(self, before: Node, function: Callable, *args: Any) -> Node:
        """Insert `function(*args)` before a node, with that node's metadata; `args` are nodes, lists of nodes
        and constants. Returns the node of its result (one tensor)."""
        nodes, spec = pytree.tree_flatten(args)
        tensors = [i for i, arg in enumerate(nodes) if isinstance(arg, Node)]
        values = [nodes[i].meta["val"] for i in tensors]
        # two arguments may be the same tensor: the key ignores this, and the trace sees them as different
        constants = [arg for i, arg in enumerate(nodes) if i not in tensors]
        settings = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
        key = (function, spec, tuple(tensors), *map(_describe, values), *map(str, constants), settings)
        traces = self.traces if any(map(_symbolic, (*values, *constants))) else _of_numbers
        if key not in traces:

            def call(*given: torch.Tensor) -> torch.Tensor:
                filled = list(nodes)
                for i, tensor in zip(tensors, given, strict=True):
                    filled[i] = tensor
                return function(*pytree.tree_unflatten(filled, spec))

            with fake_mode_of(values), compat.dynamo.compiling():
                distinct = list(map(_distinct, values))
                trace = make_fx(call, decomposition_table=compat.inductor.decompositions())(*distinct).graph
            for node in trace.nodes:
                node.meta.clear()  # else it keeps the fake tensors of this compilation alive
            traces[key] = trace
            if len(traces) > MOST:
                del traces[next(iter(traces))]
        return self._copy(traces[key], before, [nodes[i] for i in tensors])

    @staticmethod
    def _copy(trace: Graph, before: Node, arguments: list[Node]) -> Node:
        emit = Emitter(before.graph, before, before)  # computes fake values anew: copies share no storage
        given = iter(arguments)
        copies: dict[Node, Node] = {}
        *nodes, output = trace.nodes
        for node in nodes:
            if node.op == "placeholder":
                copies[node] = next(given)
            else:
                assert node.op == "call_function", (
                    f"a lowering must be made of operators only: {node.format_node()}"
                )
                args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
                copies[node] = emit(node.target, *args, **kwargs)
        return copies[output.args[0]]


def _distinct(value: Any) -> Any:
    """A tensor like this one in memory of its own; a symbolic size is itself."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _describe(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return str(value)
    return str(value.shape), str(value.stride()), value.dtype, value.device


def _symbolic(value: Any) -> bool:
    """True if it is a symbol, or a tensor with a size or stride that is one."""
    if isinstance(value, torch.Tensor):
        return any(not isinstance(size, int) for size in (*value.shape, *value.stride()))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
