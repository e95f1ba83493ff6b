"""All-gathers of a graph: the tensor of each rank that makes up a gathered one, and the steps to its layout.

    ag = all_gather_into_tensor(local [2, 8, 128], 4, group); wait = wait_tensor(ag)     [8, 8, 128]
    parts = split(wait, 2); whole = cat([parts[0], .., parts[3]], 1)                     [2, 32, 128]

`whole` is the `AllGather` of `local` along dimension 1, after the steps wait, split and cat. A gather along
dimension 0 needs no cat. Where shards are uneven, the last ranks pad theirs, which a slice drops again.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import compat
from ..ir.fx_utils import SAME, VIEWS, arg, aten, call_function, same_shape, same_size, value


@dataclass(frozen=True)
class AllGather:
    """`node` is the collective, `steps` all nodes from its wait to the gathered tensor, in their order."""

    node: Node
    steps: tuple[Node, ...]
    dim: int  # of the local part, along which the parts lie
    size: int | None = None  # of the gathered tensor along `dim`, if it was sliced

    @property
    def local(self) -> Node:
        """This rank's part."""
        return arg(self.node, 0)

    @property
    def group(self) -> str:
        return arg(self.node, 2)

    @property
    def wait(self) -> Node:
        return self.steps[0]

    def kept(self, rank: int) -> int | None:
        """How much of the part of a rank remains after the slice, along `dim`; None: all of it."""
        part = value(self.local).shape[self.dim]
        if self.size is None or not isinstance(part, int):
            return None
        left = min(max(self.size - rank * part, 0), part)
        return None if left == part else left


def all_gather_of(node: Node) -> AllGather | None:
    """The all-gather whose result `node` is, after views and copies; None for any other tensor."""
    views: list[Node] = []
    while call_function(node, (*VIEWS, *SAME, aten.clone.default)):
        views.insert(0, node)
        node = arg(node, 0)
    size = None
    cut: list[Node] = []
    if call_function(node, (aten.slice.Tensor,)):
        given: list[Any] = [*node.args[1:], *(0, 0, None, 1)[len(node.args) - 1 :]]
        dim, start, _, step = given
        if (start, step) != (0, 1) or not isinstance(value(node).shape[dim], int):
            return None
        cut, size = [node], value(node).shape[dim]
        node = arg(node, 0)
        if not isinstance(value(node).shape[dim], int):
            return None
    found = _cat(node) if call_function(node, (aten.cat.default,)) else _direct(node)
    if found is None or (cut and arg(cut[0], 1) % value(found.local).dim() != found.dim):
        return None
    return AllGather(found.node, (*found.steps, *cut, *views), found.dim, size)


def _direct(node: Node) -> AllGather | None:
    waits = call_function(node, compat.process_groups.WAIT)
    if not waits or not call_function(arg(node, 0), compat.process_groups.ALL_GATHER):
        return None
    return AllGather(arg(node, 0), (node,), 0)


def _cat(node: Node) -> AllGather | None:
    """All parts of a gather along dimension 0, in their order, put together along another dimension."""
    parts = arg(node, 0)
    dim = int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0))  # type: ignore[arg-type]
    cut = parts[0]
    if call_function(cut, (operator.getitem,)):
        whole = arg(cut, 0)
        ordered = all(x.target is operator.getitem and x.args == (whole, i) for i, x in enumerate(parts))
        steps = (whole, *parts)
        splits = (aten.split.Tensor, aten.split_with_sizes.default)
        known = call_function(whole, splits) and _dim(whole, 2) == 0
    else:
        ordered, steps, known = _slices(parts), tuple(parts), True
        whole = cut
    if not (ordered and known):
        return None
    found = _direct(arg(whole, 0))
    if found is None or len(parts) != arg(found.node, 1):
        return None
    local = value(found.local)
    if not all(same_shape(value(part).shape, local.shape) for part in parts):
        return None
    return AllGather(found.node, (*found.steps, *steps, node), dim % local.dim())


def _slices(parts: list[Node]) -> bool:
    """True if these are slices of one tensor along dimension 0, one after the other."""
    start = 0
    for part in parts:
        alike = call_function(part, (aten.slice.Tensor,)) and arg(part, 0) is arg(parts[0], 0)
        if not alike or _dim(part, 1) != 0:
            return False
        first, rows = (part.args[2] if len(part.args) > 2 else 0), value(part).shape[0]
        if len(part.args) > 4 or not isinstance(rows, int) or not same_size(first, start):
            return False
        start += rows
    return True


def _dim(node: Node, position: int) -> int:
    return int(node.args[position]) if len(node.args) > position else 0  # type: ignore[arg-type]


def wire_dtype(like: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """What an FP8 tensor is sent as: FP8 by NCCL, as torch's fusion with a matmul expects; bytes by gloo."""
    return torch.uint8 if like.device.type == "cpu" else dtype
