"""How the host learns which tensors overflowed, without waiting for a GPU.

The update of a page makes a slot cold when an amax saturated and was a jump, too (it exceeded the slot's limit), or when it was
so small that the scale flushed a good part of the tensor to zero (an underflow). Such a slot has an age below zero and a newest
amax above zero. A slot that never saw anything has a newest amax of zero. So age * amax is negative only after an overflow or
an underflow. Both are overflows below: what the stored scale was not fit for. On a CPU the host reads the pages before each
call. On a GPU that would wait for all queued work. There the products age * amax are copied to pinned memory after a call's
backward. The host looks at them before a later call, once they have arrived. Until then calls are warm, with the scale that the
update computed from the amax that overflowed.

An amax that is not finite moves nothing; the update leaves a mark, which stays until the host has seen it: at once on a CPU,
within `RARELY` calls on a GPU.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..ir.state_page import Rows, fp8_max_of
from ..logs import get_logger, say_once

logger = get_logger(__name__)

QUIET = 10.0  # seconds between lines about overflows
SHOWN = 3  # tensors in a line
RARELY = 64  # calls


class Overflow(NamedTuple):
    """Slot `row` of the forward's or the backward's page saw `amax` when its scale covered no more than `covered`, or far
    more. An `amax` of infinity: one that was not finite."""

    backward: bool
    row: int
    amax: float
    covered: float

    @property
    def apart(self) -> float:
        """How many times too large, or too small."""
        return max(self.covered / self.amax, self.amax / self.covered)


class Watch:
    """Watches the first rows of two pages. The pages must keep their addresses."""

    def __init__(self, forward: Tensor, forward_slots: int, backward: Tensor, backward_slots: int):
        # .data: autograd may have saved the page for a backward; views of .data do not share its version counter
        self.rows = (Rows(forward.data[:forward_slots]), Rows(backward.data[:backward_slots]))
        self.parts = [(rows.age, rows.newest, rows.limit) for rows in self.rows if rows.tensor.shape[0]]
        self.on_host, self.calls = forward.device.type != "cuda", 0
        self.arriving: torch.cuda.Event | None = None
        self.waiting = False
        if not self.on_host:
            self.products = torch.empty(forward_slots + backward_slots, device=forward.device)
            self.pieces = self.products.split([age.shape[0] for age, *_ in self.parts])
            self.arrived = torch.zeros(forward_slots + backward_slots, pin_memory=True)
            self.event = torch.cuda.Event()

    def after_call(self) -> None:
        """After the last update of a training call, start the copy to the host."""
        if self.on_host or self.arriving is not None or torch.cuda.is_current_stream_capturing():
            return
        self.calls += 1
        for (age, amax, limit), piece in zip(self.parts, self.pieces, strict=True):
            torch.mul(age, amax, out=piece)
            if self.calls % RARELY == 0:
                torch.minimum(piece, limit, out=piece)
        self.arrived.copy_(self.products, non_blocking=True)
        self.event.record(torch.cuda.current_stream(self.products.device))  # the current device may be another one
        self.arriving = self.event

    def before_call(self) -> list[Overflow]:
        """The overflows that made slots cold, and what was not finite, as far as the host knows without waiting."""
        if self.on_host:
            seen = any(torch.minimum(torch.mul(age, amax), limit).amin().item() < 0 for age, amax, limit in self.parts)
        else:
            if self.arriving is None or torch.cuda.is_current_stream_capturing() or not self.arriving.query():
                return []
            self.arriving = None
            seen = bool((self.arrived < 0).any())
        return self._read() if seen else []

    def _read(self) -> list[Overflow]:
        found = []
        for backward, page in enumerate(self.rows):
            rows = Rows(page.tensor.cpu())
            columns = (rows.reach, rows.limit, rows.before.scale, rows.newest)
            for row in torch.nonzero(rows.overflowed).flatten().tolist():
                reach, limit, scale, amax = (column[row].item() for column in columns)
                found.append(Overflow(bool(backward), row, amax, fp8_max_of(reach, abs(limit)) / scale))
        return found + self._not_finite()

    def _not_finite(self) -> list[Overflow]:
        """What has a mark. Gradients alone wait for one more look: another graph may have an activation that came before."""
        marked = [torch.nonzero(page.not_finite).flatten().tolist() for page in self.rows]
        self.waiting = not marked[0] and bool(marked[1]) and not self.waiting
        if self.waiting:
            return []
        for page in self.rows:
            page.limit.abs_()
        return [Overflow(bool(backward), row, math.inf, 0.0) for backward, rows in enumerate(marked) for row in rows]


class _Said:
    """When the last log line was written, and how many overflows since then were in no line."""

    at = float("-inf")
    missed = 0


def say_not_finite(overflow: Overflow, name: Callable[[Overflow], str]) -> None:
    """Warn of the first tensor of a step that was not finite, once a process."""
    text = f"fp8: an infinity or a NaN came to {name(overflow)}, before any cast: FP8 saturates. No scale remembers such a step"
    say_once(logger, logging.WARNING, f"{text}. (This is said once.)", key="not finite")


def say(overflows: Sequence[Overflow], name: Callable[[Overflow], str]) -> None:
    """Log a line about some overflows, at INFO. Within QUIET seconds of the last line, only count them for the next line."""
    now = time.monotonic()
    if now - _Said.at < QUIET or not logger.isEnabledFor(logging.INFO):
        _Said.missed += len(overflows)
        return
    worst = sorted(overflows, key=lambda x: -x.apart)
    what = " and ".join(dict.fromkeys("overflow" if x.amax > x.covered else "underflow" for x in worst))
    text = "; ".join(f"{name(x)}: amax {x.amax:.4g}, its scale covered {x.covered:.4g}" for x in worst[:SHOWN])
    more = f"; and {len(worst) - SHOWN} more" if len(worst) > SHOWN else ""
    missed = f" ({_Said.missed} overflows since the last such line)" if _Said.missed else ""
    logger.info("fp8: %s, next scaled by the current amax: %s%s%s", what, text, more, missed)
    _Said.at, _Said.missed = now, 0
