"""save: keep large tensors for backward in FP8, with `save="fp8"`.

Runs after the partitioner, which has decided what forward keeps. In forward, a kept tensor x gets a copy in
E4M3, with a power of two as the scale of each 1 x 128 elements; the copy is kept in its place. In backward
all that read x read the copy.

    forward:  return (.., x)                backward:  dx = f(x)
->
    amax = amax_blocks(x, False, [1, 128]); scale = current_scale(amax); x_inverse = inverse(scale)
    x_fp8 = quantize(x, scale); return (.., x_fp8, x_inverse)
                                            dx = f(dequantize(x_fp8, x_inverse))

Forward reads x itself, so its results are the same. The cast is part of the kernel that makes or reads x in
forward (`fuse`), and `dequantize` part of those that read x in backward. If a matmul of forward has cast x
already, that copy is kept.

If backward reads x by parts, such as gate and up, which a merged matmul has made side by side, each part gets
a copy of its own: the kernels of forward that read the parts write the copies. A tensor is free as soon as no
view of it is kept, so all its kept views get a copy or none does.

These are left alone: what is small; what a matmul or attention reads in backward, for which the values would
have to be written again; what lives anyway (inputs and outputs of the graph); what the user's checkpointing
computes again; what an operator reads that small errors change much, like the exp of a softmax; a softmax
itself, and sines of positions.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from ... import compat
from ...config.recipe import WHOLE
from ...devices.formats import Format, pick
from ...ir import ops
from ...ir.fx_utils import (
    ALIASES,
    FLOATS,
    SLICES,
    VIEWS,
    Emitter,
    arg,
    aten,
    call_function,
    hint,
    is_data,
    is_tensor,
    modules_of,
    restride,
    same_size,
    value,
)
from ...ir.inputs import readable_module
from ...ir.records import TableRecord
from ...ir.schemas import copies_at
from ...logs import get_logger
from ...passes.joint import Partitioned
from ...passes.readers import BLOCK, delicate, unreadable
from ...reporting.record_tables import megabytes, sizes

logger = get_logger(__name__)

LEAST = 1 << 20  # bytes of a tensor that is worth a copy
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
Columns = tuple[int, int]  # the first one, and the one after the last


@dataclass(frozen=True)
class KeptRecord(TableRecord):
    """A tensor that forward keeps for backward in FP8. `module` made it; `tensor` is its dtype and sizes; the
    bytes are those of the copy with its scales, `before` those of the tensor."""

    key, titles, sides = "kept", ("kept for backward in FP8", "tensor", "bytes", "in FP8"), "<<>>"

    module: str
    tensor: str
    before: int
    bytes: int

    @property
    def like(self) -> Hashable:
        return self.tensor, self.bytes

    @classmethod
    def cells(cls, alike: Sequence[KeptRecord]) -> tuple[str, ...]:
        return (alike[0].tensor, *sizes(alike))

    @classmethod
    def brief(cls, records: Sequence[KeptRecord]) -> str:
        """ "kept for backward in FP8: 623 MB instead of 1,208"."""
        return f"kept for backward in FP8: {megabytes(records)}"


@dataclass
class SavedInFP8:
    """What a forward keeps in FP8."""

    records: list[KeptRecord] = field(default_factory=list)


def save(halves: Partitioned) -> int:
    """Rewrite both graphs in place. `SavedInFP8` gets what is kept in FP8; returns how many tensors are."""
    kept = [x for x in halves.outputs[halves.visible :] if isinstance(x, Node) and is_tensor(x)]
    seen = {_memory(x) for x in halves.outputs[: halves.visible] if isinstance(x, Node)}
    readers = {node.name: node for node in halves.backward.graph.find_nodes(op="placeholder")}
    form, instead = pick(False, halves.fnuz), {}
    of_memory: dict[Node, list[tuple[Node, list[SavedPart]]]] = defaultdict(list)
    for x in kept:
        of_memory[_memory(x)].append((x, _parts(readers[x.name]) if x.name in readers else []))
    for base, views in of_memory.items():
        reasons = [_reason(x, parts, seen) for x, parts in views]
        copied = sum(hint(value(part.nodes[0]).numel()) for _, parts in views for part in parts)
        if not any(reasons) and copied > hint(value(base).numel()):
            reasons = ["two views of it are kept"]
        if any(reasons):
            logger.debug("%s is kept as it is: %s", base.name, next(filter(None, reasons)))
            continue
        for x, parts in views:
            instead[x] = [node for part in parts for node in _kept(halves, x, readers[x.name], part, form)]
            _erase(readers[x.name])
    if instead:
        compat.inductor.keep_instead(halves.forward.graph, halves.visible, instead)
        halves.forward.recompile()
        halves.backward.recompile()
    return len(halves.extras.of(SavedInFP8).records)


class SavedPart(NamedTuple):
    """Columns of an input of the backward (None: the whole tensor), and the nodes that stand for them."""

    columns: Columns | None
    nodes: list[Node]


def _parts(reader: Node) -> list[SavedPart]:
    """The parts by which backward reads an input: all of it, unless it reads ranges of columns only."""
    found: dict[Columns | None, list[Node]] = defaultdict(list)
    for node, columns in _slices(reader):
        found[columns].append(node)
    if None in found or any((end - first) % BLOCK.columns for first, end in found):  # type: ignore[misc]
        return [SavedPart(None, [reader])]
    return [SavedPart(columns, nodes) for columns, nodes in found.items()]


def _slices(x: Node) -> Iterator[tuple[Node, Columns | None]]:
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
                yield from _slices(user)
                continue
        yield user, columns


def _reason(x: Node, parts: list[SavedPart], seen: set[Node]) -> str:
    """Why a tensor is kept as it is; "" if it is kept in FP8."""
    tensor, base, nodes = value(x), _memory(x), [node for part in parts for node in part.nodes]
    if not nodes or not all(node.users for node in nodes):
        return "backward does not read it"
    if tensor.dtype not in FLOATS:
        return "no floating-point tensor"
    if base.op == "placeholder" or base in seen:
        return "it lives anyway"
    shape = tensor.shape
    if any(is_data(size) for size in shape) or sum(not isinstance(size, int) for size in shape) > 1:
        return "its sizes are not known"
    whole = parts[0].columns is None
    uneven = len(shape) < 2 or not isinstance(shape[-1], int) or (whole and shape[-1] % BLOCK.columns)
    if uneven or not _rows(tensor):
        return f"its rows are not made of {BLOCK.columns} features each"
    if hint(tensor.numel()) * tensor.itemsize < LEAST:
        return "it is small"
    if compat.inductor.no_version_check(x):
        return "no version is checked"
    return delicate(x) or next(filter(None, map(unreadable, nodes)), "")


def _kept(halves: Partitioned, x: Node, reader: Node, part: SavedPart, form: Format) -> tuple[Node, Node]:
    """Copy a part of a tensor in forward, and let backward read the copy; returns the copy and its scales."""
    graph = halves.forward.graph
    if part.columns is not None:
        ours = next((node for node, found in _slices(x) if found == part.columns), None)
        emit = Emitter(graph, x.next, x)
        x = ours or emit(aten.slice.Tensor, x, value(x).dim() - 1, *part.columns)
    copies = _copied(graph, x, form)
    for copy, name in zip(copies, ("fp8", "inverse"), strict=True):
        copy._rename(f"{x.name}_{name}")
    _read(halves.backward.graph, reader, part.nodes, copies)
    halves.extras.of(SavedInFP8).records.append(_record(x, copies))
    return copies


def _copied(graph: Graph, x: Node, form: Format) -> tuple[Node, Node]:
    """The FP8 copy of a tensor as a matrix, and the inverses of its scales."""
    made = _cast_already(x, form)
    if made is not None:
        cast, scale = made
        return cast, Emitter(graph, max(cast, scale).next, cast)(ops.inverse, scale)
    emit = Emitter(graph, x.next, x)
    matrix = x if value(x).dim() == 2 else emit(aten.view.default, x, [-1, value(x).shape[-1]])
    amax = emit(ops.amax_blocks, matrix, False, list(BLOCK))
    scale = emit(ops.current_scale, amax, form.max, 0, True)
    inverse = emit(ops.inverse, scale)
    return emit(ops.quantize, matrix, scale, form.dtype, form.max, False, list(BLOCK)), inverse


def _cast_already(x: Node, form: Format) -> tuple[Node, Node] | None:
    """The copy of a tensor, row by row, that a forward matmul reads, and its scale, if that is only one."""
    for reader in (x, *(user for user in x.users if call_function(user, VIEWS))):
        for cast in reader.users:
            fitting = [copy for copy in copies_at(cast) if not copy.transposed and copy.dtype is form.dtype]
            plain = next(iter(fitting), None)
            if plain is None or plain.block != WHOLE or plain.rows is not None:
                continue
            if value(reader).shape[-1] != value(x).shape[-1]:
                continue
            copies = [cast]
            if plain.item is not None:
                copies = [user for user in cast.users if arg(user, 1) == plain.item]
            if copies and not any(user.op == "output" for user in copies[0].users):
                return copies[0], plain.scale
    return None


def _read(graph: Graph, reader: Node, nodes: list[Node], copies: tuple[Node, Node]) -> None:
    """Let a backward graph read the copy of an input instead of nodes that stand for it, or for a part."""
    first = min(user for node in nodes for user in node.users)
    with graph.inserting_before(reader):
        copy, inverse = (graph.placeholder(node.name) for node in copies)
    for placeholder, made in zip((copy, inverse), copies, strict=True):
        placeholder.meta.update(reader.meta, val=value(made))
        placeholder.meta.pop("tensor_meta", None)
    emit = Emitter(graph, first, first, recompute=None, ac_graph_id=None)
    emit.meta |= modules_of(reader)
    block = list(WHOLE if value(inverse).dim() == 1 else BLOCK)
    again = emit(ops.dequantize, copy, inverse, value(nodes[0]).dtype, block)
    for node in nodes:
        shape = [size if isinstance(size, int) else -1 for size in value(node).shape]
        made = again if len(shape) == 2 else emit(aten.view.default, again, shape)
        node.replace_all_uses_with(made)
        if not _rows(value(node), dense=True):
            restride(graph, made)


def _erase(node: Node) -> None:
    """Erase a node that nothing reads but its own parts."""
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)


def _record(x: Node, copies: tuple[Node, Node]) -> KeptRecord:
    module = _module(x) or _module(_memory(x))
    before, *others = (hint(value(node).numel()) * value(node).itemsize for node in (x, *copies))
    shape = " x ".join(str(hint(size)) for size in value(x).shape)
    kind = f"{str(value(x).dtype).removeprefix('torch.')} [{shape}]"
    return KeptRecord(module, kind, before, sum(others))


def _module(x: Node) -> str:
    stack = x.meta.get("nn_module_stack") or {}
    return readable_module(list(stack.values())[-1][0]) if stack else ""


def _memory(node: Node) -> Node:
    """The tensor whose memory this one is, or is a part of."""
    while call_function(node, ALIASES):
        source = arg(node, 0)
        if not isinstance(source, Node):
            break
        if node.target is operator.getitem and not call_function(source, SLICES):
            break
        node = source
    return node


def _rows(tensor: torch.Tensor, dense: bool = False) -> bool:
    """Is a tensor row-major, as far as is known without a guard? If not `dense`, rows may lie apart."""
    expected: int | torch.SymInt = 1
    for dim in reversed(range(tensor.dim())):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if not _is_one(size) and not same_size(stride, expected):
            rows = dim < tensor.dim() - 1 and all(map(_is_one, tensor.shape[dim + 1 : -1]))
            if dense or not rows or hint(stride) < hint(expected):
                return False
            expected = stride
        expected = expected * size
    return True


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1
