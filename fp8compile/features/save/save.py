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
computes again; and what a copy is too inexact for (`passes/readers.py`). Something else may be kept in the
place of such a tensor: if backward needs it only to compute another one, that one gets the copy. So a
LayerNorm keeps x - mean: a copy of x would lose it where the mean is large.

    forward:  d = x - mean; return (.., x, mean)        backward:  d = x - mean; dx = f(d)
->
    forward:  d = x - mean; return (.., d_fp8, d_inverse)          dx = f(dequantize(d_fp8, d_inverse))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.utils._pytree as pytree
from torch.fx import Graph, Node, map_arg

from ... import compat
from ...config.recipe import WHOLE
from ...devices.formats import Format, pick
from ...frontend.inputs import readable_module
from ...ir import ops
from ...ir.fx_utils import (
    ALIASES,
    CASTS,
    FLOATS,
    VIEWS,
    Emitter,
    arg,
    aten,
    behind,
    call_function,
    hint,
    is_data,
    is_tensor,
    modules_of,
    reached,
    restride,
    value,
)
from ...ir.records import TableRecord
from ...ir.schemas import copies_at
from ...logs import get_logger
from ...passes.joint import Partitioned
from ...passes.magnified import Backward
from ...passes.readers import BLOCK, inexact, unreadable
from ...reporting.record_tables import megabytes, sizes
from .parts import SavedPart, memory, parts_of, row_major, slices

logger = get_logger(__name__)

LEAST = 1 << 20  # bytes of a tensor that is worth a copy


@dataclass(frozen=True)
class KeptRecord(TableRecord):
    """A tensor that forward keeps for backward in FP8. `module` made it; `tensor` is its dtype and sizes; the
    bytes are those of the copy with its scales, `before` those of the tensor."""

    key, titles, sides = "kept", ("kept for backward in FP8", "tensor", "bytes", "in FP8"), "<<>>"

    module: str
    tensor: str
    before: int
    bytes: int

    @classmethod
    def cells(cls, alike: Sequence[KeptRecord]) -> tuple[str, ...]:
        return (alike[0].tensor, *sizes(alike))

    @classmethod
    def brief(cls, records: Sequence[KeptRecord]) -> str:
        """ "kept for backward in FP8: 623 MB instead of 1,208"."""
        return f"kept for backward in FP8: {megabytes(records)}"


@dataclass(frozen=True)
class UnkeptRecord(TableRecord):
    """A large tensor that forward keeps for backward as it is, because a copy in FP8 would be too inexact for
    what backward does with it."""

    key, titles, sides = "unkept", ("not kept in FP8", "tensor", "bytes", "why"), "<<><"

    module: str
    tensor: str
    bytes: int
    reason: str

    @classmethod
    def cells(cls, alike: Sequence[UnkeptRecord]) -> tuple[str, ...]:
        return alike[0].tensor, f"{sum(record.bytes for record in alike):,}", alike[0].reason


@dataclass
class SavedInFP8:
    """What a forward keeps in FP8, and what it does not."""

    records: list[KeptRecord] = field(default_factory=list)
    unkept: list[UnkeptRecord] = field(default_factory=list)


def save(halves: Partitioned) -> int:
    """Rewrite both graphs in place. `SavedInFP8` gets what is kept in FP8; returns how many tensors are."""
    work = _Work(halves)
    left, before = work.tensors, 0
    while len(left) != before:  # a reader that a tensor was too inexact for may have gone with another tensor
        before, left = len(left), [views for views in left if not work.done(views)]
    for x in (x for views in left for x in views if x.name in work.readers):
        parts = parts_of(work.readers[x.name])
        if not (reason := work.unfit(x, parts)) and (reason := work.inexact(x, parts)):
            work.saved.unkept.append(UnkeptRecord(*_described(x), reason))
        logger.debug("%s is kept as it is: %s", x.name, reason or "another view of it is")
    if work.instead:
        compat.inductor.keep_instead(halves.forward.graph, halves.visible, work.instead)
        halves.forward.recompile()
        halves.backward.recompile()
    return len(work.saved.records)


class _Work:
    """Both halves, while copies take the places of tensors. `instead`: what forward will keep for each."""

    def __init__(self, halves: Partitioned):
        self.halves, self.saved = halves, halves.extras.of(SavedInFP8)
        outputs, visible = halves.outputs, halves.visible
        self.inputs = {x.name: x for x in outputs[visible:] if isinstance(x, Node)}  # of backward: sizes, too
        self.kept = {name: x for name, x in self.inputs.items() if is_tensor(x)}
        self.seen = {memory(x) for x in outputs[:visible] if isinstance(x, Node)}
        self.readers = {node.name: node for node in halves.backward.graph.find_nodes(op="placeholder")}
        self.linear = compat.dynamo.tag_backward(halves.backward.graph)
        inputs = {x.name for x in self.kept.values() if x.op == "placeholder"}
        self.backward = Backward(self.linear, {self.readers[name] for name in inputs & self.readers.keys()})
        self.form = pick(False, halves.fnuz)
        self.instead: dict[Node, tuple[Node, ...]] = {}
        self.spellings: dict[str, int] = {}

    @property
    def tensors(self) -> list[list[Node]]:
        """What forward keeps: for each memory, its views."""
        found: dict[Node, list[Node]] = defaultdict(list)
        for x in self.kept.values():
            found[memory(x)].append(x)
        return [*found.values()]

    def done(self, views: list[Node]) -> bool:
        """Keep copies of a tensor, if that is right; or of what backward computes of it."""
        if not all(x.name in self.readers for x in views):
            return False
        parts = {x: parts_of(self.readers[x.name]) for x in views}
        if any(self.unfit(x, parts[x]) for x in views):
            return False
        copied = sum(hint(value(part.nodes[0]).numel()) for x in views for part in parts[x])
        if copied > hint(value(memory(views[0])).numel()):
            return False
        if not any(self.inexact(x, parts[x]) for x in views):
            for x in views:
                self.keep(x, [(x, part) for part in parts[x]])
            return True
        later = self.later(views[0]) if len(views) == 1 else None
        if later is not None:
            self.keep(views[0], [later])
        return later is not None

    def unfit(self, x: Node, parts: list[SavedPart]) -> str:
        """Why a tensor is kept as it is, whatever becomes of errors; "" if a copy in FP8 is worth it."""
        tensor, base, nodes = value(x), memory(x), [node for part in parts for node in part.nodes]
        if not nodes or not all(node.users for node in nodes):
            return "backward does not read it"
        if tensor.dtype not in FLOATS:
            return "no floating-point tensor"
        if base.op == "placeholder" or base in self.seen:
            return "it lives anyway"
        shape = tensor.shape
        if any(is_data(size) for size in shape) or sum(not isinstance(size, int) for size in shape) > 1:
            return "its sizes are not known"
        whole = parts[0].columns is None
        uneven = len(shape) < 2 or not isinstance(shape[-1], int) or (whole and shape[-1] % BLOCK.columns)
        if uneven or not row_major(tensor):
            return f"its rows are not made of {BLOCK.columns} features each"
        if hint(tensor.numel()) * tensor.itemsize < LEAST:
            return "it is small"
        if compat.inductor.no_version_check(x):
            return "no version is checked"
        return next(filter(None, map(unreadable, nodes)), "")

    def inexact(self, x: Node, parts: list[SavedPart]) -> str:
        """Why a copy of a tensor would be too inexact; "" if it would not."""
        nodes = [node for part in parts for node in part.nodes]
        return next(filter(None, (inexact(x, node, self.backward) for node in nodes)), "")

    def later(self, x: Node) -> tuple[Node, SavedPart] | None:
        """A tensor of which backward may read a copy in the place of `x`: it computes it of what forward has,
        and nothing else needs `x`. In forward, and in backward, where casts make no difference."""
        reader, same = self.readers[x.name], defaultdict[str, list[Node]](list)
        again = reached([reader], lambda node: [user for user in node.users if user not in self.linear])
        for node in sorted(again)[1:]:
            if is_tensor(node) and not call_function(node, (*ALIASES, *CASTS)) and self.known(node):
                same[f"{value(node).dtype} {self.spelled(node)}"].append(node)
        for nodes in same.values():
            node, part = min(nodes, key=lambda node: self.in_forward(node) is None), SavedPart(None, nodes)
            if hint(value(node).numel()) != hint(value(x).numel()) or self.unfit(node, [part]):
                continue
            around = reached([reader], lambda y, nodes=nodes: () if y in nodes else y.users)  # type: ignore[misc]
            if not any(y in self.linear for y in around) and not self.inexact(node, [part]):
                made = self.in_forward(node, make=True)
                if not self.unfit(made, [part]) and not self.inexact(made, [part]):
                    return made, part
        return None

    def known(self, node: Node) -> bool:
        """True if a node of backward depends on nothing but what forward keeps as it is."""
        leaves = (x for x in reached([node], lambda x: x.all_input_nodes) if x.op == "placeholder")
        return all(leaf.name in self.inputs for leaf in leaves)

    def spelled(self, node: Node) -> str:
        """Equal for nodes of backward that compute the same, but for casts."""
        if node.op == "placeholder":
            return str(behind(self.inputs[node.name], CASTS))
        if call_function(node, CASTS):
            return self.spelled(arg(node, 0))
        args = map_arg((node.args, node.kwargs), lambda x: (self.spelled(x),))
        return f"#{self.spellings.setdefault(f'{node.target} {args}', len(self.spellings))}"

    def in_forward(self, node: Node, make: bool = False) -> Any:
        """The node of forward that computes the same as one of backward, which depends on nothing but what
        forward keeps. None if there is none, unless it is to be made."""
        if node.op == "placeholder":
            return self.inputs[node.name]
        args, kwargs = map_arg((node.args, node.kwargs), lambda x: self.in_forward(x, make))
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Node)]
        after = max(inputs, default=self.halves.forward.graph.find_nodes(op="placeholder")[-1])
        same = (x for x in after.users if x.target is node.target)
        found = next((x for x in same if (x.args, x.kwargs) == (args, kwargs)), None)
        if found is not None or not make:
            return found
        emit = Emitter(after.graph, after.next, node, partitioner_tag=None, recompute=None, ac_graph_id=None)
        return emit(node.target, *args, **kwargs)

    def keep(self, x: Node, copied: list[tuple[Node, SavedPart]]) -> None:
        """Let forward keep these copies in the place of a tensor."""
        reader, copies = self.readers[x.name], list[Node]()
        for made, part in copied:
            ours, made_copies = _kept(self.halves, made, reader, part, self.form)
            size = sum(hint(value(node).numel()) * value(node).itemsize for node in made_copies)
            self.saved.records.append(KeptRecord(*_described(ours if made is x else x), size))
            copies += made_copies
        self.instead[x] = tuple(copies)
        for name in _erase(reader, self.kept):
            self.instead.setdefault(self.kept[name], ())
            del self.readers[name]


def _kept(
    halves: Partitioned, x: Node, reader: Node, part: SavedPart, form: Format
) -> tuple[Node, tuple[Node, Node]]:
    """Copy a part of a tensor in forward, and let backward read the copy. The part, and the copy and its
    scales."""
    graph = halves.forward.graph
    if part.columns is not None:
        ours = next((node for node, found in slices(x) if found == part.columns), None)
        emit = Emitter(graph, x.next, x)
        x = ours or emit(aten.slice.Tensor, x, value(x).dim() - 1, *part.columns)
    copies = _copied(graph, x, form)
    for copy, name in zip(copies, ("fp8", "inverse"), strict=True):
        copy._rename(f"{x.name}_{name}")
    _read(halves.backward.graph, reader, part.nodes, copies)
    return x, copies


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
        if not row_major(value(node), dense=True):
            restride(graph, made)


def _erase(reader: Node, kept: Mapping[str, Node]) -> list[str]:
    """Erase an input of a backward and all that was computed for its readers alone; the names of the inputs
    that are gone, all of them `kept` by forward."""
    gone, graph = [], reader.graph
    droppable = {name for name, x in kept.items() if not compat.inductor.no_version_check(x)}
    dead = sorted(reached([reader], lambda node: node.users), reverse=True)
    while dead:
        node = dead.pop(0)
        inputs = node.all_input_nodes
        graph.erase_node(node)
        gone += [node.name] if node.op == "placeholder" else []
        unread = (x for x in inputs if not x.users and x not in dead)
        dead += [x for x in unread if x.op != "placeholder" or x.name in droppable]
    return gone


def _described(x: Node) -> tuple[str, str, int]:
    """The module that made a tensor, its dtype and sizes, and its bytes."""
    shape = " x ".join(str(hint(size)) for size in value(x).shape)
    kind = f"{str(value(x).dtype).removeprefix('torch.')} [{shape}]"
    return _module(x) or _module(memory(x)), kind, hint(value(x).numel()) * value(x).itemsize


def _module(x: Node) -> str:
    stack = x.meta.get("nn_module_stack") or {}
    return readable_module(list(stack.values())[-1][0]) if stack else ""
