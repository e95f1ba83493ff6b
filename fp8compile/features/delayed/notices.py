"""Overflows, underflows and tensors that are not finite: said in the log, at the log's pace.

The device answers them alone (`state_page.next_page`), and counts them. The host reads the counts when a line
is due, and at no other time: on a GPU it waits for queued work then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

from ... import compat, process
from ...logs import get_logger, say_once
from ...runtime.parameters import ParameterRecord, all_records
from .state_page import HISTORY, OVERFLOWS
from .weight_state import WeightState

logger = get_logger(__name__)

PACE = 10.0  # seconds between two looks
SHOWN = 3  # tensors in a line


class Pace:
    """When the next look is due."""

    due = float("-inf")


class Met(NamedTuple):
    """How often a tensor overflowed, underflowed or was not finite since the look before."""

    name: str
    role: str
    overflows: float
    underflows: float
    not_finite: float

    @property
    def tensor(self) -> str:
        return f"{self.name} ({self.role})"


def look() -> None:
    """At the beginning of a training call. Says what has happened, if a look is due."""
    pace = process.of(Pace)
    if time.monotonic() < pace.due or compat.autograd.capturing():
        return
    pace.due = time.monotonic() + PACE
    with compat.autograd.unseen():
        met = list(_met())
    _say_not_finite([x for x in met if x.not_finite])
    _say([x for x in met if x.overflows or x.underflows])


def _met() -> Iterator[Met]:
    """What each slot has met since the look before."""
    counts: dict[int, list[list[float]]] = {}
    for record in _records():
        state = record.extras.get(WeightState) or WeightState()
        for (role, use), slot in sorted(state.slots.items()):
            page = slot.page
            if id(page) not in counts:
                columns = page.tensor[: len(page.homes)].narrow(1, OVERFLOWS, HISTORY - OVERFLOWS)
                counts[id(page)] = columns.tolist()
            now = counts[id(page)][slot.row]
            before = state.said.get((role, use), (0.0, 0.0, 0.0))
            state.said[role, use] = (now[0], now[1], now[2])
            new = [max(0.0, x - y) for x, y in zip(now, before, strict=True)]
            cast = page.casting is None or slot.row in page.casting  # else no scale had to fit
            if any(new) and cast:
                yield Met(record.name or page.name or "a tensor", role, *new)


def _records() -> list[ParameterRecord]:
    """Those of all parameters, each once."""
    return list({id(record): record for _, record in all_records()}.values())


def _say_not_finite(met: list[Met]) -> None:
    """Warn of the first tensor that was not finite, once a process. Gradients follow from activations."""
    if met:
        first = next((x for x in met if x.role != "gradient"), met[0])
        text = (
            f"fp8: an infinity or a NaN came to {first.tensor}, before any cast: FP8 saturates. No scale "
            "remembers such a step"
        )
        say_once(logger, logging.WARNING, f"{text}. (This is said once.)", key="not finite")


def _say(met: list[Met]) -> None:
    """One line, at INFO."""
    if not met or not logger.isEnabledFor(logging.INFO):
        return
    worst = sorted(met, key=lambda x: -(x.overflows + x.underflows))
    shown = "; ".join(f"{x.tensor}: {_times(x)}" for x in worst[:SHOWN])
    more = f"; and {len(worst) - SHOWN} more" if len(worst) > SHOWN else ""
    logger.info("fp8: scales did not fit, and follow from the next call on: %s%s", shown, more)


def _times(met: Met) -> str:
    kinds = (("overflow", met.overflows), ("underflow", met.underflows))
    return ", ".join(f"{count:.0f} {what}{'s' * (count > 1)}" for what, count in kinds if count)
