"""What is kept of one tensor: views of its memory, and the parts by which backward reads each."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.fx import Node

from ...ir.fx_utils import ALIASES, SLICES, VIEWS, arg, aten, call_function, hint, same_size, value
from ...passes.readers import BLOCK

SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
Columns = tuple[int, int]  # the first one, and the one after the last


class SavedPart(NamedTuple):
    """Columns of an input of the backward (None: the whole tensor), and the nodes that stand for them."""

    columns: Columns | None
    nodes: list[Node]


def parts_of(reader: Node) -> list[SavedPart]:
    """The parts by which backward reads an input: all of it, unless it reads ranges of columns only."""
    found: dict[Columns | None, list[Node]] = defaultdict(list)
    for node, columns in slices(reader):
        found[columns].append(node)
    if None in found or any((end - first) % BLOCK.columns for first, end in found):  # type: ignore[misc]
        return [SavedPart(None, [reader])]
    return [SavedPart(columns, nodes) for columns, nodes in found.items()]


def slices(x: Node) -> Iterator[tuple[Node, Columns | None]]:
    """The readers of a tensor and of views of its rows, each with the range of columns it is, or None."""
    width, last = value(x).shape[-1] if value(x).dim() else None, value(x).dim() - 1
    for user in x.users:
        columns = None
        if isinstance(width, int) and call_function(user, (aten.slice.Tensor,)) and not user.kwargs:
            given: list = [*user.args, *(None, 0, None, None, 1)[len(user.args) :]]
            _, dim, first, end, step = given
            if dim in (-1, last) and step == 1 and all(isinstance(n, int | None) for n in (first, end)):
                columns = slice(first, end).indices(width)[:2]  # type: ignore[misc]
        elif isinstance(width, int) and call_function(user, SPLITS) and user.args[2:] in ((-1,), (last,)):
            widths = [part.shape[-1] for part in user.meta["val"]]
            for item in user.users:
                first = sum(widths[: arg(item, 1)])
                yield item, (first, first + widths[arg(item, 1)])
            continue
        elif call_function(user, VIEWS) and value(user).dim() and user.users:
            if same_size(value(user).shape[-1], width):
                yield from slices(user)
                continue
        yield user, columns


def memory(node: Node) -> Node:
    """The tensor whose memory this one is, or is a part of."""
    while call_function(node, ALIASES):
        source = arg(node, 0)
        if not isinstance(source, Node):
            break
        if node.target is operator.getitem and not call_function(source, SLICES):
            break
        node = source
    return node


def row_major(tensor: torch.Tensor, dense: bool = False) -> bool:
    """True if a tensor is row-major, as far as known without a guard. If not `dense`, rows may lie apart."""
    expected: int | torch.SymInt = 1
    for dim in reversed(range(tensor.dim())):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if not same_size(size, 1) and not same_size(stride, expected):
            rows = dim < tensor.dim() - 1 and all(same_size(x, 1) for x in tensor.shape[dim + 1 : -1])
            if dense or not rows or hint(stride) < hint(expected):
                return False
            expected = stride
        expected = expected * size
    return True
