"""async_tp: async tensor parallelism, where Inductor fuses an all-gather with the matmuls after it, and a
matmul with the reduce-scatter after it (`torch._inductor.config._micro_pipeline_tp`).

    y = view(scaled_mm(a8 [M, K], b8, ..), [B, T, N]); reduce_scatter(y)
->
    y = view(_scaled_mm(view(view(a8, [B, T, K]), [M, K]), permute(b8), ..), [B, T, N]); reduce_scatter(y)

Inductor does that before our passes over a partitioned graph, for `aten._scaled_mm` only, and looks for the
matmul of a reduce-scatter between two views. `expose` writes both first. `complete` comes later: it computes
the values of nodes that Inductor has written without them.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ...extension import Feature, Pass
from ...ir.fx_utils import VIEWS, Emitter, arg, aten, call_function, evaluated, value
from ...passes.lower import lower_matmuls


def expose(graph: Graph) -> int:
    """Let Inductor find the FP8 matmuls; returns how many."""
    lower_matmuls(graph)
    found = graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    for node in found:
        a = arg(node, 0)
        if not call_function(a, VIEWS):
            _between_views(node, a)
    return len(found)


def _between_views(node: Node, a: Node) -> None:
    for user in node.users:
        shape = value(user).shape if call_function(user, VIEWS) else ()
        is_whole = len(shape) > 2 and shape[-1] == value(node).shape[-1]
        if is_whole and all(isinstance(size, int) for size in shape):
            emit = Emitter(node.graph, node, node)
            whole = emit(aten.reshape.default, a, [*shape[:-1], value(a).shape[-1]])
            node.args = (emit(aten.reshape.default, whole, list(value(a).shape)), *node.args[1:])
            return


def complete(graph: Graph) -> int:
    """Compute the values of nodes that have none; returns how many had none."""
    found = 0
    for node in graph.nodes:
        known = all("val" in x.meta for x in node.all_input_nodes)  # not those of a nested graph
        if node.op == "call_function" and "val" not in node.meta and known:
            node.meta["val"] = evaluated(node)
            found += 1
    return found


class AsyncTensorParallel(Feature):
    name = "async_tp"
    passes = {
        "early_post_grad": (Pass("expose", expose),),  # FP8 matmuls, where Inductor fuses them; nowhere else
        "post_grad": (Pass("complete", complete),),  # what Inductor has fused so
    }
