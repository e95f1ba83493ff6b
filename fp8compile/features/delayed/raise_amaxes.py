"""raise_amaxes: what a call has seen joins the scaling state, at the end of each direction.

    [amax_i = all_reduce(amax_i, "max") of a tensor that is gathered in FP8, one for all of them]
    copy_(amaxes, raised(amaxes, [amax_0, amax_1, ...], [0, 1, ...]))

The `copy_` is the graph's only mutation. Its tag says which of the two graphs it belongs to. Nothing in a
graph reads what it raises, so the partitioner and Inductor may order all nodes as they like, and a
recomputation raises nothing further. A backward without operands has the `copy_`, too: by this input, the
runtime knows which backward it is.
"""

from __future__ import annotations

from ...ir import ops
from ...ir.fx_utils import Emitter, aten
from ...passes.amax_groups import reduced
from ...passes.joint import Joint
from .store import StateInputs


def raise_amaxes(joint: Joint) -> int:
    """Raise the amaxes of both directions; returns how many there are."""
    graph, written, inputs = joint.graph, joint.form, joint.extras.get(StateInputs)
    if inputs is None or not inputs.rows:
        return 0
    amaxes, end = inputs.nodes[1], graph.output_node()  # there, nothing waits for an all-reduce any more
    for backward in (False, True)[: 1 if joint.inference else 2]:
        operands = inputs.of(backward)
        found = [written.amaxes[operand] for operand in operands]
        anchor, tag = max(found).next if found else end, "backward" if backward else "forward"
        emit = Emitter(graph, anchor, amaxes, partitioner_tag=f"is_{tag}", recompute=None, ac_graph_id=None)
        for group in dict.fromkeys(written.groups[x] for x in operands if x in written.groups):
            of = [i for i, x in enumerate(operands) if written.groups.get(x) == group]
            start = Emitter(graph, anchor, amaxes, **emit.meta)
            whole = reduced(start, emit(ops.gather, [found[i] for i in of]), group, end)
            for position, i in enumerate(of):
                found[i] = start(aten.slice.Tensor, whole, 0, position, position + 1)
        if written.groups.keys() & set(operands):
            emit.anchor = end
        following = emit(ops.raised, amaxes, found, [inputs.rows[operand] for operand in operands])
        emit.meta["partitioner_tag"] = f"must_be_in_{tag}"
        emit(aten.copy_.default, amaxes, following)
    return len(inputs.rows)
