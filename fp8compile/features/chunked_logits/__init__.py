"""flatten: compute what follows an output head on its matrix of logits, where Inductor is asked to chunk it.

    logits = view(mm(x, w), [B, T, V]); y = tanh(to_float32(logits))
    loss = nll(log_softmax(view(y, [B * T, V])))

becomes

    loss = nll(log_softmax(tanh(to_float32(mm(x, w)))))

Inductor's auto chunker (`auto_chunker.enable`) computes the loss and the head's gradients by chunks of rows,
so that the logits never exist as a whole. It follows the rows of the largest matmul through the graph, and
gives up at a view that splits them. Models split them: they return logits as [B, T, V], and their losses
upcast or cap them before they flatten them again. Without views it finds the whole chain, and values stay.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ... import compat
from ...extension import Feature, Pass
from ...ir.fx_utils import (
    CASTS,
    SAME,
    VIEWS,
    Emitter,
    arg,
    aten,
    behind,
    call_function,
    is_tensor,
    pointwise,
    same_shape,
    value,
)
from ...passes.joint import Joint

HEADS = (aten.mm.default, aten.addmm.default)


def flatten(joint: Joint) -> int:
    """Let pointwise operators follow the largest matmul's matrix directly; returns how many moved."""
    graph = joint.graph
    if joint.inference or not compat.inductor.chunks():
        return 0
    outputs = [node for target in HEADS for node in graph.find_nodes(op="call_function", target=target)]
    sizes = {node: value(node).numel() for node in outputs}
    if not all(isinstance(size, int) for size in sizes.values()) or not sizes:
        return 0
    shape = value(max(sizes, key=sizes.__getitem__)).shape
    for node in graph.find_nodes(op="call_function", target=aten.scalar_tensor.default):
        # as constant folding makes it; where nothing is folded (a described device), the chunker needs it
        like = {"dtype": value(node).dtype, "device": value(node).device}
        node.replace_all_uses_with(Emitter(graph, node, node)(aten.full.default, [], arg(node, 0), **like))
    moved = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_tensor(node):
            continue
        if call_function(node, VIEWS) and same_shape(value(node).shape, shape):
            source = _matrix(arg(node, 0), shape)
            if source is not None:
                node.replace_all_uses_with(source)
        elif (pointwise(node) or call_function(node, CASTS)) and value(node).dim() > 2:
            moved += _moved(graph, node, shape)
    graph.eliminate_dead_code()
    return moved


def _matrix(x: Node, shape: torch.Size) -> Node | None:
    """The matrix of this shape that x is a view of, with its rows split."""
    x = behind(x, SAME)
    if not call_function(x, VIEWS):
        return None
    source = behind(arg(x, 0), SAME)
    whole = same_shape(value(source).shape, shape) and same_shape(value(x).shape[-1:], shape[-1:])
    return source if whole else None


def _moved(graph: Graph, node: Node, shape: torch.Size) -> bool:
    """Write a pointwise operator on matrices, then a view, if its operands are views of such, or numbers.
    Views of the result's sizes: others are broadcast (to pairs of rows), and are not the matrix."""
    tensors = [x for x in node.all_input_nodes if is_tensor(x)]
    numbers = {x for x in tensors if value(x).dim() == 0}
    whole = {x for x in tensors if same_shape(value(x).shape, value(node).shape)}
    operands = {x: _matrix(x, shape) if x in whole else None for x in node.all_input_nodes}
    if set(operands) == numbers or any(matrix is None and x not in numbers for x, matrix in operands.items()):
        return False
    emit = Emitter(graph, node, node)
    given = torch.fx.map_arg((node.args, node.kwargs), lambda x: x if x in numbers else operands[x])
    made = emit(node.target, *given[0], **given[1])
    node.replace_all_uses_with(emit(aten.view.default, made, list(value(node).shape)))
    return True


class ChunkedLogits(Feature):
    name = "chunked_logits"
    passes = {"unite": (Pass("flatten", flatten, optional=True),)}
