"""try_matmuls: call each kind and size of FP8 matmul once, on this process's GPU, in its lowered form.

Libraries lack some (cuBLASLt on Hopper has no row-wise matmul with few tiles of output and a large K,
pytorch/ao#4582; sm_120 none at all, pytorch#192707), and which ones depends on their version. They refuse at
the call: without this pass, in the middle of a training. Here the next form takes its place, up to one that
is always legal, and a report says so.

An attempt takes empty operands, and some microseconds. None is made where the GPU is only described
(`estimate`). `FP8COMPILE_SKIP=try_matmuls` switches them off, for code that will run elsewhere.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg

from .. import compat, process
from ..codegen import scaled_grouped, scaled_mm
from ..codegen.scaled_mm_kind import AFTER, BLOCKWISE, EMULATED, GROUPED, MX, ROWWISE, TENSORWISE, TRITON
from ..ir import ops
from ..ir.fx_utils import hint, value
from ..ir.grouped import grouped_mm
from ..ir.metadata import FORM
from ..logs import get_logger, say_once

logger = get_logger(__name__)

# what takes the place of a form that is refused; the last one is not tried
NEXT = {
    ROWWISE: AFTER,
    AFTER: EMULATED,
    BLOCKWISE: TRITON,
    MX: EMULATED,
    TENSORWISE: EMULATED,
    GROUPED: TRITON,
}
HOW = {
    AFTER: "scales are multiplied after a matmul without them",
    TRITON: "a generated kernel multiplies",
    EMULATED: "the FP8 values are multiplied in bf16",
}


class Attempts:
    """What the libraries of this process's GPU have said."""

    def __init__(self) -> None:
        self.found: dict[Any, str] = {}  # why a matmul was refused; "" if it was not
        self.replaced: dict[str, str] = {}  # what a report says of this process -> what the library said


def try_matmuls(graph: Graph) -> int:
    """Note the form of each matmul whose first choice is refused; returns how many these are."""
    changed = 0
    for target in (ops.scaled_mm, ops.block_mm, grouped_mm):
        for node in graph.find_nodes(op="call_function", target=target):
            if not there(value(node).device):
                continue
            first = form = scaled_mm.form_of(node)
            why = ""
            while form in NEXT and (refused := refusal(node, form)):
                why, form = why or refused, NEXT[form]
                form = EMULATED if form == TRITON and compat.triton.reorders() else form
            if form != first:
                node.meta[FORM] = form
                changed += 1
                text = f"no {first} FP8 matmul of {_sizes(node)} on this GPU: {HOW[form]}"
                process.of(Attempts).replaced[text] = why
                say_once(logger, logging.WARNING, f"fp8: {text} ({why})")
    return changed


def _lowering(node: Node) -> Any:
    return scaled_grouped if node.target is grouped_mm else scaled_mm


def there(device: torch.device) -> bool:
    """True if this is a GPU of this process, rather than a described one."""
    return device.type == "cuda" and torch.cuda.is_initialized()


def refusal(node: Node, form: str) -> str:
    """What the library says to a matmul in this form, "" if it multiplies. It is asked once a process."""
    function, args = _lowering(node).call_of(node, form)
    key = (function, *map(str, torch.fx.node.map_aggregate(args, _described)))
    found = process.of(Attempts).found
    if key not in found:
        try:
            with compat.autograd.unseen():
                function(*map_arg(args, lambda x: _empty(value(x))))
            found[key] = ""
        except torch.OutOfMemoryError:  # says nothing about the matmul
            return ""
        except RuntimeError as error:
            found[key] = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return found[key]


def _described(x: Any) -> Any:
    if not isinstance(x, Node):
        return x
    tensor = value(x)
    return [*map(hint, tensor.shape)], [*map(hint, tensor.stride())], tensor.dtype, tensor.device


def _empty(x: Tensor) -> Tensor:
    sizes, strides = [*map(hint, x.shape)], [*map(hint, x.stride())]
    made = torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)
    return made if x.is_floating_point() else made.zero_()  # ends of groups: none has a row


def _sizes(node: Node) -> str:
    (m, k), n = (hint(size) for size in value(node.args[0]).shape), hint(value(node.args[1]).shape[-2])  # type: ignore[arg-type]
    return f"{m} x {n} x {k}"
