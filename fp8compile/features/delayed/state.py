"""Where delayed scaling keeps its history: outside the graphs, by parameter.

A *slot* is one tensor's scaling state; it belongs to a parameter object and is named by (role, use). The
slots of a compiled graph are rows of a *page* (see `state_page`), whose scales and amaxes it gets as inputs
at every call. So one piece of code serves every layer that it fits, a recompiled graph finds the history that
its predecessor left, two layers never share a slot, and a model that is deleted takes its state with it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ... import process
from ...errors import StateError, at_most
from ...extension import StoredScale
from ...ir.ops import UNSEEN
from ...logs import get_logger
from ...runtime.named_weights import named_weights
from . import state_page
from .arena import PATIENCE, Arena, Arenas, Where
from .state_page import Rows, SlotSettings
from .weight_state import find_state, state_of

logger = get_logger(__name__)

COUNTS = "overflow_calls", "underflow_calls", "not_finite_calls"  # columns of statistics


@dataclass(eq=False)
class Loading:
    """A state loaded for a model, until its graphs have taken it. `quiet`: what does not fit is not said."""

    strict: bool
    quiet: bool = False

    def differs(self, differences: Sequence[str]) -> None:
        """Differences are a StateError if `strict`, else one warning, by whichever graph meets them first."""
        if differences and not self.quiet:
            self.quiet = not self.strict
            refuse_or_warn(differences, self.strict)


@dataclass(eq=False)
class Page:
    """`tensor`: float32 `[rows, 13 + history]` (`state_page`). Row i: slot `homes[i]`: owner, (role, use). It
    lies in `arena`, from row `first` on; without one, it was loaded and no graph has taken it."""

    tensor: torch.Tensor
    homes: list[tuple[weakref.ref, tuple[str, int]]]
    settings: tuple[SlotSettings, ...]
    arena: Arena | None = None
    first: int = 0
    number: int = 0  # of the pages of its arena
    stale: bool = False  # another page has taken over some of the slots
    patience: int = PATIENCE  # cold calls left; then a slot that saw only zeros is used with scale 1
    loaded: bool = False  # values and patience were loaded, and no call has used them yet
    casting: Sequence[int] | None = None  # the rows that the newest graph casts by
    restarted: bool = False  # weights were loaded since the last call, and some slots are cold: see `loads`
    name: str = ""  # of the only slot of a loaded page, while no graph has taken it over
    loading: Loading | None = None  # for the first graph that takes it over

    @property
    def waits(self) -> bool:
        """True if it was loaded, and a graph may still take it."""
        return self.loading is not None and not self.loading.quiet

    @property
    def amaxes(self) -> torch.Tensor:
        assert self.arena is not None  # .data: no new version of what a later backward may have saved
        return self.arena.amaxes.data[self.first : self.first + self.tensor.shape[0]]

    def now(self) -> torch.Tensor:
        """The page for reading, moved by all that calls have raised."""
        return self.tensor if self.arena is None else self.arena.now(self.first, self.tensor.shape[0])

    def cold(self, rows: Sequence[int]) -> bool:
        """True if one of these slots has not seen a non-zero amax. Reads the device: for cold calls only."""
        return len(rows) > 0 and bool(Rows(self.tensor[: len(self.homes)]).cold[list(rows)].any())

    def begun(self) -> bool:
        """True if some slot has seen a non-zero amax. Reads the device."""
        return not bool(Rows(self.tensor[: len(self.homes)]).cold.all())

    @property
    def changed(self) -> bool:
        return self.stale or self.loaded or self.restarted

    def claim(self) -> None:
        """Become the home of these slots, with the values that they have now."""
        loaded: list[Page] = []
        for row, (owner, name) in enumerate(self.homes):
            named = state_of(owner()).slots
            before = named.get(name)
            if before is not None and before.page is not self:
                loaded += [before.page] if before.page.loaded else []
                self.restarted |= before.page.restarted
                self.take(row, before.page, before.row)
                before.page.stale = True
            named[name] = Slot(self, row)
        self.stale = False
        if loaded:
            self.loaded = True
            # else a slot that was not loaded may have to be cold for longer
            if len(loaded) == len(self.homes):
                self.patience = min(page.patience for page in loaded)

    def take(self, row: int, page: Page, before: int = 0) -> None:
        """Copy row `before` of another page into `row`."""
        factor = self.settings[row].reach / page.settings[before].reach
        state_page.copy_row(self.tensor[row], page.tensor[before], factor)
        if page.arena is not None and self.arena is not None:
            self.amaxes[row].clamp_(min=page.amaxes[before].to(self.tensor.device))
            page.amaxes[before] = UNSEEN
            self.arena.edited = True
            self.arena.raised |= page.arena.raised
        else:
            self.write(row)

    def write(self, row: int, values: torch.Tensor | None = None) -> None:
        """Write the values of a slot; what calls have raised is of the slot before."""
        if values is not None:
            self.tensor[row] = values
        if self.arena is not None:
            self.amaxes[row] = UNSEEN
            self.arena.edited = True


@dataclass(frozen=True)
class Slot:
    """One tensor's scaling state, for reading."""

    page: Page
    row: int

    @property
    def numbers(self) -> Rows:
        return Rows(self.page.now()[self.row])

    def restart(self) -> None:
        """Start cold, unless a state was loaded since the last call."""
        if not self.page.loaded:
            state_page.restart(self.page.tensor[self.row])
            self.page.write(self.row)
            self.page.restarted = True

    def stored(self, pages: dict[Page, torch.Tensor]) -> StoredScale:
        """As `extension` has it. `pages`: those that were read."""
        if self.page not in pages:
            pages[self.page] = self.page.now().detach().cpu()
        row = Rows(pages[self.page][self.row])
        # a row that was lost did not move: it has an older amax
        amax = math.nan if row.lost else row.newest.item()
        counts = dict(zip(COUNTS, map(int, row.counts()), strict=True))
        return StoredScale(amax, row.scale.item(), row.scale_inv.item(), bool(row.cold), counts)


def slots_of(model: nn.Module) -> dict[tuple[str, str, int], Slot]:
    """A model's delayed scaling state: `{(parameter name, "input" | "weight" | "gradient", use): Slot}`."""
    return {
        (name, role, use): slot
        for name, weight in named_weights(model).items()
        for (role, use), slot in sorted(find_state(weight).slots.items())
    }


def check_unwanted(weights: Iterable[Any], wanted: Collection[Any]) -> None:
    """Say if a state was loaded for weights of a training graph that keep none. `wanted`: those that do."""
    known = set(map(id, wanted))
    others = (weight for weight in weights if id(weight) not in known)
    found = [slot.page for weight in others for slot in find_state(weight).slots.values()]
    _report_differences(
        [(page.loading, f"unexpected: {page.name}") for page in found if page.loading is not None]
    )


def check_loaded(wanted: Sequence[tuple[tuple[Any, tuple[str, int]], SlotSettings]], history: int) -> None:
    """Say if slots of a new graph were loaded, and differ from the slots that the graph needs."""
    held = [find_state(owner).slots.get(name) for (owner, name), _ in wanted]
    loaded = [slot.page.loading for slot in held if slot is not None and slot.page.loading is not None]
    if not loaded:
        return
    differences: list[tuple[Loading, str]] = []
    roles: dict[int, set[str]] = {}
    for ((owner, (role, use)), settings), slot in zip(wanted, held, strict=True):
        roles.setdefault(id(owner), set()).add(role)
        if slot is None and find_state(owner).loaded is not None:
            differences.append((loaded[0], f"missing: {find_state(owner).loaded}.{role}.{use}"))
        elif slot is not None and (of := slot.page.loading) is not None:
            found = differing(slot.page.name, slot.page.settings[0], slot.numbers.length, settings, history)
            differences += [(of, difference) for difference in found]
    for owner in {id(owner): owner for (owner, _), _ in wanted}.values():
        for (role, _), slot in find_state(owner).slots.items():
            if slot.page.loading is not None and role not in roles[id(owner)]:
                differences.append((slot.page.loading, f"unexpected: {slot.page.name}"))
    _report_differences(differences)


def _report_differences(differences: Sequence[tuple[Loading, str]]) -> None:
    """What does not fit, by what was loaded: StateError or a warning."""
    for loading in dict.fromkeys(loading for loading, _ in differences):
        loading.differs([difference for other, difference in differences if other is loading])


FIX = (
    "Compile with the policy and options that it was saved with, or load it without strict=True to load "
    "what fits, or ScalingState(model).load_state_dict(None) to start cold."
)
SHOWN = 5  # differences in a warning


def refuse_or_warn(differences: Sequence[str], strict: bool, fix: str = FIX) -> None:
    """What does not fit of a state that is loaded: StateError if `strict`, else a warning."""
    if strict:
        raise StateError.of(differences, fix)
    what = (
        "this scaling state is of another model, policy or option: what fits is loaded, "
        "and the rest starts cold"
    )
    shown = "\n  ".join(at_most(SHOWN, differences))
    logger.warning("fp8: %s:\n  %s\nScalingState(model, strict=True) makes this an error", what, shown)


def differing(name: str, saved: SlotSettings, kept: int, settings: SlotSettings, history: int) -> list[str]:
    """The differences between a saved slot (with `kept` amaxes) and this graph's (with `history` amaxes)."""
    pairs = [
        ("FP8 maximum / 2**margin", saved.reach, settings.reach),
        ("window (amax_history_len, or 1 with most_recent)", saved.window, settings.window),
        ("interval", saved.interval, settings.interval),
        ("overflow limit (on_overflow, margin, fp8_format)", saved.limit, settings.limit),
        ("amaxes that are kept (the longest amax_history_len)", kept, history),
    ]
    return [f"{name}: {what} {before:g}, here {now:g}" for what, before, now in pairs if before != now]


def page_for(
    slots: list[tuple[Any, tuple[str, int]]],
    settings: tuple[SlotSettings, ...],
    where: Where,
) -> Page:
    """The page with just these slots in this order (after a recompilation), or a new one that takes them."""
    rows = state_page.rows_for(len(slots))
    held = [find_state(owner).slots.get(name) for owner, name in slots]
    pages = {id(slot.page): slot.page for slot in held if slot is not None}
    if len(pages) == 1 and all(slot is not None and slot.row == i for i, slot in enumerate(held)):
        (page,) = pages.values()
        same = page.arena is not None and page.arena.where == where and page.settings == settings
        if same and page.tensor.shape[0] == rows and not page.stale:
            return page
    backward = sum(role == "gradient" for _, (role, _) in slots)
    arena, first = process.of(Arenas).allot(where, rows, (len(slots) - backward, backward))
    tensor = arena.page[first : first + rows]
    tensor.copy_(state_page.new_page(rows, where.history, where.device, settings))
    homes = [(weakref.ref(owner), name) for owner, name in slots]
    page = Page(tensor, homes, settings, arena, first, len(arena.pages) - 1)
    page.claim()
    return page
