"""raised: amaxes that Inductor reduces join the graph's vector of amaxes.

    update(.., gather([vector[0:4], amax(q), vector[4:9]]))
->
    rows = row_amax(q); fp8_raise(rows, vector[4])
    update(.., vector[0:10])

Inductor puts the first stage, a number a row, into the kernel that makes the tensor. One launch takes the second stage of up to
four tensors. Otherwise there would be a reduction for each tensor, and a copy for each run of neighbours in the vector.
"""

from __future__ import annotations

from itertools import groupby

from torch.fx import Node

from ..codegen import lowerings as forms
from ..codegen.inline import Inliner
from ..codegen.launch import Launcher
from ..ir import ops
from ..ir.fx_utils import arg, is_data, value


def raisable(gather: Node) -> list[Node]:
    """The amaxes in a gather that Inductor reduces and that nothing else reads."""
    found = [x for x in dict.fromkeys(arg(gather, 0)) if x.op == "call_function" and x.target is ops.amax]
    found = [x for x in found if set(x.users) == {gather} and not any(x.args[1:])]
    return [x for x in found if value(arg(x, 0)).dim() == 2 and not is_data(value(arg(x, 0)).shape[0])]


def raise_amaxes(gather: Node, amaxes: list[Node], numbers: dict[Node, int], launcher: Launcher) -> None:
    """Launch the second stages before the gather, which reads their places in the vector already, and erase the amaxes."""
    inline = Inliner()
    rows = {x: inline(x, forms.row_amax, arg(x, 0)) for x in amaxes}
    for _, same in groupby(sorted(amaxes, key=lambda x: str(value(rows[x]).shape)), lambda x: str(value(rows[x]).shape)):
        every = list(same)
        for first in range(0, len(every), launcher.MOST_RAISED):
            some = every[first : first + launcher.MOST_RAISED]
            launcher.raise_amaxes(gather, {numbers[x]: rows[x] for x in some})
    for x in amaxes:
        gather.graph.erase_node(x)
