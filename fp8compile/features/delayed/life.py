"""The life of the scaling state of one graph and one set of parameters: which of its calls are cold.

| state | how the next training call runs | until |
|---|---|---|
| cold | eagerly, with current amaxes where there is no scale | every slot has an amax, or `PATIENCE` calls |
| warm | the code that Inductor made, with the scales of the state | an event below |

| event | method | after it |
|---|---|---|
| the first call of these parameters | `PageSets.at` | cold |
| a call begins, and the state has moved | `decide` | a cold call is counted; warm if it was the last one |
| weights were loaded (`loads`) | `take_changes` | cold |
| a scaling state was loaded | `take_changes` | cold where its slots are |
| another graph has taken the slots over | `take_changes` | as there: the values come back |
| a backward begins | `begin_backward` | its forward waits no more |

Between two moves (`arena`) all calls run alike. So a recomputation runs as its forward did.

A slot that has seen nothing, or only zeros (after a zero-initialised projection all gradients are zero), has
a scale of 1, which would flush small gradients to zero. The state update does not know how a call ran.
Overflows and underflows make no call cold: the device answers them alone (`state_page.next_page`).

Where Inductor fuses, merges or reorders collectives (`together`), a rank that runs eagerly would wait for
collectives that the others do not call. There, only the first call is cold. Slots of tensors that this graph
does not cast, and other graphs do, make none of its calls cold.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import compat
from ...runtime.parameters import record_of
from .arena import LOCK, MOST, PATIENCE, Pending, Where
from .state import Page, check_loaded, page_for
from .state_page import new_amaxes
from .store import Slots
from .weight_state import WeightState


@dataclass(eq=False)
class PageSet:
    """The page of one graph for one set of parameters, and what the host knows about it."""

    page: Page
    owners: tuple[weakref.ref, ...]
    pending: Pending
    cast: Sequence[int]  # the rows that the graph casts by
    together: bool
    has_backward: bool
    runs_cold: bool = False  # calls are cold, until the next move
    moves: int = -1  # of the arena, when that was decided; -1: it is open
    called: bool = False  # there was a call that was not dry
    forwards: int = 0  # since the last move
    overdue: int = 0  # cold calls after the last one that had to be
    repeats: int = 0  # recomputations since then of forwards that do not wait any more
    first: bool = True  # no forward was warm yet

    def __post_init__(self) -> None:
        assert self.page.arena is not None
        self.arena, self.cold = self.page.arena, self.page.cold(self.cast)
        self.amaxes = self.page.amaxes

    # -- a call --

    def decide(self) -> None:
        """Before a call, find out whether it is cold; count a cold call before the last move. `together`:
        only the first call is cold, for then it is on all ranks."""
        if self.moves == self.arena.moves:
            return
        if self.cold or self.runs_cold:
            with compat.autograd.unseen():
                self.runs_cold = self._will_run_cold()
        self.moves, self.forwards, self.repeats = self.arena.moves, 0, 0

    def _will_run_cold(self) -> bool:
        if self.cold and self.forwards and (self.runs_cold or self.together):
            self.page.patience = max(0, self.page.patience - 1)
            self.cold = self._has_cold_slots()
        if self.together:
            return self.cold and not (self.called or self.page.begun())
        # recomputations of cold forwards have to be cold, too
        if self.runs_cold and self.pending.open and self.overdue < PATIENCE:
            self.overdue += not self.cold
            return True
        return self.cold

    def is_again(self, hooked: bool) -> bool:
        """True if a forward inside of a backward is a recomputation. `hooked`: as for non-reentrant
        checkpoints. Then it may be that of a second backward through one graph."""
        if self.pending.open:
            return True
        self.repeats += hooked
        return hooked and self.moves == self.arena.moves and 0 < self.repeats <= PATIENCE

    def is_held_up(self) -> bool:
        """True if the state should have moved, but for forwards that wait. These weights wait no more, or for
        too long: a forward of theirs had no backward."""
        if not self.has_backward or self.moves != self.arena.moves or not self.forwards:
            return False
        return not self.pending.count or self.forwards > (PATIENCE if self.cold else MOST)

    def begin(self) -> None:
        """A forward begins that is no recomputation."""
        self.called = self.arena.raised = True
        self.page.casting = self.cast
        self.forwards += 1
        if self.has_backward:
            self.pending.begin()

    def state(self, dry: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales and amaxes for a call."""
        return self.arena.by_page[self.page.number], self.aside if dry else self.amaxes

    @functools.cached_property
    def aside(self) -> torch.Tensor:
        """Amaxes of dry calls; at one address, because a CUDA graph is recorded for addresses."""
        with compat.autograd.unseen():
            return new_amaxes(self.amaxes.shape[0], self.amaxes.device)

    def begin_backward(self) -> None:
        self.arena.raised = True
        self.pending.end()
        if self.page.stale:
            with compat.autograd.unseen(), LOCK:
                self.page.claim()

    # -- between calls --

    def take_changes(self) -> None:
        """Of the slots: by other graphs, and by what was loaded."""
        page = self.page
        if page.stale:
            page.claim()
        if page.loaded or page.restarted:
            page.patience = PATIENCE if page.restarted else page.patience
            page.loaded = page.restarted = False
            self.cold, self.moves, self.forwards = self._has_cold_slots(), -1, 0

    def _has_cold_slots(self) -> bool:
        return self.page.patience > 0 and self.page.cold(self.cast)


class PageSets:
    """The pages of one compiled graph, found at each call by the identity of the call's parameters. `where`:
    where they are, on whatever device."""

    def __init__(self, slots: Slots, where: Where, has_backward: bool, together: bool):
        self.keys, self.cast, self.where = slots.keys, slots.cast, where
        self.has_backward, self.together = has_backward, together
        self.inputs = tuple(dict.fromkeys(key.input for key in slots.keys))
        self.sets: dict[tuple[int, ...], PageSet] = {}
        self.by_pointer: dict[int, PageSet] = {}  # by the amaxes of their pages

    def at(self, args: Sequence[Any], device: torch.device) -> PageSet:
        """The pages for a call with these inputs, with the state that earlier calls of any graph left."""
        key = tuple([id(args[i]) for i in self.inputs])
        with LOCK:
            found = self.sets.get(key)
            if found is None or found.page.changed:
                with compat.autograd.unseen():
                    found = found or self._new(key, [args[i] for i in self.inputs], device)
                    found.take_changes()
        return found

    def forget(self) -> None:
        """Forget every call: the next one is the first."""
        self.sets.clear()
        self.by_pointer.clear()

    def _new(self, key: tuple[int, ...], owners: Sequence[Any], device: torch.device) -> PageSet:
        owner = dict(zip(self.inputs, owners, strict=True))
        slots = [(owner[key.input], (key.role, key.use)) for key in self.keys]
        settings = tuple(key.settings for key in self.keys)
        check_loaded(list(zip(slots, settings, strict=True)), self.where.history)
        page, page_sets = page_for(slots, settings, replace(self.where, device=device)), weakref.ref(self)

        def forget(_: Any) -> None:
            if (alive := page_sets()) is not None and (gone := alive.sets.pop(key, None)) is not None:
                alive.by_pointer.pop(gone.amaxes.data_ptr(), None)

        refs = tuple(weakref.ref(owner, forget) for owner in owners)
        made = PageSet(page, refs, _pending_of(owners), self.cast, self.together, self.has_backward)
        self.sets[key] = self.by_pointer[made.amaxes.data_ptr()] = made
        return made


def _pending_of(owners: Sequence[Any]) -> Pending:
    """Of a set of weights."""
    records = {id(record): record for record in map(record_of, owners)}
    return records[min(records)].extras.of(WeightState).pending.setdefault(frozenset(records), Pending())
