"""The page of scaling state: its layout, and how it moves.

One direction (forward or backward) of one set of parameters keeps its delayed scaling state in one float32 tensor, a
*page* `[slots, 10 + history]`, one row a slot:

    column   0       1           2                                                          3 4 5            10 ...
             scale   scale_inv   calls since the scale was computed, -1 before the first    0 1 2 of the     amax history,
                                                                                            call before      newest first
             6                                      7                                   8
             reach: what an amax is scaled to,      window: of how many amaxes the      interval: calls from one
             fp8_max / 2**margin                    largest one counts                  scale to the next

             9
             limit: an amax that is scaled to more than this is an overflow, after which the slot is cold for a call:
             fp8_max, or JUMP times the reach where that is more

Columns 6 to 9 are the slot's own constants (`SlotSettings`), so that slots of different recipes share a page.

A call quantizes with a *snapshot* `[slots, 4]` of the first columns, taken before it moves them. The snapshot is then
kept next to what replaced it, for a forward that is recomputed.

The functions are written in plain torch with no data-dependent control flow, as those of `scale` are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..devices.formats import FORMATS
from .scale import inverse_of, scale_to

SCALE, SCALE_INV, AGE, BEFORE, REACH, WINDOW, INTERVAL, LIMIT, HISTORY = 0, 1, 2, 3, 6, 7, 8, 9, 10
SNAPSHOT = 4  # columns of a snapshot: a slot's scale is 16-byte aligned, which lets one kernel serve all slots
# An overflow to act on saturates, and is so many times the amax that the scale was made of. By less, amaxes of a quiet run
# exceed their history, too; those of gradients do so by two to three times, in some tensor every few dozen steps.
JUMP, JUMP_OF_GRADIENTS = 2.0, 8.0


def limit_of(fp8_max: float, margin: int, gradient: bool) -> float:
    """The limit of a slot: an overflow is an amax that the scale does not cover and that is a jump, too. With headroom for
    jumps, whatever saturates is one."""
    return max(fp8_max, (JUMP_OF_GRADIENTS if gradient else JUMP) * fp8_max / 2.0**margin)


class SlotSettings(NamedTuple):
    """How a slot moves: exact in float32. A `window` of 1 is the most recent amax."""

    reach: float
    window: int
    interval: int
    limit: float = float("inf")


def _column(number: int) -> property:
    return property(lambda rows: rows.tensor.select(rows.tensor.dim() - 1, number))


@dataclass(frozen=True)
class Rows:
    """Views of the columns of a page, of some rows or of one; a snapshot has the first three columns.

    select and narrow: an index would ask for the device, which may be a described one.
    """

    tensor: Tensor

    scale, scale_inv, age = _column(SCALE), _column(SCALE_INV), _column(AGE)
    reach, window, interval, limit = _column(REACH), _column(WINDOW), _column(INTERVAL), _column(LIMIT)
    newest = _column(HISTORY)  # the amax of the last call
    length = property(lambda rows: rows.tensor.shape[-1] - HISTORY)  # amaxes that are kept
    history = property(lambda rows: rows.tensor.narrow(-1, HISTORY, rows.length))
    before = property(lambda rows: Rows(rows.tensor.narrow(-1, BEFORE, REACH - BEFORE)))  # the columns of the call before
    cold = property(lambda rows: rows.age < 0)  # no scale yet, or an overflow in the last call
    overflowed = property(lambda rows: rows.cold & (rows.newest > 0))  # the latter

    def settings(self) -> SlotSettings:
        """Those of a single row. Reads the device."""
        reach, window, interval, limit = self.tensor[REACH:HISTORY].tolist()
        return SlotSettings(reach, int(window), int(interval), limit)


@dataclass(frozen=True)
class SlotKey:
    """A slot as a graph knows it: the input (by position) whose matmul it serves, its role and which use of it."""

    input: int
    role: str  # "input" | "weight" | "gradient"
    use: int
    settings: SlotSettings = field(compare=False)  # how it moves; no part of its identity


def fp8_max_of(reach: float, limit: float) -> float:
    """The FP8 maximum of a slot that has a limit: the largest one below it of which the reach is 2**-margin."""
    return max(form.max for form in FORMATS.values() if form.max <= limit and math.frexp(form.max)[0] == math.frexp(reach)[0])


def new_page(slots: int, history: int, device: torch.device, settings: Sequence[SlotSettings] = ()) -> Tensor:
    """A page of cold slots: scale 1, nothing seen. `settings` are those of the first rows; the others are unused."""
    page = torch.zeros(slots, HISTORY + history, dtype=torch.float32, device=device)
    page[:, SCALE] = page[:, SCALE_INV] = 1.0
    page[:, AGE] = -1.0
    page[:, BEFORE:REACH] = page[:, :BEFORE]
    page[:, REACH:HISTORY] = 1.0
    page[:, LIMIT] = float("inf")
    if settings:
        page[: len(settings), REACH:HISTORY] = torch.tensor(settings, dtype=torch.float32, device=device)
    return page


def copy_row(page: Tensor, row: int, other: Tensor, before: int, factor: float) -> None:
    """Copy the state in row `before` of another page, whose reach times `factor` is this row's; settings stay as they are."""
    target = page.data[row]  # no version counter: the page may be saved for a backward that is still to come
    values = other.data[before].to(target.device)
    end = min(values.numel(), target.numel())  # another history length keeps what fits
    target[:REACH] = values[:REACH]
    target[HISTORY:end] = values[HISTORY:end]
    target[end:] = 0.0  # what this page had there is older than what the other one has forgotten
    now = Rows(target)
    if factor != 1.0 and (not now.cold or now.overflowed):  # compiled anew with another format or margin
        for call in (now, now.before):
            call.scale.mul_(factor)
            call.scale_inv.div_(factor)


def page_before(page: Tensor) -> Tensor:
    """A page from which a call quantizes as the last one did."""
    page = page.clone()
    page[:, :BEFORE] = page[:, BEFORE:REACH]
    return page


def snapshot_of(page: Tensor) -> Tensor:
    """`[slots, 4]`: scale, inverse and age of each slot (and a column of no use), in memory of their own."""
    return page.narrow(1, 0, SNAPSHOT).clone(memory_format=torch.contiguous_format)


def next_page(page: Tensor, snapshot: Tensor, amax: Tensor) -> Tensor:
    """The page after a training call that saw `amax` (float32 `[n]`, n <= slots: the first n rows move).

    The same rule as one Triton kernel is `codegen.triton_kernels.fp8_update`: change both.
    `test_the_update_kernel_is_next_page` in tests/passes/test_fusion.py compares them to the bit.

    The old scales come from the snapshot: so it is taken before the page is written, however a compiler orders the graph.

    The history shifts by one. A slot's scale is recomputed at its first non-zero amax and at every interval-th call
    from there, unless the amax to compute it from is 0. An amax that the old scale brings beyond the slot's limit is due
    at once, and makes the slot cold: the next call uses its current amax, if it can (`runtime.calls`), else the new scale. If
    any amax is not finite, nothing moves: one bad batch leaves no trace (TransformerEngine keeps the infinity in the window
    for its whole length).
    """
    # Unused slots see zeros: one shape for all rows, and a single concatenation, let Inductor make one kernel of it.
    amax = torch.nn.functional.pad(amax, (0, page.shape[0] - amax.shape[0]))
    old, rows = Rows(snapshot), Rows(page)
    old_scale, old_inverse, age = old.scale, old.scale_inv, old.age
    recent = page.narrow(1, HISTORY, rows.length - 1)
    reach, window, interval, limit = rows.reach, rows.window, rows.interval, rows.limit
    peak = amax
    if recent.shape[1]:
        counts = torch.arange(1, recent.shape[1] + 1, device=page.device) < window.unsqueeze(1)
        peak = torch.maximum(amax, torch.where(counts, recent, 0.0).amax(1))
    cold = age < 0
    overflow = ~cold & (amax * old_scale > limit)
    due = torch.where(cold, amax > 0, age + 1 >= interval)
    fresh = (due | overflow) & (peak > 0)
    scale = torch.where(fresh, scale_to(peak, reach.to(torch.float64)), old_scale)
    inverse = torch.where(fresh, inverse_of(scale), old_inverse)
    age = torch.where(due, torch.zeros_like(age), torch.where(cold, age, age + 1))
    age = torch.where(overflow, torch.full_like(age, -1.0), age)
    columns = [x.unsqueeze(1) for x in (scale, inverse, age)]
    constants = page.narrow(1, REACH, HISTORY - REACH)
    moved = torch.cat([*columns, snapshot.narrow(1, 0, BEFORE), constants, amax.unsqueeze(1), recent], 1)
    return torch.where(amax.isfinite().all(), moved, page)
