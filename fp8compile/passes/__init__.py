"""The passes over the joint graph, in their order.

    collect   every matmul, its name, role and operands
    decide    FP8, or the reason why not
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
from ..capture import Inputs
from ..errors import CapacityExceeded
from ..formats import Format
from ..matmul import Matmul
from ..recipe import Recipe
from ..reports import OpaqueRecord
from ..state import SlotKey
from .base import run_pass
from .collect import collect
from .decide import decide
from .plan import Plan, plan
from .rewrite import rewrite
from .update import update


@dataclass(frozen=True)
class Rewritten:
    """What the passes did to one joint graph."""

    matmuls: tuple[Matmul, ...]
    opaque: tuple[OpaqueRecord, ...]
    inference: bool
    forward: tuple[SlotKey, ...] = ()  # slots, by row of their page
    backward: tuple[SlotKey, ...] = ()
    pages: tuple[str, ...] = ()  # names of the state inputs of forward and backward, where there is state


def run(
    graph: Graph, inputs: Inputs, recipe: Recipe, formats: tuple[Format, Format], capacity: tuple[int, int] | None
) -> Rewritten:
    """Rewrite a joint graph in place. `capacity`: rows of the two state inputs that follow the graph's own (None: no state).

    Raises CapacityExceeded, before the graph is changed, if the slots do not fit.
    """
    placeholders = graph.find_nodes(op="placeholder")
    inference = not compat.tag_backward(graph)
    matmuls, opaque = run_pass("collect", graph, lambda: collect(graph, inputs))
    run_pass("decide", graph, lambda: decide(matmuls, inputs, recipe, inference))
    made: Plan = run_pass("plan", graph, lambda: plan(matmuls, *formats))
    pages = None
    keys: list[tuple[SlotKey, ...]] = [(), ()]
    if recipe.delayed and made.operands and capacity is not None:
        keys = [tuple(x.key for x in made.direction(backward)) for backward in (False, True)]
        if any(len(slots) > rows for slots, rows in zip(keys, capacity, strict=True)):
            raise CapacityExceeded({"forward": len(keys[0]), "backward": len(keys[1])})
        pages = _pages(placeholders, len(inputs.names))
    written = run_pass("rewrite", graph, lambda: rewrite(graph, matmuls, made, recipe, pages))
    if pages is not None:
        state = pages
        run_pass("update", graph, lambda: update(graph, made, written, recipe, state))
    graph.eliminate_dead_code()
    names = tuple(page.name for page in pages or ())
    return Rewritten(tuple(matmuls), tuple(opaque), inference, keys[0], keys[1], names)


def _pages(placeholders: list[Node], first: int) -> tuple[Node, Node]:
    by_index = {compat.input_index(node): node for node in placeholders}
    return by_index[first], by_index[first + 1]
