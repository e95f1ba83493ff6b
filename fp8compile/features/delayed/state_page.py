"""The page of scaling state: its layout, and how it moves.

The delayed scaling state of a graph and a set of parameters is a *page*, float32 `[slots, 13 + history]`, one
row a slot:

    0      scale
    1      scale_inv
    2      moves since the scale was computed, -1 while the slot is cold: it has no scale yet
    3      reach: what an amax is scaled to, fp8_max / 2**margin
    4      window: of how many amaxes the largest one counts
    5      interval: moves from one scale to the next
    6      limit: an amax that is scaled to more than this is an overflow: fp8_max, or JUMP times the reach
           where that is more. Infinite where overflows and underflows change nothing
    7      floor: an amax above zero that is scaled to less than this is an underflow
    8      odd: 1 after an overflow or underflow, until the next amax above zero
    9      lost: 1 if the last amax was not finite
    10     overflows
    11     underflows
    12     amaxes that were not finite
    13 ..  amax history, newest first

Columns 3 to 7 are the slot's own constants (`SlotSettings`), so that slots of different recipes share a page.
Columns 10 to 12 count, for those who look (`notices`, `stats`).

Graphs read no page. They read `scales`, float32 `[slots, 3, 4]`: a copy of the first three columns, in which
each number has 16 bytes of its own. And they raise `amaxes`, int32 `[slots, 4]`: in the first column, the
bits of the largest amax since the last move, UNSEEN where there was none (`ops.raised`). Pages move between
calls (`arena`).

The functions are written in plain torch with no data-dependent control flow, like those of `ir.scale`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...ir.ops import APART, UNSEEN
from ...ir.scale import inverse_of, scale_to

SCALE, SCALE_INV, AGE, REACH, WINDOW, INTERVAL, LIMIT, FLOOR = range(8)
ODD, LOST, OVERFLOWS, UNDERFLOWS, NOT_FINITE, HISTORY = range(8, 14)
# Columns that graphs read, as numbers APART: cuBLASLt refuses a scale that is not 16-byte aligned (CUDA 13.0,
# H200)
READ = REACH
# An overflow saturates, and is this many times the amax that the scale was computed from. Smaller jumps are
# normal: in a quiet run, too, amaxes exceed their history, those of gradients by two to three times, in some
# tensor every few dozen steps.
JUMP, JUMP_OF_GRADIENTS = 2.0, 8.0


def limit_of(fp8_max: float, margin: int, gradient: bool) -> float:
    """The limit of a slot: an overflow is an amax that the scale does not cover and that is a jump, too. If
    the margin leaves more headroom than a jump needs, every amax that saturates is an overflow."""
    return max(fp8_max, (JUMP_OF_GRADIENTS if gradient else JUMP) * fp8_max / 2.0**margin)


# An underflow is this many times less than the amax that its scale was computed from, and is scaled to less
# than 4096 times the smallest number of the format. There, a tensor whose amax is 500 times its root mean
# square begins to lose precision.
DROP, LEAST = 64.0, 4096.0


def floor_of(fp8_max: float, smallest: float, margin: int) -> float:
    """The floor of a slot. `smallest`: the least number above zero of the format."""
    return min(LEAST * smallest, fp8_max / 2.0**margin / DROP)


class SlotSettings(NamedTuple):
    """How a slot moves. All values are exact in float32. A `window` of 1 takes the most recent amax."""

    reach: float
    window: int
    interval: int
    limit: float = float("inf")
    floor: float = 0.0


def _column(number: int) -> property:
    return property(lambda rows: rows.tensor.select(rows.tensor.dim() - 1, number))


@dataclass(frozen=True)
class Rows:
    """Views of a page's columns, for some of its rows or one; of `scales`, the first three (`numbers_of`).

    Made by select and narrow: an index accesses the device, which may be a described GPU that is not there.
    """

    tensor: Tensor

    scale, scale_inv, age = _column(SCALE), _column(SCALE_INV), _column(AGE)
    reach, window, interval = _column(REACH), _column(WINDOW), _column(INTERVAL)
    limit, floor, odd, lost = _column(LIMIT), _column(FLOOR), _column(ODD), _column(LOST)
    overflows, underflows, not_finite = _column(OVERFLOWS), _column(UNDERFLOWS), _column(NOT_FINITE)
    newest = _column(HISTORY)  # the last amax
    length = property(lambda rows: rows.tensor.shape[-1] - HISTORY)  # amaxes that are kept
    history = property(lambda rows: rows.tensor.narrow(-1, HISTORY, rows.length))
    cold = property(lambda rows: rows.age < 0)  # no scale yet

    def counts(self) -> tuple[float, ...]:
        """Overflows, underflows and amaxes that were not finite, of a single row. Reads the device."""
        return tuple(self.tensor[OVERFLOWS:HISTORY].tolist())

    def settings(self) -> SlotSettings:
        """The settings of a single row. Reads the device."""
        reach, window, interval, limit, floor = self.tensor[REACH:ODD].tolist()
        return SlotSettings(reach, int(window), int(interval), limit, floor)


@dataclass(frozen=True)
class SlotKey:
    """A slot as a graph knows it: the input (by position) whose matmul it serves, its role, and which use."""

    input: int
    role: str  # "input" | "weight" | "gradient"
    use: int
    settings: SlotSettings = field(compare=False)  # how it moves; no part of its identity


def rows_for(slots: int) -> int:
    """The rows of a page of so many slots: a multiple of 16, so that graphs of few more slots share code."""
    return 16 * -(-max(slots, 1) // 16)


def new_page(slots: int, history: int, device: torch.device, settings: Sequence[SlotSettings] = ()) -> Tensor:
    """A page of cold slots: scale 1, nothing seen. `settings`: of the first rows; the others are unused."""
    page = torch.zeros(slots, HISTORY + history, dtype=torch.float32, device=device)
    page[:, SCALE] = page[:, SCALE_INV] = 1.0
    page[:, AGE] = -1.0
    page[:, REACH:LIMIT] = 1.0
    page[:, LIMIT] = float("inf")
    if settings:
        page[: len(settings), REACH:ODD] = torch.tensor(settings, dtype=torch.float32, device=device)
    return page


def new_scales(slots: int, device: torch.device) -> Tensor:
    """Scales of cold slots."""
    return scales_of(new_page(slots, 1, device))


def new_amaxes(slots: int, device: torch.device) -> Tensor:
    """Amaxes of slots that have seen nothing since the last move."""
    return torch.full((slots, APART), UNSEEN, dtype=torch.int32, device=device)


def copy_row(target: Tensor, source: Tensor, factor: float) -> None:
    """Copy a row of one page to a row of another, but for its constants. `factor`: of its reach."""
    values = source.to(target.device)
    end = min(values.numel(), target.numel())  # another history length keeps what fits
    target[:REACH] = values[:REACH]
    target[ODD:end] = values[ODD:end]
    target[end:] = 0.0  # this page's values there are older than all that the other one keeps
    now = Rows(target)
    if factor != 1.0 and not now.cold:  # compiled anew with another format or margin
        now.scale.mul_(factor)
        now.scale_inv.div_(factor)


def restart(row: Tensor) -> None:
    """Make a slot cold, as if it had seen nothing, but for its counts. A call that is warm all the same goes
    on with its scale."""
    row[AGE], row[ODD], row[LOST], row[HISTORY:] = -1.0, 0.0, 0.0, 0.0


def of_version_1(row: Tensor) -> Tensor:
    """A row as fp8compile 0.3.0 saved it, `[10 + history]`. There, columns 3 to 5 were 0 to 2 of the call
    before, an age of -1 with an amax was what `odd` is, and the limit of a slot whose amax had not been
    finite was below zero."""
    reach, limit, amaxes = float(row[6]), abs(float(row[9])), row[10:]
    floor = min(2.0**-4 if limit >= 57344.0 else 8.0, reach / DROP) if limit < float("inf") else 0.0
    odd = bool(row[AGE] < 0 and amaxes[0] > 0)
    new = torch.cat([row[:3], row[6:9], torch.zeros(HISTORY - LIMIT), amaxes])
    new[LIMIT], new[FLOOR], new[ODD] = limit, floor, float(odd)
    new[AGE] = 0.0 if odd else row[AGE]
    return new


def scales_of(page: Tensor) -> Tensor:
    """`[slots, 3, 4]`: scale, inverse and age of each slot, each followed by zeros. A copy, no view."""
    return torch.nn.functional.pad(page.narrow(1, 0, READ).unsqueeze(2), (0, APART - 1))


def numbers_of(scales: Tensor) -> Tensor:
    """`[.., 3]`, a view: the numbers of scales `[.., 3, 4]`."""
    return scales.select(-1, 0)


def next_page(page: Tensor, amaxes: Tensor, parts: Tensor) -> Tensor:
    """The page after calls that raised `amaxes`. A row that no call has raised stays as it is.

    `parts`: int64 [slots], a number below `slots`. Rows with the same number, those of one direction of a
    graph, move together or not at all.

    The Triton kernel `triton_move.fp8_move` is the same rule: change both.
    `test_the_kernel_is_next_page` in tests/features/delayed/test_arena.py compares them bitwise.

    The history shifts by one. A slot's scale is recomputed at its first non-zero amax and at every
    interval-th move from there, unless the amax to compute it from is 0. If an amax times the old scale
    exceeds the slot's limit, the scale is recomputed at once, and once more in the next move. If it is below
    the slot's floor, the scale is recomputed in the next move. If the next one is below the floor, too, or
    the one after an overflow, the slot forgets what is older: that would flush the tensor for the length of
    the window (after a rollback, say, to weights from before a spike). One odd batch alone changes no scale
    that is not due. If any amax of a part is not finite, nothing of it moves but counts: one bad batch leaves
    no trace (TransformerEngine keeps the infinity in the window for its whole length)."""
    bits, rows = amaxes.select(1, 0), Rows(page)
    ran = bits > UNSEEN
    amax = torch.where(ran, bits, 0).view(torch.float32)
    scale, inverse, age = rows.scale, rows.scale_inv, rows.age
    recent = page.narrow(1, HISTORY, rows.length - 1)
    cold, odd = age < 0, rows.odd > 0
    waits = cold | odd  # for an amax above zero
    overflow = ~waits & (amax * scale > rows.limit)
    below = (amax > 0) & (amax * scale < rows.floor)
    underflow = ~waits & below
    recent = torch.where((odd & below & (rows.newest > 0)).unsqueeze(1), 0.0, recent)
    peak = amax
    if recent.shape[1]:
        counts = torch.arange(1, recent.shape[1] + 1, device=page.device) < rows.window.unsqueeze(1)
        peak = torch.maximum(amax, torch.where(counts, recent, 0.0).amax(1))
    due = torch.where(waits, amax > 0, age + 1 >= rows.interval)
    fresh = (due | overflow) & (peak > 0)
    scale = torch.where(fresh, scale_to(peak, rows.reach.to(torch.float64)), scale)
    inverse = torch.where(fresh, inverse_of(scale), inverse)
    age = torch.where(due, torch.zeros_like(age), torch.where(waits, age, age + 1))
    odd = (overflow | underflow | (odd & ~due)).to(page.dtype)
    overflows, underflows = rows.overflows + overflow, rows.underflows + underflow
    met = odd, torch.zeros_like(amax), overflows, underflows, rows.not_finite, amax
    scales, events = ([x.unsqueeze(1) for x in these] for these in ((scale, inverse, age), met))
    moved = torch.cat([*scales, page.narrow(1, REACH, ODD - REACH), *events, recent], 1)
    lost = (~amax.isfinite()).to(page.dtype)
    counts = page.narrow(1, OVERFLOWS, 2), page.narrow(1, NOT_FINITE, 1) + lost.unsqueeze(1)
    history = page.narrow(1, HISTORY, rows.length)
    kept = torch.cat([page.narrow(1, 0, LOST), lost.unsqueeze(1), *counts, history], 1)
    bad = torch.zeros_like(lost).index_add(0, parts, lost).index_select(0, parts) > 0
    return torch.where(ran.unsqueeze(1), torch.where(bad.unsqueeze(1), kept, moved), page)
