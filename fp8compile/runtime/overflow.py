"""How the host learns which tensors overflowed: without waiting for a GPU, in one look for all graphs.

The update of a page makes a slot cold when an amax saturated and was a jump, too (it exceeded the slot's
limit), or when it was so small that the scale flushed a good part of the tensor to zero (an underflow). Such
a slot has an age below zero and a newest amax above zero. A slot that never saw anything has a newest amax of
zero. Both are overflows below: what the stored scale was not fit for. An amax that is not finite moves
nothing; the update leaves a mark, which stays until the host has seen it.

A `Watch` knows which pages have moved since the host has last looked. On a CPU it looks before a call whose
own page has moved, at all pages that have moved by then: the first graph of a step looks for the others. On a
GPU that would wait for all queued work. There the rows are gathered when the last backward of a step has run,
and copied to pinned memory. The host looks at them before a later call, once they have arrived. Until then
calls are warm, with the scale that the update computed from the amax that overflowed.

What was found of a page waits there for the next call of its graph, and is forgotten when the page moves.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import compat, process
from ..ir.state_page import HISTORY, Rows, fp8_max_of
from ..logs import get_logger, say_once

if TYPE_CHECKING:
    from .state import Page

logger = get_logger(__name__)

QUIET = 10.0  # seconds between lines about overflows
SHOWN = 3  # tensors in a line
COLUMNS = HISTORY + 1  # of a page, that a look needs: up to the newest amax


class Overflow(NamedTuple):
    """Slot `row` of the forward's or the backward's page saw `amax` when its scale covered no more than
    `covered`, or far more. An `amax` of infinity: one that was not finite."""

    row: int
    amax: float
    covered: float
    backward: bool = False

    @property
    def apart(self) -> float:
        """How many times too large, or too small."""
        return max(self.covered / self.amax, self.amax / self.covered)


class Watch:
    """Watches the pages that calls move on one thread, device and stream. Keeps no page alive. Pages keep
    their addresses."""

    def __init__(self, device: torch.device):
        self.device, self.on_host = device, device.type != "cuda"
        self.thread, self.stream = threading.get_ident(), _stream(device)
        self.moved: dict[weakref.ref[Page], None] = {}  # since the last look, in the order of the calls
        self.running = 0  # forwards whose backward has not run
        self.sent: list[tuple[weakref.ref[Page], int]] = []  # whose rows are on their way, and how many
        self.gathered = self.arrived = torch.empty(0, COLUMNS)

    @property
    def here(self) -> bool:
        """Is it that of a call that runs now?"""
        return self.thread == threading.get_ident() and (self.on_host or self.stream == _stream(self.device))

    def begins(self, page: Page) -> None:
        """A training forward begins, which will move its page."""
        self.running += 1
        self._moves(page)

    def ended(self, page: Page) -> None:
        """After the last update of a training call; after a step's last call, start the copy to the host."""
        self.running = max(0, self.running - 1)
        self._moves(page)
        if not (self.on_host or self.running or torch.cuda.is_current_stream_capturing()):
            self._receive()
            if not self.sent:
                self._send(())

    def look(self, *called: Page) -> None:
        """Before a call with these pages: find what moved slots say, as far as that needs no waiting."""
        if self.on_host:
            if any([page.moved for page in called]):
                odd = [page for page in self._take(called) if page.odd()]
                places = [(page.reference, len(page.homes)) for page in odd]
                if odd:
                    with compat.autograd.unseen():
                        self._read(places, torch.cat([page.rows for page in odd]))
        elif not torch.cuda.is_current_stream_capturing():
            self._receive()
            if not self.sent and any([page.moved for page in called]):  # no call was known to be the last one
                self.running = 0
                self._send(called)

    def _moves(self, page: Page) -> None:
        self.moved[page.reference] = None
        page.moves()

    def _take(self, called: Iterable[Page]) -> list[Page]:
        """The pages that have moved. From now on they have not."""
        references, self.moved = self.moved, {}
        pages = []
        for page in (*[reference() for reference in references], *called):
            if page is not None and page.moved:
                page.moved = False
                if page.homes:
                    pages.append(page)
        return pages

    def _receive(self) -> None:
        """Read what has been sent, if it has arrived."""
        if self.sent and self.event.query():
            sent, self.sent = self.sent, []
            with compat.autograd.unseen():
                rows = self.arrived[: sum(count for _, count in sent)]
                if rows.amin().item() < 0:  # an age or a limit: nothing else is below zero
                    self._read(sent, rows)

    def _send(self, called: Iterable[Page]) -> None:
        """One operator for the rows of all pages, and one copy."""
        pages = self._take(called)
        sent = [(page.reference, len(page.homes)) for page in pages]
        count = sum(count for _, count in sent)
        if not count:
            return
        with compat.autograd.unseen():
            if len(self.arrived) < count:
                self.gathered = torch.empty(count, COLUMNS, device=self.device)
                self.arrived = torch.zeros(count, COLUMNS, pin_memory=True)
                self.event = torch.cuda.Event()
            torch.cat([page.rows for page in pages], out=self.gathered[:count])
            self.arrived[:count].copy_(self.gathered[:count], non_blocking=True)
            self.event.record(torch.cuda.current_stream(self.device))  # the current device may be another one
        self.sent = sent

    def _read(self, places: Sequence[tuple[weakref.ref[Page], int]], rows: Tensor) -> None:
        """Tell the pages what their rows say."""
        seen = Rows(rows)
        odd = torch.nonzero(seen.overflowed | seen.not_finite).flatten().tolist()
        if not odd:
            return
        slots = [(reference(), row) for reference, count in places for row in range(count)]
        columns = (seen.overflowed, seen.not_finite, seen.reach, seen.limit, seen.before.scale, seen.newest)
        marked: list[tuple[Page, int]] = []
        for at in odd:
            page, row = slots[at]
            if page is None:
                continue
            overflowed, not_finite, reach, limit, scale, amax = (column[at].item() for column in columns)
            if overflowed:
                page.found = [*page.found, Overflow(row, amax, fp8_max_of(reach, abs(limit)) / scale)]
            if not_finite:
                marked.append((page, row))
                page.not_finite = [*page.not_finite, row]
        if marked:  # the first one. Gradients follow from an activation that is not finite
            causes = [(page, row) for page, row in marked if page.homes[row][1][0] != "gradient"]
            page, row = (causes or marked)[0]
            page.found = [*page.found, Overflow(row, math.inf, 0.0)]
        for page in dict.fromkeys(page for page, _ in marked):
            Rows(page.rows).limit.abs_()


def _stream(device: torch.device) -> int:
    """On which work for a device is queued now; 0 where there are none."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class Watches(threading.local):
    """Those of this thread, by device and stream."""

    def __init__(self) -> None:
        self.by_place: dict[tuple[torch.device, int], Watch] = {}


def watch_of(device: torch.device) -> Watch:
    """The watch of the calls that run now. On one thread and stream, no page moves while it is read."""
    place = device, _stream(device)
    watches = process.of(Watches).by_place
    found = watches.get(place)
    if found is None:
        found = watches[place] = Watch(device)
    return found


class LastLine:
    """When the last log line was written, and how many overflows since then were in no line."""

    at = float("-inf")
    missed = 0


def say_not_finite(overflow: Overflow, name: Callable[[Overflow], str]) -> None:
    """Warn of the first tensor of a step that was not finite, once a process."""
    text = (
        f"fp8: an infinity or a NaN came to {name(overflow)}, before any cast: FP8 saturates. No scale "
        "remembers such a step"
    )
    say_once(logger, logging.WARNING, f"{text}. (This is said once.)", key="not finite")


def say(overflows: Sequence[Overflow], name: Callable[[Overflow], str]) -> None:
    """Log a line about overflows, at INFO. Within QUIET seconds of the last, count them for the next line."""
    if not overflows:
        return
    now, last = time.monotonic(), process.of(LastLine)
    if now - last.at < QUIET or not logger.isEnabledFor(logging.INFO):
        last.missed += len(overflows)
        return
    worst = sorted(overflows, key=lambda x: -x.apart)
    what = " and ".join(dict.fromkeys("overflow" if x.amax > x.covered else "underflow" for x in worst))
    shown = [f"{name(x)}: amax {x.amax:.4g}, its scale covered {x.covered:.4g}" for x in worst[:SHOWN]]
    more = f"; and {len(worst) - SHOWN} more" if len(worst) > SHOWN else ""
    missed = f" ({last.missed} overflows since the last such line)" if last.missed else ""
    text = f"{'; '.join(shown)}{more}{missed}"
    logger.info("fp8: %s, next scaled by the current amax: %s", what, text)
    last.at, last.missed = now, 0
