"""update_state: move the scaling state once, at the end of each direction.

    vector = gather([amax_0, amax_1, ...]); [vector = all_reduce(vector, "max")]
    page' = update(page, scales, vector); copy_(page, page')

The `copy_` is the graph's only mutation. Its tag says which of the two graphs it belongs to. Only the snapshot reads the page,
and the update depends on the snapshot, so the partitioner and Inductor may order all other nodes as they like.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from .. import compat
from ..errors import OptionError
from ..ir import ops
from ..ir.fx_utils import Emitter, aten
from .plan import Plan
from .quantize import Written


def update_state(graph: Graph, plan: Plan, written: Written, pages: tuple[Node, Node]) -> int:
    """Write the next state of both directions; returns how many directions have one.

    The amaxes of a graph are reduced over the ranks of a group if the recipe of any of its operands says so.
    """
    moved, group = 0, group_of(plan)
    for backward in (False, True):
        operands = plan.direction(backward)
        if not operands:
            continue
        vectors = [written.amaxes[operand] for operand in operands]
        anchor = max(vectors, key=_position(graph)).next
        page, tag = pages[backward], "backward" if backward else "forward"
        emit = Emitter(graph, anchor, page, partitioner_tag=f"is_{tag}", recompute=None, ac_graph_id=None)
        vector = emit(ops.gather, vectors)
        if group is not None:
            started = emit(torch.ops._c10d_functional.all_reduce.default, vector, "max", group)
            vector = emit(torch.ops._c10d_functional.wait_tensor.default, started)
        following = emit(ops.update, page, written.snapshots[backward], vector)
        emit.meta["partitioner_tag"] = f"must_be_in_{tag}"
        emit(aten.copy_.default, page, following)
        moved += 1
    return moved


def group_of(plan: Plan) -> str | None:
    """The name of the process group over whose ranks the amaxes of a graph are reduced; None if they are not reduced.

    OptionError where that is impossible: for two groups in one graph, and for the group of all ranks in a pipeline, because
    each stage of a pipeline runs other graphs and waits for the stage before.
    """
    wanted = {operand.recipe.reduce_amax for operand in plan.operands.values() if operand.slot >= 0} - {False}
    groups = {name for given in wanted if (name := compat.group_name(given)) is not None}
    if len(groups) > 1:
        raise OptionError(f"fp8 option 'reduce_amax' must name one process group in a graph; here are {sorted(groups)}")
    if any(map(compat.is_default_group, groups)) and compat.in_pipeline():
        raise OptionError.of("reduce_amax", True, f"the process group of the ranks that share a pipeline stage{FIX}")
    return next(iter(groups), None)


FIX = ", e.g. options={'reduce_amax': mesh.get_group('dp')}"


def _position(graph: Graph):
    order = {node: i for i, node in enumerate(graph.nodes)}
    return order.__getitem__
