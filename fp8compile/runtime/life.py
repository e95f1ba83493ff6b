"""The life of the scaling state of one graph and one set of parameters: which of its calls are cold.

| state | how the next training call runs | until |
|---|---|---|
| cold | eagerly, with current amaxes where there is no scale | every slot has an amax, or `PATIENCE` calls |
| warm | the code that Inductor made, with the scales of the state | an event below |

| event | method | after it |
|---|---|---|
| the first call of these parameters | `Book.open` | cold |
| a forward begins | `begin` | its backward is `pending` |
| and weights were loaded (`loads`) | `take_changes` | cold |
| and a scaling state was loaded | `take_changes` | cold where its slots are |
| and another graph has taken the slots over | `take_changes` | as there: the values come back |
| a recomputation begins (`repeats`) | `recompute` | as before |
| a backward begins | `begin_backward` | it is `pending` no more |
| the last update of a call | `end` | a cold call is counted; warm if that was the last one |

A slot that has seen nothing, or only zeros (after a zero-initialised projection all gradients are zero), has
a scale of 1, which would flush small gradients to zero. The state update does not know how a call ran.
Overflows and underflows make no call cold: the device answers them alone (`state_page.next_page`).

Where Inductor fuses, merges or reorders collectives (`together`), a rank that runs eagerly would wait for
collectives that the others do not call. There, only the first call is cold. A graph that `observes` casts
nothing: its state moves, and its calls are never cold.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import compat
from ..ir import state_page
from ..ir.state_page import SlotKey
from .repeats import Ran, Repeats, repeats_of
from .state import LOCK, PATIENCE, Page, check_loaded, page_for


@dataclass(eq=False)
class PageSet:
    """The pages of one graph for one set of parameters, and what the host knows about them."""

    forward: Page
    backward: Page
    owners: tuple[weakref.ref, ...]
    repeats: Repeats
    observes: bool
    together: bool
    was_cold: bool = True  # the last forward was cold
    first: bool = True  # no forward was warm yet
    pending: int = 0  # training forwards whose backward has not run
    copies: dict[int, torch.Tensor] = field(default_factory=dict)  # pages of forwards, to recompute them
    spare: tuple[torch.Tensor, ...] = ()  # pages for calls that leave the state as it is

    def __post_init__(self) -> None:
        self.cold = self.forward.cold() or self.backward.cold()

    @property
    def pages(self) -> tuple[Page, Page]:
        return self.forward, self.backward

    # -- a call --

    def begin(self) -> Ran:
        """A forward begins, which will move the page."""
        self.pending += 1
        ran = self.repeats.begin(self)
        if self.cold and self.pending > PATIENCE:  # the backwards of these forwards do not come
            self._count()
        return ran

    def recompute(self) -> tuple[Ran | None, torch.Tensor]:
        """A recomputation begins: how its original ran, and a page with the scales of that. It is another
        page for each call of a checkpoint, since their backwards read them, but always at one address,
        because a CUDA graph is recorded for addresses."""
        ran = self.repeats.original()
        with compat.autograd.unseen():
            page = ran.page if ran is not None else None
            if page is None:
                page = state_page.page_before(self.forward.tensor)
            number = self.repeats.number
            if number in self.copies:
                self.copies[number].data.copy_(page)
        # no slots in backward, so it has no page by which its begin could be noticed
        if not self.backward.homes:
            self.pending = max(0, self.pending - 1)
        return ran, self.copies.setdefault(number, page)

    def aside(self) -> tuple[torch.Tensor, ...]:
        """Copies of both pages as they are, for a dry call; at one address, as above."""
        self.spare = self.spare or tuple(page.tensor.clone() for page in self.pages)
        for spare, page in zip(self.spare, self.pages, strict=True):
            spare.data.copy_(page.tensor)
        return self.spare

    def runs_cold(self) -> bool:
        """Is the forward that begins cold? `together`: only the first one is, for then it is on all ranks."""
        if self.observes or not self.cold:
            return False
        return not self.together or self.first and not (self.forward.begun() or self.backward.begun())

    def begin_backward(self) -> None:
        self.pending = max(0, self.pending - 1)
        if self.backward.stale:
            with compat.autograd.unseen(), LOCK:
                self.backward.refresh()

    def backward_runs_cold(self) -> bool:
        """Is a backward cold whose forward has left no mark?"""
        return not self.observes and (self.was_cold if self.together else self.cold)

    def end(self) -> None:
        """After the last update of a training call."""
        if self.cold and (self.was_cold or self.together):
            self._count()

    # -- between calls --

    @property
    def changed(self) -> bool:
        return self.forward.changed or self.backward.changed

    def take_changes(self) -> None:
        """Of the slots: by other graphs, and by what was loaded."""
        for page in self.pages:
            page.refresh()
        if any(page.loaded or page.restarted for page in self.pages):
            patience = max((page.patience for page in self.pages if page.homes), default=PATIENCE)
            for page in self.pages:
                page.patience = PATIENCE if page.restarted else patience
                page.loaded = page.restarted = False
            self.cold = self._has_cold_slots()

    def _count(self) -> None:
        """Count a cold call, and find out whether it was the last."""
        for page in self.pages:
            page.patience = max(0, page.patience - 1)
        with compat.autograd.unseen():
            self.cold = self._has_cold_slots()

    def _has_cold_slots(self) -> bool:
        return self.forward.patience > 0 and (self.forward.cold() or self.backward.cold())


class Book:
    """The pages of one compiled graph, found at each call by the identity of the call's parameters."""

    def __init__(
        self,
        forward: Sequence[SlotKey],
        backward: Sequence[SlotKey],
        history: int,
        observes: bool = False,
        together: bool = False,
    ):
        self.keys = (tuple(forward), tuple(backward))
        self.history, self.observes, self.together = history, observes, together
        self.inputs = tuple(dict.fromkeys(key.input for key in (*forward, *backward)))
        self.sets: dict[tuple[int, ...], PageSet] = {}
        self.by_pointer: dict[int, PageSet] = {}

    def open(self, args: Sequence[Any], device: torch.device) -> PageSet:
        """The pages for a call with these inputs, with the state that earlier calls of any graph left."""
        key = tuple([id(args[i]) for i in self.inputs])
        with LOCK:
            found = self.sets.get(key)
            if found is None or found.changed:
                with compat.autograd.unseen():
                    found = found or self._new(key, [args[i] for i in self.inputs], device)
                    found.take_changes()
        return found

    def forget(self) -> None:
        """Forget every call: the next one is the first."""
        self.sets.clear()
        self.by_pointer.clear()

    def _slots(self, keys: Sequence[SlotKey], owners: Sequence[Any]) -> list[tuple[Any, tuple[str, int]]]:
        owner = dict(zip(self.inputs, owners, strict=True))
        return [(owner[key.input], (key.role, key.use)) for key in keys]

    def _new(self, key: tuple[int, ...], owners: Sequence[Any], device: torch.device) -> PageSet:
        halves = [(self._slots(keys, owners), tuple(key.settings for key in keys)) for keys in self.keys]
        wanted = [pair for slots, settings in halves for pair in zip(slots, settings, strict=True)]
        check_loaded(wanted, self.history)
        forward, backward = (page_for(slots, settings, self.history, device) for slots, settings in halves)
        book = weakref.ref(self)

        def forget(_: Any) -> None:
            if (alive := book()) is not None and (gone := alive.sets.pop(key, None)) is not None:
                alive.by_pointer.pop(gone.backward.tensor.data_ptr(), None)

        refs = tuple(weakref.ref(owner, forget) for owner in owners)
        made = PageSet(forward, backward, refs, repeats_of(owners), self.observes, self.together)
        self.sets[key] = made
        self.by_pointer[backward.tensor.data_ptr()] = made
        return made
