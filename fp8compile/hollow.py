"""Callables in the place of compiled graphs that compute nothing: they hand back tensors of the right shapes.

A model that is only looked at (`explain`, `estimate`) still has to get from one graph to the next, through graph breaks and
through code that Dynamo leaves to eager mode. What a graph returns to that code are zeros, so that an index is in range; what
it saves for its backward has no memory at all (it lies on the meta device), and neither have large tensors until somebody
writes to them (fresh pages of a process are zeros).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

LARGE = 1 << 20  # bytes; below, tensors are zeros for certain


def hollow(graph: Graph, device: torch.device | None = None) -> Callable[[list[Any]], list[Any]]:
    """A boxed callable with the outputs of `graph`, one that AOTAutograd has partitioned: fake values in meta["val"].

    Tensors are on `device`, or where the graph has them. Symbolic sizes are those of the arguments.
    """
    inputs = graph.find_nodes(op="placeholder")
    end = next(iter(graph.find_nodes(op="output")))
    outputs: Sequence[Any] = end.args[0]  # type: ignore[assignment]
    described = end.meta.get("desc") or [None] * len(outputs)
    saved = {i for i, what in enumerate(described) if type(what).__name__.startswith("SavedForBackwards")}

    def run(args: list[Any]) -> list[Any]:
        given: dict[Any, Any] = dict(zip(inputs, args, strict=True))
        sizes = _sizes(given)
        made: dict[Any, Any] = {}
        results = []
        for i, node in enumerate(outputs):
            key = (node, i in saved)
            if isinstance(node, Node) and key not in made:
                where = torch.device("meta") if i in saved else device
                made[key] = given[node] if node in given else _like(node.meta.get("val"), sizes, where)
            results.append(made[key] if isinstance(node, Node) else node)
        args.clear()
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _sizes(given: dict[Node, Any]) -> dict[Any, Any]:
    """The value of each symbol that an argument tells."""
    found: dict[Any, Any] = {}

    def match(symbolic: Any, value: Any) -> None:
        expr = symbolic.node.expr if isinstance(symbolic, torch.SymInt) else None
        if expr is not None and expr.is_Symbol:
            found[expr] = sympy.Integer(int(value))

    for node, value in given.items():
        fake = node.meta.get("val")
        if isinstance(fake, torch.Tensor) and isinstance(value, torch.Tensor):
            for symbolic, size in zip(fake.shape, value.shape, strict=False):
                match(symbolic, size)
        else:
            match(fake, value)
    return found


def _number(value: Any, sizes: dict[Any, Any]) -> int:
    if not isinstance(value, torch.SymInt):
        return int(value)
    expr = value.node.expr.xreplace(sizes)
    if expr.is_number:
        return int(expr)
    return 1 if value.node.hint is None else int(value.node.hint)  # what only the data would tell


def _like(fake: Any, sizes: dict[Any, Any], device: torch.device | None) -> Any:
    if isinstance(fake, (torch.SymInt, int)):
        return _number(fake, sizes)
    if not isinstance(fake, torch.Tensor):
        return fake
    shape, stride = ([_number(x, sizes) for x in numbers] for numbers in (fake.shape, fake.stride()))
    return _zeros(torch.empty_strided(shape, stride, dtype=fake.dtype, device=device or fake.device))


def unwritten(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor in the form of `like`, zeros if it is small or of integers."""
    return _zeros(torch.empty_like(like, device=device, requires_grad=False))


def _zeros(fresh: torch.Tensor) -> torch.Tensor:
    small = fresh.numel() * fresh.element_size() < LARGE or not fresh.is_floating_point()
    return fresh.zero_() if small and fresh.device.type != "meta" else fresh
