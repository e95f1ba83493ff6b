"""The parameters that a graph was called with: one graph may serve many layers and models, and any weight may be replaced."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from . import probe
from .calls import Interface


class Owners:
    """`met`: ids of the parameters -> all weights that came with them, by input; until one of them is gone."""

    def __init__(self, interface: Interface):
        self.interface = interface
        self.met: dict[tuple[int, ...], dict[int, weakref.ref]] = {}
        self.casts: dict[tuple[int, probe.Name], probe.Cast] = {}  # what the graph quantizes

    def key(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Some microseconds for a hundred parameters."""
        return tuple([id(args[i]) for i in self.interface.parameters])

    def meet(self, key: tuple[int, ...], args: Sequence[Any]) -> None:
        """The first call with these parameters."""
        met = self.met
        owners = {i: weakref.ref(args[i]) for i in self.interface.weights}
        for i in self.interface.parameters:  # an id may have another tensor then
            owners[i] = weakref.ref(args[i], lambda _: met.pop(key, None))
        met[key] = owners
        if self.interface.trains:
            probe.know(owners, self.casts)

    def know(self, casts: dict[tuple[int, probe.Name], probe.Cast]) -> None:
        """One half is compiled, and quantizes this."""
        self.casts.update(casts)
        if self.interface.trains:
            for owners in list(self.met.values()):
                probe.know(owners, casts)
