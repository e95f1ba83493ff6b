"""The two launches that serve a direction's scaling state: `triton_kernels.fp8_begin` and `fp8_update`.

    vector = zeros(n); scales = snapshot(page)  ->  fp8_begin(page, scales, vector), which fills both
    copy_(page, update(page, scales, amaxes))   ->  fp8_update(page, scales, amaxes)

`fp8_begin` takes the snapshot of the page and zeroes the amaxes of the graph, at the beginning of the graph.

`fp8_update` replaces the handful of kernels that Inductor makes of `state_page.next_page`. One program checks
whether every amax is finite. If so, it writes the values of `next_page` over the page, one block of slots
after the other.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from .. import compat
from ..ir.fx_utils import Emitter, aten, value
from ..ir.state_page import APART, BEFORE, Rows
from . import launch

BLOCK, NUMBERS = 64, 4096  # at most: slots at a time, and numbers of their histories
LONGEST = 4096  # the longest history that the kernel takes
NUMBERS_AT_BEGIN = 1024  # that a program copies or zeroes


def configuration(history: int) -> tuple[int, int, int]:
    """Slots at a time, numbers of a history (a power of two), warps."""
    columns = 1 << max(0, history - 2).bit_length()
    return max(1, min(BLOCK, NUMBERS // columns)), columns, 4


def launch_update(node: Node, page: Node, scales: Node, amax: Node) -> None:
    """Replace the `copy_` of an `update` onto its page by the kernel."""
    from .triton_kernels import fp8_update

    (write,) = node.users
    slots, history = int(value(page).shape[0]), int(Rows(value(page)).length)
    amaxes = launch.amax_bits(amax) or amax
    count, stride = int(value(amaxes).shape[0]), int(value(amaxes).stride(0))
    constants = {"SLOTS": slots, "LENGTH": history, "COUNT": count, "STRIDE": stride}
    tensors = {"page": page, "scales": scales, "amaxes": amaxes}
    kernel = launch.tuned(fp8_update, (configuration(history),), ("page",))
    compat.triton.launch(Emitter(node.graph, write, node), kernel, [(1, 1, 1)], tensors, constants)
    write.graph.erase_node(write)


def launch_begin(node: Node, page: Node) -> Node | None:
    """A snapshot of the page by the kernel that also zeroes the graph's vector of amaxes. None if the graph
    has none, or an earlier snapshot has taken it: then the snapshot is a kernel of its own."""
    from .triton_kernels import fp8_begin

    vector = launch.zeroed(node.graph)
    if vector is None:
        return None
    (slots, width), (count,) = (map(int, value(x).shape) for x in (page, vector))
    emit = Emitter(node.graph, vector, vector, nn_module_stack=None, fwd_nn_module_stack=None)  # of no module
    empty, place = aten.empty.memory_format, {"device": value(page).device, "pin_memory": False}
    scales = emit(empty, [slots, BEFORE, APART], dtype=torch.float32, **place)
    zeros = emit(empty, [count], dtype=torch.int32, **place)
    programs = -(-max(slots * BEFORE, count) // NUMBERS_AT_BEGIN)
    constants = {"SLOTS": slots, "WIDTH": width, "COUNT": count}
    kernel = launch.tuned(fp8_begin, ((NUMBERS_AT_BEGIN, 1, 4),))
    tensors = {"page": page, "scales": scales, "amaxes": zeros}
    compat.triton.launch(emit, kernel, [(programs, 1, 1)], tensors, constants)
    vector.replace_all_uses_with(zeros)
    node.graph.erase_node(vector)
    return scales
