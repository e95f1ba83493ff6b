"""The parameters a graph was called with. It may serve many layers and models; weights may be replaced."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from . import probe
from .calls import Interface


class Owners:
    """`known`: ids of a call's parameters -> all its weights, by input. An entry goes with any parameter."""

    def __init__(self, interface: Interface):
        self.interface = interface
        self.known: dict[tuple[int, ...], dict[int, weakref.ref]] = {}
        self.casts: dict[tuple[int, probe.Name], probe.CastKind] = {}  # what the graph quantizes

    def key(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The ids of a call's parameters. Takes some microseconds for a hundred of them."""
        return tuple([id(args[i]) for i in self.interface.parameters])

    def add(self, key: tuple[int, ...], args: Sequence[Any]) -> Mapping[int, weakref.ref]:
        """Record the first call with these parameters. Returns its weights, by input."""
        known = self.known
        owners = {i: weakref.ref(args[i]) for i in self.interface.weights}
        for i in self.interface.parameters:  # once a parameter is gone, another tensor may get its id
            owners[i] = weakref.ref(args[i], lambda _: known.pop(key, None))
        known[key] = owners
        if self.interface.trains:
            probe.know(owners, self.casts)
        return owners

    def rest(self) -> None:
        """Another graph has taken over the calls: this one's casts are no longer those of its weights."""
        for owners in list(self.known.values()):
            probe.unknow(owners, self.casts)

    def know(self, casts: Mapping[tuple[int, probe.Name], probe.CastKind]) -> None:
        """Record what one half, which was just compiled, quantizes."""
        self.casts.update(casts)
        if self.interface.trains:
            for owners in list(self.known.values()):
                probe.know(owners, casts)
