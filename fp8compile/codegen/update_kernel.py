"""The next page of scaling state as one kernel in place of the handful that Inductor makes of `state_page.next_page`.

One program: is every amax finite? Then, block of slots by block of slots, what `next_page` says, written over the page.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .. import compat
from ..ir import state_page
from ..ir.fx_utils import Emitter, arg, aten, value
from ..ir.scale import LARGEST, SMALLEST
from .launch import AMAX_STRIDE, function

BLOCK, NUMBERS = 64, 4096  # slots at a time, and numbers of their histories
LONGEST = 4096  # history

_SOURCE = """import triton
import triton.language as tl


@triton.jit
def {name}(page, scales, amaxes, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    # page: float32 [{slots}, {width}], {before} columns of the scale now, as many of the one before, reach, window,
    # interval, limit, {history} of history
    # scales: float32 [{slots}, {snapshot}], the scales now; amaxes: {count} of this call
    finite = tl.full([BLOCK_R], 1, tl.int32)
    for start in range(0, {count}, BLOCK_R):
        slot = start + tl.arange(0, BLOCK_R)
        amax = tl.load(amaxes + slot * {stride}, mask=slot < {count}, other=0){cast}
        finite = tl.minimum(finite, (tl.abs(amax) < float("inf")).to(tl.int32))
    if tl.min(finite) == 1:
        for start in range(0, {slots}, BLOCK_R):
            slot = start + tl.arange(0, BLOCK_R)
            inside = slot < {slots}
            row = page + slot * {width}
            amax = tl.load(amaxes + slot * {stride}, mask=slot < {count}, other=0){cast}
            scale = tl.load(scales + slot * {snapshot} + {scale}, mask=inside, other=1.0)
            inverse = tl.load(scales + slot * {snapshot} + {inverse}, mask=inside, other=1.0)
            age = tl.load(scales + slot * {snapshot} + {age}, mask=inside, other=0.0)
            column = tl.arange(0, BLOCK_C)
            recent_inside = inside[:, None] & (column[None, :] < {history} - 1)
            recent = tl.load(row[:, None] + {start} + column[None, :], mask=recent_inside, other=0.0)
            reach = tl.load(row + {reach}, mask=inside, other=1.0)
            interval = tl.load(row + {interval}, mask=inside, other=1.0)
            limit = tl.load(row + {limit}, mask=inside, other=float("inf"))
            tl.debug_barrier()  # read before it is shifted
{peak}
            cold = age < 0
            overflow = (age >= 0) & (amax * scale > limit)
            due = tl.where(cold, amax > 0, age + 1 >= interval)
            fresh = (due | overflow) & (peak > 0)
            wide = reach.to(tl.float64) / tl.where(fresh, peak, 1.0).to(tl.float64)
            wide = tl.where(wide > {largest}, {largest}, tl.where(wide < {smallest}, {smallest}, wide))
            new_scale = tl.where(fresh, wide.to(tl.float32), scale)
            new_inverse = tl.where(fresh, (1.0 / new_scale.to(tl.float64)).to(tl.float32), inverse)
            new_age = tl.where(due, 0.0, tl.where(cold, age, age + 1))
            new_age = tl.where(overflow, -1.0, new_age)
            tl.store(row + {scale}, new_scale, mask=inside)
            tl.store(row + {inverse}, new_inverse, mask=inside)
            tl.store(row + {age}, new_age, mask=inside)
            tl.store(row + {before} + {scale}, scale, mask=inside)
            tl.store(row + {before} + {inverse}, inverse, mask=inside)
            tl.store(row + {before} + {age}, age, mask=inside)
            tl.store(row + {start}, amax, mask=inside)
            tl.store(row[:, None] + {start} + 1 + column[None, :], recent, mask=recent_inside)
"""


_PEAK = """            window = tl.load(row + {window}, mask=inside, other=1.0)
            counts = column[None, :] + 1 < window[:, None]
            peak = tl.maximum(amax, tl.max(tl.where(counts, recent, 0.0), 1))"""


def source(slots: int, history: int, count: int, bits: bool) -> tuple[str, str]:
    """(name, source). `count`: amaxes of this call; `bits`: they come as int32, the bits of a
    float32, AMAX_STRIDE apart."""
    name = f"fp8_update_{slots}x{history}"
    text = _SOURCE.format(
        name=name,
        slots=slots,
        width=state_page.HISTORY + history,
        history=history,
        count=count,
        snapshot=state_page.SNAPSHOT,
        stride=AMAX_STRIDE if bits else 1,
        cast=".to(tl.float32, bitcast=True)" if bits else "",
        before=state_page.BEFORE,
        start=state_page.HISTORY,
        scale=state_page.SCALE,
        inverse=state_page.SCALE_INV,
        age=state_page.AGE,
        peak="            peak = amax" if history == 1 else _PEAK.format(window=state_page.WINDOW),
        reach=state_page.REACH,
        interval=state_page.INTERVAL,
        limit=state_page.LIMIT,
        largest=LARGEST,
        smallest=SMALLEST,
    )
    return name, text


def launch_update(node: Node, page: Node, scales: Node, amax: Node) -> None:
    """Put the kernel where an `update` is copied onto its page, and take that copy out."""
    (write,) = node.users
    slots, width = (int(x) for x in value(page).shape)
    bits = amax.target is aten.view.dtype and value(arg(amax, 0)).dtype == torch.int32
    history, count = width - state_page.HISTORY, int(value(amax).shape[0])
    name, text = source(slots, history, count, bits)
    columns = 1 << max(0, history - 2).bit_length()
    tensors: dict[str, Any] = {"page": page, "scales": scales, "amaxes": arg(amax, 0) if bits else amax}
    emit = Emitter(node.graph, write, node)
    block = max(1, min(BLOCK, NUMBERS // columns))
    compat.launch(emit, function(name, text, ((block, columns, 4),), ("page",)), [(1, 1, 1)], tensors)
    write.graph.erase_node(write)
