"""update: move the scaling state once, at the end of each direction.

    vector = gather([amax_0, amax_1, ...]); [vector = all_reduce(vector, "max")]
    page' = update(page, scales, vector); copy_(page, page')

The `copy_` is the graph's only mutation. Its tag says in which of the two graphs it belongs; nothing else reads the page
but the snapshot, on which the update depends: the partitioner and Inductor may order the rest as they like.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from .. import ops
from ..graph import Emitter, aten
from .plan import Plan
from .rewrite import Written


def update(graph: Graph, plan: Plan, written: Written, pages: tuple[Node, Node]) -> int:
    """Write the next state of both directions; returns how many directions have one.

    The amaxes of a graph are reduced over all ranks if the recipe of any of its operands says so.
    """
    moved = 0
    for backward in (False, True):
        operands = plan.direction(backward)
        if not operands:
            continue
        vectors = [written.amaxes[operand] for operand in operands]
        anchor = max(vectors, key=_position(graph)).next
        page, tag = pages[backward], "backward" if backward else "forward"
        emit = Emitter(graph, anchor, page, partitioner_tag=f"is_{tag}", recompute=None, ac_graph_id=None)
        vector = emit(ops.gather, vectors)
        wanted = any(operand.recipe.reduce_amax for operand in operands)
        if wanted and torch.distributed.is_available() and torch.distributed.is_initialized():
            group = torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]
            started = emit(torch.ops._c10d_functional.all_reduce.default, vector, "max", group)
            vector = emit(torch.ops._c10d_functional.wait_tensor.default, started)
        following = emit(ops.update, page, written.snapshots[backward], vector)
        emit.meta["partitioner_tag"] = f"must_be_in_{tag}"
        emit(aten.copy_.default, page, following)
        moved += 1
    return moved


def _position(graph: Graph):
    order = {node: i for i, node in enumerate(graph.nodes)}
    return order.__getitem__
