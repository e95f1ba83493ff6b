"""Small, total helpers on FX graphs: insert nodes that know their value, and see through views to a tensor's base."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node, map_arg

aten = torch.ops.aten

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
VIEWS: tuple = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.flatten.using_ints)
VIEWS += (aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
SAME = (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)


def value(node: Node) -> torch.Tensor:
    """The fake tensor that a node stands for."""
    return node.meta["val"]


def arg(node: Node, index: int) -> Any:
    """A positional argument: what it is, the operator's schema says better than fx's types."""
    return node.args[index]


def call_function(node: Any, targets: tuple) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def same_size(a, b) -> bool:
    """Are two sizes (int or SymInt) known to be equal, without adding a guard?"""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return str(a) == str(b)


def same_shape(a, b) -> bool:
    return len(a) == len(b) and all(map(same_size, a, b))


def hint(size) -> int:
    """An int for a size: itself, or the value that a SymInt had when the graph was traced (0 if it has none)."""
    if isinstance(size, int):
        return size
    found = getattr(size.node, "hint", None)
    return int(found) if isinstance(found, int) else 0


class Emitter:
    """Inserts `call_function` nodes before `anchor`, each with its fake value and the metadata of `like`.

    `meta` overrides single entries (None drops one). An operator that refuses its arguments leaves no node behind.
    """

    KEEP = "stack_trace nn_module_stack fwd_nn_module_stack seq_nr partitioner_tag recompute ac_graph_id custom".split()

    def __init__(self, graph: Graph, anchor: Node, like: Node, **meta: Any):
        self.graph, self.anchor, self.value = graph, anchor, like.meta.get("val")
        self.meta = {k: like.meta[k] for k in self.KEEP if k in like.meta} | meta
        self.meta = {k: v for k, v in self.meta.items() if v is not None}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        real_args, real_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        with fake_mode_of((real_args, real_kwargs, self.value)):
            result = target(*real_args, **real_kwargs)
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self.meta, val=result)
        return node


def fake_mode_of(values: Any) -> contextlib.AbstractContextManager:
    """The fake mode of the first fake tensor in a nest of values; nothing if there is none."""
    leaves = pytree.tree_leaves(values)
    return next((x.fake_mode for x in leaves if isinstance(x, FakeTensor)), contextlib.nullcontext())


@dataclass(frozen=True)
class Matrix:
    """A matmul's operand, as what it really is: `base` reshaped to `shape` (2-D), and perhaps transposed.

    `base` is the tensor before the last views, transpositions and float casts: the one to quantize, and to share.
    """

    base: Node
    shape: tuple  # of base as a matrix, before the transposition; ints or SymInts
    transposed: bool


def peel(operand: Node) -> Matrix:
    """The `Matrix` behind a 2-D operand (or a 3-D one whose batch is 1). Total: at worst the operand itself."""
    shape = tuple(value(operand).shape)
    if len(shape) == 3:
        shape = shape[1:]
    node, flipped = operand, False
    best = Matrix(node, shape, flipped)
    while True:
        if call_function(node, CASTS):
            source = arg(node, 0)
            if (
                value(node).dtype not in FLOATS
                or value(source).dtype not in FLOATS
                or value(source).device != value(node).device
            ):
                return best
        elif call_function(node, SAME):
            source = arg(node, 0)
        elif call_function(node, VIEWS):
            source = arg(node, 0)
        elif _swaps_last_two(node) and _is_matrix(value(node).shape, shape):
            source, flipped, shape = arg(node, 0), not flipped, shape[::-1]
        else:
            return best
        node = source
        best = Matrix(node, shape, flipped)


def _is_matrix(shape, matrix) -> bool:
    """Is `shape` the 2-D `matrix`, perhaps with leading ones?"""
    return len(shape) >= 2 and all(isinstance(s, int) and s == 1 for s in shape[:-2]) and same_shape(shape[-2:], matrix)


def _swaps_last_two(node: Node) -> bool:
    if call_function(node, (aten.t.default,)):
        return value(node).dim() == 2
    rank = value(node).dim() if isinstance(node.meta.get("val"), torch.Tensor) else 0
    if call_function(node, (aten.transpose.int,)):
        return rank >= 2 and {int(arg(node, i)) % rank for i in (1, 2)} == {rank - 1, rank - 2}
    if call_function(node, (aten.permute.default,)):
        order = [int(d) % rank for d in arg(node, 1)]
        return rank >= 2 and order == [*range(rank - 2), rank - 1, rank - 2]
    return False
