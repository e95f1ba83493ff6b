"""save: keep large tensors for backward in FP8, with `save="fp8"`.

Runs behind the partitioner, which has decided what forward keeps. In forward, a kept tensor x gets a copy in E4M3, with a power
of two as the scale of each 1 x 128 elements; the copy is kept in its place. In backward all that read x read the copy.

    forward:  return (.., x)                backward:  dx = f(x)
->
    amax = amax_blocks(x, False, [1, 128]); scale = current_scale(amax); x_inverse = inverse(scale)
    x_fp8 = quantize(x, scale); return (.., x_fp8, x_inverse)
                                            dx = f(dequantize(x_fp8, x_inverse))

Forward reads x itself, so its results are the same. The cast is part of the kernel that makes or reads x in forward (`fuse`),
and `dequantize` part of those that read x in backward. If a matmul of forward has cast x already, that copy is kept.

These are left alone: what is small; what a matmul or attention reads in backward, for which the values would have to be
written again; what lives anyway (inputs and outputs of the graph); what the user's checkpointing computes again; what an
operator reads that small errors change much, like the exp of a softmax; a softmax itself, and sines of positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

from .. import compat
from ..codegen.traffic import fusable
from ..config.recipe import WHOLE, Block
from ..devices.formats import Format, pick
from ..ir import ops
from ..ir.fx_utils import (
    CASTS,
    FLOATS,
    PERMUTES,
    SAME,
    SLICES,
    VIEWS,
    Emitter,
    arg,
    aten,
    call_function,
    hint,
    is_data,
    is_tensor,
    same_size,
    value,
)
from ..ir.inputs import readable_module
from ..ir.records import KeptRecord
from ..logs import get_logger

logger = get_logger(__name__)

LEAST = 1 << 20  # bytes of a tensor that is worth a copy
BLOCK = Block(1, 128)
CAST = (ops.quantize, ops.quantize_both, ops.amax, ops.amax_blocks)
THROUGH = (*VIEWS, *PERMUTES, *CASTS, *SAME, aten.expand.default, aten.clone.default)
PARTS = (*VIEWS, *PERMUTES, *SLICES, *SAME, aten.expand.default)
COMPARED = tuple(getattr(getattr(aten, name), of) for name in "eq ne lt le gt ge".split() for of in ("Tensor", "Scalar"))
# what turns a small relative error into a large one
STEEP = tuple(getattr(aten, name).default for name in "sin cos tan floor ceil round trunc frac sign exp expm1 exp2".split())
SHIFTS = (aten.sub.Tensor, aten.add.Tensor, aten.mul.Scalar, aten.div.Scalar, aten.sub.Scalar, aten.add.Scalar)
SCALED = (aten.mul.Tensor, aten.div.Tensor)


@dataclass
class Halves:
    """A forward and its backward, behind the partitioner. `visible`: how many outputs of forward its caller sees; it keeps the
    others. `fnuz`: the device uses the fnuz FP8 encodings."""

    forward: GraphModule
    backward: GraphModule
    visible: int
    fnuz: bool = False
    kept: list[KeptRecord] = field(default_factory=list)

    @property
    def outputs(self) -> Sequence[object]:
        (output,) = self.forward.graph.find_nodes(op="output")
        return output.args[0]  # type: ignore[return-value]


def save(halves: Halves) -> int:
    """Rewrite both graphs in place, and note in `halves.kept` what is kept in FP8; returns how many tensors are."""
    kept = [x for x in halves.outputs[halves.visible :] if isinstance(x, Node) and is_tensor(x)]
    seen = {_memory(x) for x in halves.outputs[: halves.visible] if isinstance(x, Node)}
    shared = Counter(map(_memory, kept))
    readers = {node.name: node for node in halves.backward.graph.find_nodes(op="placeholder")}
    form, instead = pick(False, halves.fnuz), {}
    for x in kept:
        reason = _reason(x, readers.get(x.name), seen, shared)
        if reason:
            logger.debug("%s is kept as it is: %s", x.name, reason)
            continue
        copies = _copied(halves.forward.graph, x, form)
        for copy, name in zip(copies, ("fp8", "inverse"), strict=True):
            copy._rename(f"{x.name}_{name}")
        instead[x] = copies
        _read(halves.backward.graph, readers[x.name], copies)
        halves.kept.append(_record(x, copies))
    if instead:
        compat.keep_instead(halves.forward.graph, halves.visible, instead)
        halves.forward.recompile()
        halves.backward.recompile()
    return len(instead)


def _reason(x: Node, reader: Node | None, seen: set[Node], shared: Counter[Node]) -> str:
    """Why a tensor is kept as it is; "" if it is kept in FP8."""
    tensor, base = value(x), _memory(x)
    if reader is None or not reader.users:
        return "backward does not read it"
    if tensor.dtype not in FLOATS:
        return "no floating-point tensor"
    if base.op == "placeholder" or base in seen:
        return "it lives anyway"
    if shared[base] > 1:
        return "another view of it is kept, too"
    shape = tensor.shape
    if any(is_data(size) for size in shape) or sum(not isinstance(size, int) for size in shape) > 1:
        return "its sizes are not known"
    if len(shape) < 2 or not isinstance(shape[-1], int) or shape[-1] % BLOCK.columns or not _dense(tensor):
        return f"its rows are not made of {BLOCK.columns} features each"
    if hint(tensor.numel()) * tensor.itemsize < LEAST:
        return "it is small"
    return "no version is checked" if compat.no_version_check(x) else _delicate(x) or _unreadable(reader)


def _delicate(x: Node) -> str:
    """What a tensor is, if it is too delicate: the probabilities of a softmax (a router's, say), or a rotation of positions,
    which is no activation."""
    while call_function(x, THROUGH) or call_function(x, SCALED) and not isinstance(arg(x, 1), Node):
        x = arg(x, 0)
    if call_function(x, (aten.sin.default, aten.cos.default)):
        return "it is a sine or cosine"
    return "it is a softmax" if call_function(x, (aten.div.Tensor,)) and call_function(arg(x, 0), (aten.exp.default,)) else ""


def _unreadable(x: Node) -> str:
    """Why backward has to read this input in high precision; "" if it may read a copy in FP8."""
    stack, seen = [x], {x}
    while stack:
        for user in stack.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if user.op == "output":
                return "it is a result of the backward"
            if compat.is_checkpointed(user):
                return "the user's checkpointing starts from it"
            if call_function(user, THROUGH):
                stack.append(user)
            elif not call_function(user, CAST) and not fusable(user, ()):
                return f"{user.target} reads it"
            elif user.target in COMPARED and (isinstance(arg(user, 1), Node) or arg(user, 1) != 0 or "eq" in str(user.target)):
                return f"{user.target} compares it"
    return _steep(x)


def _steep(x: Node) -> str:
    """The operator, if any, that takes an exp or the like of a tensor, as it is or shifted: what a softmax does. (A sigmoid, or
    the exp of a square, is flat where its argument is large.)"""
    stack, seen = [x], {x}
    while stack:
        for user in stack.pop().users:
            if call_function(user, STEEP):
                return f"{user.target} reads it"
            scaled = call_function(user, SCALED) and not isinstance(arg(user, 1), Node)
            if user not in seen and (scaled or call_function(user, (*THROUGH, *SHIFTS))):
                seen.add(user)
                stack.append(user)
    return ""


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
    """The copy of a tensor, row by row, that a matmul of forward reads, and its scale, if there is one for the whole tensor."""
    for reader in (x, *(user for user in x.users if call_function(user, VIEWS))):
        for cast in reader.users:
            if not call_function(cast, (ops.quantize, ops.quantize_both)) or arg(cast, 2) is not form.dtype:
                continue
            both = cast.target is ops.quantize_both
            more: list = [*cast.args[5:7], *(WHOLE, None)[len(cast.args[5:7]) :]]
            if tuple(more[0]) != WHOLE or more[1] is not None or value(reader).shape[-1] != value(x).shape[-1]:
                continue
            copies = [user for user in cast.users if arg(user, 1) == 0] if both else [] if arg(cast, 4) else [cast]
            if copies and not any(user.op == "output" for user in copies[0].users):
                return copies[0], arg(cast, 1)
    return None


def _read(graph: Graph, x: Node, copies: tuple[Node, Node]) -> None:
    """Let a backward graph read the copy of an input, and drop the input."""
    with graph.inserting_before(x):
        copy, inverse = (graph.placeholder(node.name) for node in copies)
    for placeholder, made in zip((copy, inverse), copies, strict=True):
        placeholder.meta.update(x.meta, val=value(made))
        placeholder.meta.pop("tensor_meta", None)
    emit = Emitter(graph, min(x.users), min(x.users), recompute=None, ac_graph_id=None)
    emit.meta |= {name: x.meta[name] for name in ("nn_module_stack", "fwd_nn_module_stack") if name in x.meta}
    block = list(WHOLE if value(inverse).dim() == 1 else BLOCK)
    again = emit(ops.dequantize, copy, inverse, value(x).dtype, block)
    if value(x).dim() != 2:
        shape = [size if isinstance(size, int) else -1 for size in value(x).shape]
        again = emit(aten.view.default, again, shape)
    x.replace_all_uses_with(again)
    graph.erase_node(x)


def _record(x: Node, copies: tuple[Node, Node]) -> KeptRecord:
    stack = x.meta.get("nn_module_stack") or {}
    module = readable_module(list(stack.values())[-1][0]) if stack else ""
    before, after = (sum(hint(value(node).numel()) * value(node).itemsize for node in nodes) for nodes in ((x,), copies))
    shape = " x ".join(str(hint(size)) for size in value(x).shape)
    return KeptRecord(module, f"{str(value(x).dtype).removeprefix('torch.')} [{shape}]", before, after)


def _memory(node: Node) -> Node:
    """The tensor whose memory this one is, or is a part of."""
    while call_function(node, PARTS) or node.op == "call_function" and "getitem" in str(node.target):
        source = arg(node, 0)
        if not isinstance(source, Node) or "getitem" in str(node.target) and not call_function(source, SLICES):
            break
        node = source
    return node


def _dense(tensor: torch.Tensor) -> bool:
    """Is a tensor in row-major order, as far as is known without a guard?"""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not (isinstance(size, int) and size == 1) and not same_size(stride, expected):
            return False
        expected = expected * size
    return True
