"""The passes over the joint graph, in their order.

    collect   every matmul, its name, role and operands
    decide    FP8, or the reason why not: what is possible, what the policy says, what pays (`weigh`)
    plan      what is quantized, and in which slot its scale lives
    rewrite   quantize and FP8 matmuls in the graph
    update    the next scaling state

After the partitioner has split the graph, `lower` turns our operators into generated kernels (`fuse`, with `grouping` and
`place`) and ATen.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from .. import compat
from ..config.policy import Policy
from ..devices.catalog import Device
from ..errors import CapacityExceeded
from ..ir.inputs import Inputs
from ..ir.matmul import Matmul
from ..ir.records import OpaqueRecord
from ..ir.state_page import SlotKey
from .base import run_pass
from .collect import collect, edges
from .decide import decide
from .plan import Plan, plan
from .quantize import observe, rewrite
from .update_state import group_of, update
from .whole_model import whole_kinds as whole_kinds


@dataclass(frozen=True)
class Rewritten:
    """What the passes did to one joint graph."""

    matmuls: tuple[Matmul, ...]
    opaque: tuple[OpaqueRecord, ...]
    inference: bool
    forward: tuple[SlotKey, ...] = ()  # slots, by row of their page
    backward: tuple[SlotKey, ...] = ()
    pages: tuple[str, ...] = ()  # names of the state inputs of forward and backward, where there is state
    complaints: tuple[str, ...] = ()  # what the policy's author should know
    edges: tuple[tuple[int, int], ...] = ()  # between matmuls, by position
    group: str | None = None  # the process group over which amaxes are reduced


def run(
    graph: Graph,
    inputs: Inputs,
    policy: Policy,
    device: Device | None,
    fnuz: bool,
    capacity: tuple[int, int] | None,
    high_precision: bool = False,
) -> Rewritten:
    """Rewrite a joint graph in place. `device` is what decides what pays (None: everything), `capacity` the rows of the two
    state inputs that follow the graph's own (None: no state). `high_precision`: only observe what would be quantized, so that
    histories are there when FP8 begins.

    Raises CapacityExceeded, before the graph is changed, if the slots do not fit.
    """
    placeholders = graph.find_nodes(op="placeholder")
    inference = not compat.tag_backward(graph)
    matmuls, opaque = run_pass("collect", graph, lambda: collect(graph, inputs))
    flow = edges(graph, matmuls)
    complaints = run_pass("decide", graph, lambda: decide(matmuls, inputs, policy, device, inference))
    made: Plan = run_pass("plan", graph, lambda: plan(matmuls, fnuz))
    pages = group = None
    keys: list[tuple[SlotKey, ...]] = [(), ()]
    slots = [made.direction(backward) for backward in (False, True)]
    if any(slots) and capacity is not None:
        keys = [tuple(operand.key for operand in operands) for operands in slots]
        if any(len(named) > rows for named, rows in zip(keys, capacity, strict=True)):
            raise CapacityExceeded({"forward": len(keys[0]), "backward": len(keys[1])})
        pages = _pages(placeholders, len(inputs.names))
    if pages is not None:
        state = pages
        write = (lambda: observe(graph, made, state)) if high_precision else (lambda: rewrite(graph, matmuls, made, state))
        written = run_pass("rewrite", graph, write)
        run_pass("update", graph, lambda: update(graph, made, written, state))
        group = group_of(made)
    elif not high_precision:
        run_pass("rewrite", graph, lambda: rewrite(graph, matmuls, made, None))
    graph.eliminate_dead_code()
    names = tuple(page.name for page in pages or ())
    return Rewritten(tuple(matmuls), tuple(opaque), inference, keys[0], keys[1], names, tuple(complaints), flow, group)


def _pages(placeholders: list[Node], first: int) -> tuple[Node, Node]:
    by_index = {compat.input_index(node): node for node in placeholders}
    return by_index[first], by_index[first + 1]
