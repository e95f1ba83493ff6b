"""The launch of `triton_kernels.fp8_update`: one kernel in place of the handful that Inductor makes of `state_page.next_page`.

One program checks whether every amax is finite. If so, it writes the values of `next_page` over the page, one block of slots
after the other.
"""

from __future__ import annotations

from torch.fx import Node

from .. import compat
from ..ir.fx_utils import Emitter, value
from ..ir.state_page import Rows
from . import launch

BLOCK, NUMBERS = 64, 4096  # at most: slots at a time, and numbers of their histories
LONGEST = 4096  # the longest history that the kernel takes


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
    compat.launch(Emitter(node.graph, write, node), kernel, [(1, 1, 1)], tensors, constants)
    write.graph.erase_node(write)
