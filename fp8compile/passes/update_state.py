"""update_state: move the scaling state once, at the end of each direction.

    [amax_i = all_reduce(amax_i, "max") of a tensor that is gathered in FP8, one for all of them]
    vector = gather([amax_0, amax_1, ...]); [vector = all_reduce(vector, "max") for each group]
    page' = update(page, scales, vector); copy_(page, page')

The `copy_` is the graph's only mutation. Its tag says which of the two graphs it belongs to. Only the
snapshot reads the page, and the update depends on the snapshot, so the partitioner and Inductor may order all
other nodes as they like.
"""

from __future__ import annotations

from ..ir import ops
from ..ir.fx_utils import Emitter, aten
from .amax_groups import reduced
from .joint import Joint


def update_state(joint: Joint) -> int:
    """Write the next state of both directions; returns how many directions have one.

    The amaxes of a graph are reduced over the ranks of a group if the recipe of any of its operands says so.
    """
    graph, plan, written, pages = joint.graph, joint.plan, joint.written, joint.state
    if pages is None or written is None:
        return 0
    moved, end = 0, graph.output_node()  # there, nothing waits for an all-reduce any more
    for backward in (False, True):
        operands = plan.direction(backward)
        if not operands:
            continue
        vectors = [written.amaxes[operand] for operand in operands]
        anchor = max(vectors).next
        page, tag = pages[backward], "backward" if backward else "forward"
        emit = Emitter(graph, anchor, page, partitioner_tag=f"is_{tag}", recompute=None, ac_graph_id=None)
        for group in dict.fromkeys(written.groups[x] for x in operands if x in written.groups):
            of = [i for i, x in enumerate(operands) if written.groups.get(x) == group]
            start = Emitter(graph, anchor, page, **emit.meta)
            whole = reduced(start, emit(ops.gather, [vectors[i] for i in of]), group, end)
            for position, i in enumerate(of):
                vectors[i] = start(aten.slice.Tensor, whole, 0, position, position + 1)
        if written.groups.keys() & set(operands):
            emit.anchor = end
        vector = emit(ops.gather, vectors)
        for group in joint.amax_groups.state:
            vector = reduced(emit, vector, group, end)
        following = emit(ops.update, page, written.snapshots[backward], vector)
        emit.meta["partitioner_tag"] = f"must_be_in_{tag}"
        emit(aten.copy_.default, page, following)
        moved += 1
    return moved
