"""all_to_alls: with `fp8_all_to_all`, all-to-alls carry FP8. The rank casts what it sends, a byte a feature.

    came = wait(all_to_all(local)); y = mm(quantize(index(came, order), scale), ..)
->
    local8 = quantize(local, scale); came = wait(all_to_all(local8)) / scale
    y = mm(quantize(index(came, order), scale), ..)

Expert parallelism sends tokens to their experts so, and in backward the gradients of the experts' results.
The rows that come are read by steps that this pass leaves as they are: a permutation by expert, a row of
zeros before or after. So they become bf16 again, and the cast for the matmul gives back the bits that came:
an FP8 value over the scale, rounded to bf16, is off by 2^-8 at most, and neighbours in FP8 lie 2^-4 apart.
The kernel that casts does both, and reads one byte an element.

The scale is agreed on by the group (see `collectives`); without this pass it is that of the rows that came.
An all-to-all is moved if only FP8 matmuls read what it brings, and cast it alike, with one scale.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch.fx import Node

from ... import compat
from ...ir.fx_utils import CASTS, PERMUTES, SAME, VIEWS, Emitter, arg, aten, call_function, value
from ...ir.matmul import Matmul
from ...passes.joint import Joint
from ...passes.plan import Operand
from ...passes.written import Written
from .collectives import SIZES, AllToAll, cast_local, choose, move, reason_against

CAST = torch.ops.prims.convert_element_type.default
OFF = "fp8_all_to_all is off"
LOOKUPS = (aten.index.Tensor, aten.index_select.default)
MOVES = (*VIEWS, *SAME, *PERMUTES, *LOOKUPS, aten.clone.default, aten.slice.Tensor)


def all_to_alls(joint: Joint) -> int:
    """Choose the all-to-alls that can carry FP8."""
    return choose(joint, all_to_all_of, _reason)


def move_all_to_alls(joint: Joint) -> int:
    return move(joint, AllToAll, _carry)


def _reason(exchange: AllToAll, operands: Collection[Operand], matmuls: Mapping[Node, Matmul]) -> str:
    """Why an all-to-all stays in high precision; "" if it can carry FP8."""
    asked = all(operand.recipe.fp8_all_to_all for operand in operands)
    return reason_against(operands, exchange.wait, _moves, matmuls) or ("" if asked else OFF)


def _moves(node: Node) -> bool:
    return call_function(node, CASTS) or moved_from(node) is not None


def _carry(written: Written, operand: Operand, exchange: AllToAll, scale: Node, inverse: Node) -> None:
    """Cast what this rank sends, and send the bytes. The readers of what came get it in the dtype it had."""
    graph = written.graph
    emit = Emitter(graph, exchange.node, exchange.node)
    came = emit(exchange.node.target, cast_local(emit, operand, exchange, scale), *exchange.node.args[1:])
    for user in [user for user in exchange.node.users if call_function(user, SIZES)]:
        user.replace_input_with(exchange.node, came)
    emit = Emitter(graph, exchange.wait, exchange.wait)
    came = emit(exchange.wait.target, came)
    if value(came).dtype != operand.format.dtype:
        came = emit(aten.view.dtype, came, operand.format.dtype)
    wide = emit(aten.mul.Tensor, emit(CAST, came, torch.float32), inverse)
    dtype = value(exchange.wait).dtype
    exchange.wait.replace_all_uses_with(wide if dtype == torch.float32 else emit(CAST, wide, dtype))


def moved_from(node: Node) -> Node | None:
    """The tensor whose values a node moves, and maybe puts zeros between; None if it computes anything."""
    if call_function(node, MOVES):
        return arg(node, 0)
    if call_function(node, (aten.cat.default,)):
        parts = arg(node, 0)
    elif call_function(node, (aten.where.self,)):
        parts = node.args[1:]
    else:
        return None
    others = [part for part in parts if not _zeros(part)]
    return others[0] if len(others) == 1 else None


def _zeros(node: Node) -> bool:
    if call_function(node, (aten.scalar_tensor.default,)):
        return bool(arg(node, 0) == 0)
    if call_function(node, (aten.full.default, aten.full_like.default)):
        return bool(arg(node, 1) == 0)
    return call_function(node, (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default))


def all_to_all_of(node: Node) -> AllToAll | None:
    """The all-to-all whose values `node` holds; None for any other tensor."""
    while not call_function(node, compat.process_groups.WAIT):
        source = moved_from(node)
        if source is None:
            return None
        node = source
    sent = arg(node, 0)
    return AllToAll(sent, node) if call_function(sent, compat.process_groups.ALL_TO_ALL) else None
