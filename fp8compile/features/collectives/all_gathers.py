"""all_gathers: let all-gathers carry FP8. The rank casts its part, and the gather moves one byte an element.

    whole = wait(all_gather(local)); w8 = quantize(whole, scale)
->
    local8 = quantize(local, scale); w8 = wait(all_gather(local8))

In graphs, activations are gathered in front of a column-parallel linear where a sequence is sharded (sequence
parallel), their gradients after a row-parallel one, and weights where a model gathers its shards itself
("simple FSDP"). A tensor is moved if all that read it are FP8 matmuls which cast it alike, with one scale.
The scale is that of the whole tensor, see `collectives`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch.fx import Graph, Node

from ...ir import ops
from ...ir.fx_utils import CASTS, SAME, Emitter, arg, aten, call_function, same_shape, value, view_sizes
from ...ir.matmul import Matmul
from ...passes.all_gather_nodes import AllGather, all_gather_of
from ...passes.joint import Joint
from ...passes.plan import Operand
from ...passes.written import Written
from .collectives import LAYOUT, SIZES, cast_local, choose, move, reason_against


def all_gathers(joint: Joint) -> int:
    """Choose the gathers that can carry FP8."""
    return choose(joint, all_gather_of, _reason)


def move_all_gathers(joint: Joint) -> int:
    return move(joint, AllGather, _carry)


def _reason(gather: AllGather, operands: Collection[Operand], matmuls: Mapping[Node, Matmul]) -> str:
    """Why a gather stays in high precision; "" if it can carry FP8."""
    if any(operand.offs is not None or operand.matrix.stack > 1 for operand in operands):
        return "read by a grouped matmul"
    if value(gather.local).dim() < 2:
        return "its parts are no matrices"
    steps = set(gather.steps)
    return reason_against(operands, gather.wait, lambda x: x in steps or call_function(x, LAYOUT), matmuls)


def _carry(written: Written, operand: Operand, gather: AllGather, scale: Node, _inverse: Node) -> None:
    """Gather the FP8 values of a tensor whose parts each rank casts."""
    whole = _gathered(written.graph, operand, gather, scale)
    matrices: dict[str, Node] = {}
    for copy in written.copies(operand):
        cast = written.casts.pop(copy)
        rows, columns = value(arg(cast, 0)).shape
        if copy.shape not in matrices:
            matrices[copy.shape] = whole
            if not same_shape(value(whole).shape, (rows, columns)):
                emit = written.after(whole, operand)
                matrices[copy.shape] = emit(aten.view.default, whole, view_sizes(rows, columns))
        made = matrices[copy.shape]
        if copy.transposed:
            made = written.after(made, operand)(ops.transposed, made)
        cast.replace_all_uses_with(made)
        written.erase(cast)


def _gathered(graph: Graph, operand: Operand, gather: AllGather, scale: Node) -> Node:
    """Cast this rank's part, gather the bytes, and treat them as the tensor was: its FP8 values and shape."""
    node, form = gather.node, operand.format
    emit = Emitter(graph, node, node)
    part = cast_local(emit, operand, gather, scale)
    made: dict[Node, Node] = {node: emit(node.target, part, *node.args[1:])}
    for step in gather.steps:
        emit = Emitter(graph, step, step)
        if call_function(step, (aten.cat.default,)):
            made[step] = _cat(emit, step, made, form.dtype)
        else:
            made[step] = emit(step.target, made[arg(step, 0)], *step.args[1:], **step.kwargs)
            if step is gather.steps[-1] and value(made[step]).dtype != form.dtype:
                made[step] = emit(aten.view.dtype, made[step], form.dtype)
    _move_sizes(graph, made)
    last = gather.steps[-1]
    if value(made[last]).is_contiguous():
        return made[last]
    return Emitter(graph, last, last)(aten.clone.default, made[last], memory_format=torch.contiguous_format)


def _move_sizes(graph: Graph, made: dict[Node, Node]) -> None:
    """Let what reads the sizes of a gathered tensor, or of views of it, read those of the FP8 tensor."""
    stack = list(made)
    while stack:
        old = stack.pop()
        for user in list(old.users):
            if call_function(user, SIZES):
                user.replace_input_with(old, made[old])
            elif call_function(user, LAYOUT) and user not in made:
                if all(isinstance(x, int) for x in value(user).shape):
                    continue
                same = call_function(user, (*CASTS, *SAME, aten.clone.default))
                emit = Emitter(graph, user, user)
                made[user] = made[old] if same else emit(user.target, made[old], *user.args[1:])
                stack.append(user)


def _cat(emit: Emitter, step: Node, made: Mapping[Node, Node], dtype: torch.dtype) -> Node:
    """Put parts together as bytes, then take them as FP8, as torch's fusion of gather and matmul expects."""
    old: list[Node] = arg(step, 0)
    parts = [made[part] for part in old]
    if value(parts[0]).dtype != torch.uint8:
        parts = [emit(aten.view.dtype, part, torch.uint8) for part in parts]
    return emit(aten.view.dtype, emit(aten.cat.default, parts, *step.args[1:]), dtype)
