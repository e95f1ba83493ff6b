"""What compiled graphs say of the forward matmuls of a parameter, kept with its record for an export.

A training graph counts more than an evaluation: evaluations may stay in high precision, and have no histories. Of several
graphs of one kind the newest counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...runtime.parameters import all_records, find, record_of
from .forward import Forward, Slot


@dataclass(frozen=True)
class KnownForward:
    """A `Forward` of a call with known parameters. `owners`: the parameters that its slots and `together` name, by input."""

    forward: Forward
    owners: Mapping[int, weakref.ref]

    def slot(self, slot: Slot | None, role: str) -> Any:
        """The scaling state (`runtime.state.Slot`) of an operand, None if it has none."""
        owner = self.owners[slot[0]]() if slot is not None and slot[0] in self.owners else None
        return find(owner).slots.get((role, slot[1])) if slot is not None and owner is not None else None

    def partners(self) -> list[Any]:
        """The weights that share one scale, this one among them; [] if it has a scale of its own."""
        found = [self.owners[i]() for i in self.forward.together if i in self.owners]
        return [tensor for tensor in found if tensor is not None]


@dataclass(eq=False)
class KnownForwards:
    """Of one parameter: those of the newest graph that trains (True), and of the newest that evaluates."""

    of: dict[bool, tuple[KnownForward, ...]] = field(default_factory=dict)


def know(owners: Mapping[int, weakref.ref], forwards: Mapping[int, tuple[Forward, ...]], trains: bool) -> None:
    """Record that a graph with these weights, by input, multiplies so."""
    for index, several in forwards.items():
        owner = owners[index]() if index in owners else None
        if owner is not None:
            record_of(owner).extras.of(KnownForwards).of[trains] = tuple(KnownForward(forward, owners) for forward in several)


def of(parameter: Any) -> tuple[KnownForward, ...]:
    """The forward matmuls of a parameter: those of training, else those of evaluation; () if no graph multiplies by it."""
    known = find(parameter).extras.of(KnownForwards).of
    return known.get(True) or known.get(False) or ()


def forget() -> None:
    """All graphs are gone."""
    for _, record in all_records():
        record.extras.pop(KnownForwards)
