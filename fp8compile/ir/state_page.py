"""The page of scaling state: its layout, and how it moves.

One direction (forward or backward) of one set of parameters keeps its delayed scaling state in one float32
tensor, a *page* `[slots, 10 + history]`, one row a slot:

    0      scale
    1      scale_inv
    2      calls since the scale was computed, -1 before the first
    3 4 5  columns 0 1 2 of the call before
    6      reach: what an amax is scaled to, fp8_max / 2**margin
    7      window: of how many amaxes the largest one counts
    8      interval: calls from one scale to the next
    9      limit: an amax that is scaled to more than this is an overflow, after which the slot is cold for a
           call: fp8_max, or JUMP times the reach where that is more. One that is scaled to less than
           `floor_of` is an underflow, after which the slot is cold, too. Below zero from an amax that was
           not finite until the host has seen it
    10 ..  amax history, newest first

Columns 6 to 9 are the slot's own constants (`SlotSettings`), so that slots of different recipes share a page.

A call quantizes with a *snapshot* `[slots, 3, 4]` of the first three columns, taken before the call moves
them: each number has 16 bytes of its own. The update keeps the snapshot's values in columns 3 to 5, for a
forward that is recomputed.

The functions are written in plain torch with no data-dependent control flow, like those of `scale`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..devices.formats import E5M2, FORMATS
from .scale import inverse_of, scale_to

SCALE, SCALE_INV, AGE, BEFORE, REACH, WINDOW, INTERVAL, LIMIT, HISTORY = 0, 1, 2, 3, 6, 7, 8, 9, 10
# Floats that a number of a snapshot has for itself. With four, each is 16-byte aligned: cuBLASLt refuses the
# scale of a matmul that is not (CUDA 13.0, H200), and one kernel of ours serves all slots
APART = 4
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
DROP, E4M3_LEAST, E5M2_LEAST = 64.0, 8.0, 2.0**-4
E5M2_LIMIT = E5M2.max  # the least limit of E5M2; those of E4M3 are below


def floor_of(reach: Tensor, limit: Tensor) -> Tensor:
    """An amax above zero that is scaled to less than this is an underflow. 0: no limit, so not watched."""
    least = torch.where(limit < E5M2_LIMIT, E4M3_LEAST, E5M2_LEAST)
    return torch.where(limit < float("inf"), torch.minimum(least, reach / DROP), 0.0)


class SlotSettings(NamedTuple):
    """How a slot moves. All values are exact in float32. A `window` of 1 takes the most recent amax."""

    reach: float
    window: int
    interval: int
    limit: float = float("inf")


def _column(number: int) -> property:
    return property(lambda rows: rows.tensor.select(rows.tensor.dim() - 1, number))


@dataclass(frozen=True)
class Rows:
    """Views of a page's columns, for some of its rows or one; of a snapshot, the first three (`numbers_of`).

    Made by select and narrow: an index accesses the device, which may be a described GPU that is not there.
    """

    tensor: Tensor

    scale, scale_inv, age = _column(SCALE), _column(SCALE_INV), _column(AGE)
    reach, window, interval, limit = _column(REACH), _column(WINDOW), _column(INTERVAL), _column(LIMIT)
    newest = _column(HISTORY)  # the amax of the last call
    length = property(lambda rows: rows.tensor.shape[-1] - HISTORY)  # amaxes that are kept
    history = property(lambda rows: rows.tensor.narrow(-1, HISTORY, rows.length))
    before = property(lambda rows: Rows(rows.tensor.narrow(-1, BEFORE, REACH - BEFORE)))  # of the call before
    cold = property(lambda rows: rows.age < 0)  # no scale yet, or an overflow or underflow in the last call
    overflowed = property(lambda rows: rows.cold & (rows.newest > 0))  # or underflowed, in the last call
    not_finite = property(lambda rows: rows.limit < 0)  # an amax in some call since the host has last looked

    def settings(self) -> SlotSettings:
        """The settings of a single row. Reads the device."""
        reach, window, interval, limit = self.tensor[REACH:HISTORY].tolist()
        return SlotSettings(reach, int(window), int(interval), abs(limit))


@dataclass(frozen=True)
class SlotKey:
    """A slot as a graph knows it: the input (by position) whose matmul it serves, its role, and which use."""

    input: int
    role: str  # "input" | "weight" | "gradient"
    use: int
    settings: SlotSettings = field(compare=False)  # how it moves; no part of its identity


def fp8_max_of(reach: float, limit: float) -> float:
    """The FP8 maximum of a slot with a limit: the largest up to it that is the reach times a power of two."""
    mantissa = math.frexp(reach)[0]
    return max(x.max for x in FORMATS.values() if x.max <= limit and math.frexp(x.max)[0] == mantissa)


def rows_for(slots: int) -> int:
    """The rows of a page of so many slots: a multiple of 16, so that graphs of few more slots share code."""
    return 16 * -(-max(slots, 1) // 16)


def new_page(slots: int, history: int, device: torch.device, settings: Sequence[SlotSettings] = ()) -> Tensor:
    """A page of cold slots: scale 1, nothing seen. `settings`: of the first rows; the others are unused."""
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
    """Copy the state, no settings, in row `before` of `other` to `row`, with `factor` times the reach."""
    target = page.data[row]  # .data: no new version of a page that a later backward may have saved
    values = other.data[before].to(target.device)
    end = min(values.numel(), target.numel())  # another history length keeps what fits
    target[:REACH] = values[:REACH]
    target[HISTORY:end] = values[HISTORY:end]
    target[end:] = 0.0  # this page's values there are older than all that the other one keeps
    now = Rows(target)
    if factor != 1.0 and (not now.cold or now.overflowed):  # compiled anew with another format or margin
        for call in (now, now.before):
            call.scale.mul_(factor)
            call.scale_inv.div_(factor)


def merged(rows: Tensor) -> Tensor:
    """One row for several `[n, 10 + history]` of one tensor and settings, which saw different batches.

    Each amax is the largest of its call, and the scale is the smallest: it covers whatever one of the others
    covered. It is the scale that the merged history gives. If the last call overflowed in one of them, it
    did. Equal rows stay as they are.
    """
    every = Rows(rows)
    seen = rows[~every.cold | (every.history > 0).any(-1)]  # the others know nothing
    if not seen.shape[0]:
        return rows[0].clone()
    one = seen[Rows(seen).scale.argmin()].clone()
    ages = Rows(seen).age
    one[AGE] = ages.min() if ages.min() < 0 else ages.max()
    one[HISTORY:] = Rows(seen).history.amax(0)
    return one


def page_before(page: Tensor) -> Tensor:
    """A copy of the page with the scales that the last call used."""
    page = page.clone()
    page[:, :BEFORE] = page[:, BEFORE:REACH]
    return page


def snapshot_of(page: Tensor) -> Tensor:
    """`[slots, 3, 4]`: scale, inverse and age of each slot, each followed by zeros. A copy, no view."""
    return torch.nn.functional.pad(page.narrow(1, 0, BEFORE).unsqueeze(2), (0, APART - 1))


def numbers_of(snapshot: Tensor) -> Tensor:
    """`[.., 3]`, a view: the numbers of a snapshot `[.., 3, 4]`."""
    return snapshot.select(-1, 0)


def next_page(page: Tensor, snapshot: Tensor, amax: Tensor) -> Tensor:
    """The page after a training call that saw `amax` (float32 `[n]`, n <= slots: the first n rows move).

    The Triton kernel `codegen.triton_kernels.fp8_update` is the same rule: change both.
    `test_the_update_kernel_is_next_page` in tests/passes/test_fusion.py compares them bitwise.

    The old scales come from the snapshot, so that every compiler takes it before it writes the page.

    The history shifts by one. A slot's scale is recomputed at its first non-zero amax and at every
    interval-th call from there, unless the amax to compute it from is 0. If an amax times the old scale
    exceeds the slot's limit, the scale is recomputed at once, and the slot becomes cold: the next call uses
    its current amax, if it can (`runtime.calls`), else the new scale. If it is below the slot's floor, the
    slot becomes cold. If the next one is below the floor, too, or the one after an overflow, the slot forgets
    what is older: that would flush the tensor for the length of the window (after a rollback, say, to weights
    from before a spike). One odd batch alone changes no scale. If any amax is not finite, nothing moves: one
    bad batch leaves no trace (TransformerEngine keeps the infinity in the window for its whole length), but
    for the sign of the limit, for the host.
    """
    # Unused slots see zeros: of one shape for all rows, and one concatenation, Inductor makes one kernel.
    amax = torch.nn.functional.pad(amax, (0, page.shape[0] - amax.shape[0]))
    numbers = numbers_of(snapshot)
    old, rows = Rows(numbers), Rows(page)
    old_scale, old_inverse, age = old.scale, old.scale_inv, old.age
    recent = page.narrow(1, HISTORY, rows.length - 1)
    reach, window, interval, limit = rows.reach, rows.window, rows.interval, rows.limit.abs()
    cold = age < 0
    overflow = ~cold & (amax * old_scale > limit)
    underflow = (amax > 0) & (amax * old_scale < floor_of(reach, limit))
    again = underflow & cold & (rows.newest > 0)
    underflow = underflow & ~cold
    recent = torch.where(again.unsqueeze(1), 0.0, recent)
    peak = amax
    if recent.shape[1]:
        counts = torch.arange(1, recent.shape[1] + 1, device=page.device) < window.unsqueeze(1)
        peak = torch.maximum(amax, torch.where(counts, recent, 0.0).amax(1))
    due = torch.where(cold, amax > 0, age + 1 >= interval)
    fresh = (due | overflow) & (peak > 0)
    scale = torch.where(fresh, scale_to(peak, reach.to(torch.float64)), old_scale)
    inverse = torch.where(fresh, inverse_of(scale), old_inverse)
    age = torch.where(due, torch.zeros_like(age), torch.where(cold, age, age + 1))
    age = torch.where(overflow | underflow, torch.full_like(age, -1.0), age)
    columns = [x.unsqueeze(1) for x in (scale, inverse, age)]
    constants = page.narrow(1, REACH, HISTORY - REACH)
    moved = torch.cat([*columns, numbers, constants, amax.unsqueeze(1), recent], 1)
    marked = torch.where(amax.isfinite(), rows.limit, -limit).unsqueeze(1)
    kept = torch.cat([page.narrow(1, 0, LIMIT), marked, page.narrow(1, HISTORY, rows.length)], 1)
    return torch.where(amax.isfinite().all(), moved, kept)
