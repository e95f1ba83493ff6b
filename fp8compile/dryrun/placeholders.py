"""Callables that replace compiled graphs: they compute almost nothing and return tensors of the right shapes.

`explain` and `estimate` still have to get from one graph to the next, through graph breaks and through code
that Dynamo leaves to eager mode. Graphs return zeros to that code, so that indices are in range. Tensors
saved for backward are on the meta device and use no memory. Other large tensors are not written: fresh pages
of a process read as zeros and get memory only when they are written. Small numbers that follow from sizes,
constants and integer inputs are computed: code after a graph break may use them as slice lengths, where 0
would be wrong. Results of a matmul or a norm are never computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from .. import compat
from ..runtime.inner import Inner
from ..runtime.interpreter import Boxed

LARGE = 1 << 20  # bytes; smaller tensors are written with zeros, or computed if that is cheap


def placeholder_callable(graph: Graph, device: torch.device | None = None) -> Boxed:
    """A boxed callable that returns placeholders for the outputs of a graph of AOTAutograd's partitioner.

    The graph has fake values in meta["val"]. Tensors are on `device`; None: where the fake values are.
    Symbolic sizes are taken from the arguments.
    """
    inputs = graph.find_nodes(op="placeholder")
    end = next(iter(graph.find_nodes(op="output")))
    outputs: Sequence[Any] = end.args[0]  # type: ignore[assignment]
    described = end.meta.get("desc") or [None] * len(outputs)
    saved = {i for i, what in enumerate(described) if type(what).__name__.startswith("SavedForBackwards")}

    def run(args: list[Any]) -> list[Any]:
        given: dict[Any, Any] = dict(zip(inputs, args, strict=True))
        sizes = _sizes(given)
        known = _computed(graph, given, sizes, device)
        made: dict[Any, Any] = {}
        results = []
        for i, node in enumerate(outputs):
            key = (node, i in saved)
            if isinstance(node, Node) and key not in made:
                where = torch.device("meta") if i in saved else device
                source = given if i in saved or node in given else known
                made[key] = source[node] if node in source else _like(node.meta.get("val"), sizes, where)
            results.append(made[key] if isinstance(node, Node) else node)
        args.clear()
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


PLACEHOLDERS = Inner(lambda gm, example_inputs, **_: placeholder_callable(gm.graph), computes=False)


def _is_size(node: Node) -> bool:
    """Whether a node is a number that follows from the sizes of the arguments."""
    fake = node.meta.get("val")
    return isinstance(fake, int) or (isinstance(fake, torch.SymInt) and fake.node.hint is not None)


def _is_small(node: Node) -> bool:
    """Whether a node is a tensor of one element or none, or of integers: an input, or under LARGE bytes."""
    fake = node.meta.get("val")
    if not isinstance(fake, torch.Tensor):
        return False
    if any(isinstance(x, torch.SymInt) and x.node.hint is None for x in fake.shape):
        return False  # of a size that depends on data: tensors that are not computed would have another
    numel = _number(fake.numel(), {})
    return numel <= 1 or (
        not fake.is_floating_point() and (node.op == "placeholder" or numel * fake.element_size() < LARGE)
    )


@torch.no_grad()
def _computed(
    graph: Graph, given: dict[Node, Any], sizes: dict[Any, Any], device: torch.device | None
) -> dict[Node, Any]:
    """The values of nodes that depend on sizes and on small tensors only, where they can be computed."""
    known: dict[Node, Any] = {}
    for node in graph.nodes:
        target = node.target
        if _is_size(node):
            known[node] = _number(node.meta["val"], sizes)
        elif not _is_small(node) or not known.keys() >= {*node.all_input_nodes}:
            continue
        elif node.op == "placeholder":
            known[node] = given[node]
        elif node.op == "get_attr":
            known[node] = getattr(graph.owning_module, str(target), None)
        elif (
            isinstance(target, compat.OpOverload)
            and target.namespace in ("aten", "prims")
            and not target._schema.is_mutable
        ):
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            args, kwargs = tree_map_only(torch.device, lambda where: device or where, (args, kwargs))
            with contextlib.suppress(Exception):  # no kernel for this device: the output becomes zeros
                known[node] = target(*args, **kwargs)
        if known.get(node) is None or isinstance(known[node], compat.FakeTensor):
            known.pop(node, None)
    return known


def _sizes(given: dict[Node, Any]) -> dict[Any, Any]:
    """The value of each symbol that is a size of an argument, or an argument."""
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
    return 1 if value.node.hint is None else int(value.node.hint)  # no hint: the size depends on data


def _like(fake: Any, sizes: dict[Any, Any], device: torch.device | None) -> Any:
    if isinstance(fake, (torch.SymInt, int)):
        return _number(fake, sizes)
    if not isinstance(fake, torch.Tensor):
        return fake
    shape, stride = ([_number(x, sizes) for x in numbers] for numbers in (fake.shape, fake.stride()))
    return _zeros(torch.empty_strided(shape, stride, dtype=fake.dtype, device=device or fake.device))


def unwritten(like: torch.Tensor) -> torch.Tensor:
    """A tensor like `like`, on the CPU: zeros if it is small or of integers, else unwritten memory."""
    return _zeros(torch.empty_like(like, device="cpu", requires_grad=False))


def _zeros(fresh: torch.Tensor) -> torch.Tensor:
    small = fresh.numel() * fresh.element_size() < LARGE or not fresh.is_floating_point()
    return fresh.zero_() if small and fresh.device.type != "meta" else fresh
