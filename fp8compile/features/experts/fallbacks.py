"""fallbacks: the experts of transformers in float32 or float16 as grouped matmuls, which become FP8.

Inductor's grouped matmul takes bf16 only, so transformers calls operators of its own for other weights. They
loop over the experts, wait for the device at each call, and hide their matmuls:

    y = grouped_mm_fallback(x, w, offs)                    y = _grouped_mm(x, w, offs)
    g = grouped_mm_fallback_backward(x, w, offs, dy)   ->  dx = _grouped_mm(dy, permute(w), offs)
    dx = g[0]; dw = g[1]                                   dw = _grouped_mm(permute(x), dy, offs)

`spell` writes them so, for `collect` and the passes after it. `unspell` turns the matmuls that stay in high
precision into calls of transformers' operators again, one for each.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ...ir.fx_utils import Emitter, arg, aten, value
from ...ir.metadata import FALLBACK
from ...passes.joint import Joint

FORWARD = "transformers.grouped_mm_fallback.default"
BACKWARD = "transformers.grouped_mm_fallback_backward.default"


def spell(joint: Joint) -> int:
    """Returns how many grouped matmuls were written."""
    graph = joint.graph
    written = 0
    for node in list(graph.nodes):
        if str(node.target) == FORWARD:
            x, w, offs = node.args
            _replace(node, Emitter(graph, node, node), x, w, offs)
            written += 1
        elif str(node.target) == BACKWARD and all(user.target is operator.getitem for user in node.users):
            x, w, offs, dy = node.args
            for item in list(node.users):
                emit = Emitter(graph, item, node)
                if arg(item, 1) == 0:
                    _replace(item, emit, dy, emit(aten.permute.default, w, [0, 2, 1]), offs)
                else:
                    _replace(item, emit, emit(aten.permute.default, x, [1, 0]), dy, offs)
                written += 1
            graph.erase_node(node)
    return written


def unspell(joint: Joint) -> int:
    """Returns how many matmuls stay in high precision."""
    graph, ops = joint.graph, torch.ops.transformers
    grouped = graph.find_nodes(op="call_function", target=aten._grouped_mm.default)
    found = [node for node in grouped if FALLBACK in node.meta]
    for node in found:
        a, b, offs = (arg(node, i) for i in range(3))
        emit = Emitter(graph, node, node)
        if value(node).dim() == 2:
            made = emit(ops.grouped_mm_fallback.default, a, b, offs)
        else:  # a wgrad. The operator wants the weight, too, for a result that nobody reads
            x = emit(aten.permute.default, a, [1, 0])
            like = value(node)
            kind = {"dtype": like.dtype, "device": like.device, "pin_memory": False}
            weight = emit(aten.empty.memory_format, list(like.shape), **kind)
            both = emit(ops.grouped_mm_fallback_backward.default, x, weight, offs, b)
            made = emit(operator.getitem, both, 1)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    return len(found)


def _replace(node: Node, emit: Emitter, a: Any, b: Any, offs: Any) -> None:
    """Put a grouped matmul in place of `node`. Not by the emitter: torch's fake one takes bf16 only."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(aten._grouped_mm.default, (a, b, offs))
    made.meta.update({k: v for k, v in node.meta.items() if k in Emitter.KEEP} | emit.meta)
    made.meta.update({"val": value(node), FALLBACK: True})
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
