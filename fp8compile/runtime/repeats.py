"""How forwards ran, for their recomputations.

A recomputation runs as its original did, with the scales of that forward: else the values that it saves are
others, or a different number of them. With one forward at a time, the original is the last forward. In a
pipeline several forwards wait for their backwards, some of them cold and others not. A block may also run
several times within one checkpoint. There, the frame of the checkpoint tells which forward is repeated: the
one with the same number among the calls of these weights within the frame.

The page holds the scales of the last forward only. Before another forward moves it, a copy is kept of what
the last one used, if that one was checkpointed and its backward has not run.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .. import compat
from ..ir import state_page
from .parameters import record_of

if TYPE_CHECKING:
    from .life import PageSet


@dataclass(eq=False)
class Ran:
    """How a forward ran: cold; eagerly, for being cold or measured. `page`: one with its scales, once the
    page of the graph has moved on."""

    cold: bool = False
    eager: bool = False
    page: torch.Tensor | None = None


@dataclass(eq=False)
class Region:
    """The forwards of some weights within a checkpoint, and how far the recomputation of `hook` has come."""

    forwards: list[Ran] = field(default_factory=list)
    hook: Any = None
    number: int = -1


# by the frame of the checkpoint
_regions: weakref.WeakKeyDictionary[Any, dict[Repeats, Region]] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class Repeats:
    """The forwards of one set of weights, in all graphs that serve it."""

    last: Ran | None = None  # the last forward
    pages: weakref.ref[PageSet] | None = None  # its state, if it was checkpointed
    number: int = 0  # of the forward that is repeated, within its checkpoint

    def begin(self, pages: PageSet) -> Ran:
        """A forward begins that is no recomputation, and will move the page of the last one."""
        before = self.pages() if self.pages is not None else None
        if before is not None and before.pending and self.last is not None and self.last.page is None:
            with compat.autograd.unseen():
                self.last.page = state_page.page_before(before.forward.tensor)
        checkpoint = compat.autograd.checkpoint()
        self.last, self.pages = Ran(), None
        if checkpoint is not None:
            self.pages = weakref.ref(pages)
            self._region(checkpoint).forwards.append(self.last)
        return self.last

    def original(self) -> Ran | None:
        """The forward that the one that begins now repeats: the last one, unless a checkpoint tells another.
        None if neither is known."""
        checkpoint, self.number = compat.autograd.checkpoint(), 0
        if checkpoint is None:
            return self.last
        region = self._region(checkpoint)
        if not checkpoint.repeats:  # an inner checkpoint, in the recomputation of an outer one
            region.forwards += [] if self.last is None else [self.last]
            return self.last
        region.number = region.number + 1 if region.hook is checkpoint.hook else 0
        region.hook, self.number = checkpoint.hook, region.number
        return region.forwards[region.number] if region.number < len(region.forwards) else self.last

    def _region(self, checkpoint: compat.autograd.Checkpoint) -> Region:
        return _regions.setdefault(checkpoint.frame, {}).setdefault(self, Region())


def repeats_of(owners: Sequence[Any]) -> Repeats:
    """Of the weights of a graph."""
    records = {id(record): record for record in map(record_of, owners)}
    return records[min(records)].repeats.setdefault(frozenset(records), Repeats())
