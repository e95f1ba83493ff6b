"""Where delayed scaling keeps its history: outside the graphs, by parameter.

A *slot* is one tensor's scaling state; it belongs to a parameter object and is named by (role, use). A compiled graph
reads and writes its slots as rows of a *page* (see `scaling`), one page a direction, handed to it as an input at every
call. So one piece of code serves every layer that it fits, a recompiled graph finds the history that its predecessor
left, two layers never share a slot, and a model that is deleted takes its state with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from . import scaling


@dataclass(frozen=True)
class SlotKey:
    """A slot as a graph knows it: the input (by position) whose matmul it serves, its role and which use of it."""

    input: int
    role: str  # "input" | "weight" | "gradient"
    use: int
    settings: scaling.SlotSettings = field(compare=False)  # how it moves; no part of its identity


@dataclass(eq=False)
class Page:
    """`tensor` is float32 `[capacity, 9 + history]`, see `scaling`; row i is the slot `homes[i]`: owner, (role, use)."""

    tensor: torch.Tensor
    homes: list[tuple[weakref.ref, tuple[str, int]]]
    settings: tuple[scaling.SlotSettings, ...]
    stale: bool = False  # another page has taken over some of the slots

    def cold(self) -> bool:
        """Is there a slot that has not seen a non-zero amax? Reads the device: for cold calls only."""
        return bool((self.tensor[: len(self.homes), scaling.AGE] < 0).any())

    def refresh(self) -> None:
        """Take the slots back, with their values, if another graph that has some of them has run since."""
        if self.stale:
            self.claim()

    def claim(self) -> None:
        """Become the home of these slots, with the values that they have now."""
        rows = self.tensor.data  # no version counter: the page may be saved for a backward that is still to come
        for row, (owner, name) in enumerate(self.homes):
            named = REGISTRY.setdefault(owner(), {})
            before = named.get(name)
            if before is not None and before.page is not self:
                values = before.page.tensor.data[before.row].to(rows.device)
                width = min(values.numel(), rows.shape[1])  # another history length keeps what fits
                rows[row, : scaling.REACH] = values[: scaling.REACH]
                rows[row, scaling.HISTORY : width] = values[scaling.HISTORY : width]
                rows[row, width:] = 0.0  # what this page had there is older than what the other one has forgotten
                factor = self.settings[row].reach / before.page.settings[before.row].reach
                if factor != 1.0 and rows[row, scaling.AGE] >= 0:  # compiled anew with another format or margin
                    for column in (scaling.SCALE, scaling.BEFORE + scaling.SCALE):
                        rows[row, column] *= factor
                        rows[row, column + 1] /= factor
                before.page.stale = True
            named[name] = Slot(self, row)
        self.stale = False


@dataclass(frozen=True)
class Slot:
    """One tensor's scaling state, for reading."""

    page: Page
    row: int

    def scale(self) -> float:
        return float(self.page.tensor[self.row, scaling.SCALE])

    def scale_inv(self) -> float:
        return float(self.page.tensor[self.row, scaling.SCALE_INV])

    def history(self) -> list[float]:
        """The amaxes of the last training calls, newest first; 0 where there was none yet."""
        return self.page.tensor[self.row, scaling.HISTORY :].tolist()


# parameter (or buffer that is used as a weight) -> {(role, use): Slot}
REGISTRY: Any = WeakIdKeyDictionary()


def slots_of(model: nn.Module) -> dict[tuple[str, str, int], Slot]:
    """The delayed scaling state of a model: `{(parameter name, "input" | "weight" | "gradient", use): Slot}`."""
    model = getattr(model, "_orig_mod", model)
    return {
        (name, role, use): slot
        for name, parameter in model.named_parameters()
        for (role, use), slot in sorted(REGISTRY.get(parameter, {}).items())
    }


@dataclass(eq=False)
class PageSet:
    """The pages of one graph for one set of parameters, and what the host knows about them."""

    forward: Page
    backward: Page
    owners: tuple[weakref.ref, ...]
    patience: int = 16  # cold calls left before a slot that only ever saw zeros is taken as it is, with scale 1
    cold: bool = True
    was_cold: bool = True  # the last forward
    pending: int = 0  # training forwards whose backward has not run

    def after_cold_call(self) -> None:
        """Is it the last cold one?"""
        self.patience -= 1
        self.cold = self.patience > 0 and (self.forward.cold() or self.backward.cold())

    @property
    def pages(self) -> tuple[Page, Page]:
        return self.forward, self.backward


class Book:
    """The pages of one compiled graph, found at each call by the identity of the parameters that it is called with."""

    def __init__(
        self,
        forward: Sequence[SlotKey],
        backward: Sequence[SlotKey],
        capacity: tuple[int, int],
        history: int,
    ):
        self.keys = (tuple(forward), tuple(backward))
        self.capacity, self.history = capacity, history
        self.inputs = tuple(dict.fromkeys(key.input for key in (*forward, *backward)))
        self.sets: dict[tuple[int, ...], PageSet] = {}
        self.by_pointer: dict[int, PageSet] = {}

    def open(self, args: Sequence[Any], device: torch.device) -> PageSet:
        """The pages for a call with these inputs, holding what earlier calls of any graph left."""
        owners = [args[i] for i in self.inputs]
        key = tuple(map(id, owners))
        found = self.sets.get(key)
        if found is None:
            found = self._new(key, owners, device)
        for page in found.pages:
            page.refresh()
        return found

    def _slots(self, keys: Sequence[SlotKey], owners: Sequence[Any]) -> list[tuple[Any, tuple[str, int]]]:
        owner = dict(zip(self.inputs, owners, strict=True))
        return [(owner[key.input], (key.role, key.use)) for key in keys]

    def _new(self, key: tuple[int, ...], owners: Sequence[Any], device: torch.device) -> PageSet:
        forward, backward = (
            _page_for(self._slots(keys, owners), tuple(key.settings for key in keys), capacity, self.history, device)
            for keys, capacity in zip(self.keys, self.capacity, strict=True)
        )
        book = weakref.ref(self)

        def forget(_: Any) -> None:
            if (alive := book()) is not None and (gone := alive.sets.pop(key, None)) is not None:
                alive.by_pointer.pop(gone.backward.tensor.data_ptr(), None)

        refs = tuple(weakref.ref(owner, forget) for owner in owners)
        made = PageSet(forward, backward, refs)
        made.cold = forward.cold() or backward.cold()
        self.sets[key] = made
        self.by_pointer[backward.tensor.data_ptr()] = made
        return made


def _page_for(
    slots: list[tuple[Any, tuple[str, int]]],
    settings: tuple[scaling.SlotSettings, ...],
    capacity: int,
    history: int,
    device: torch.device,
) -> Page:
    """The page that holds just these slots in this order (after a recompilation), or a new one that takes them over."""
    held = [REGISTRY.get(owner, {}).get(name) for owner, name in slots]
    pages = {id(slot.page): slot.page for slot in held if slot is not None}
    if len(pages) == 1 and all(slot is not None and slot.row == i for i, slot in enumerate(held)):
        (page,) = pages.values()
        shape = (capacity, scaling.HISTORY + history)
        same = (page.tensor.shape, page.tensor.device, page.settings) == (shape, device, settings)
        if same and not page.stale:
            return page
    tensor = scaling.new_page(capacity, history, device, settings)
    page = Page(tensor, [(weakref.ref(owner), name) for owner, name in slots], settings)
    page.claim()
    return page
