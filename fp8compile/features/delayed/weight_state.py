"""What delayed scaling knows of one parameter, as a part of the parameter's record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...runtime.parameters import find, record_of

if TYPE_CHECKING:
    from .arena import Pending
    from .state import Slot


@dataclass(eq=False, slots=True)
class WeightState:
    slots: dict[tuple[str, int], Slot] = field(default_factory=dict)  # by role and use
    said: dict[tuple[str, int], tuple[float, ...]] = field(default_factory=dict)  # their counts: `notices`
    pending: dict[frozenset[int], Pending] = field(default_factory=dict)  # by records of a graph's weights
    loaded: str | None = None  # the parameter's name in a state that was loaded for it


def state_of(parameter: Any) -> WeightState:
    """The state of a parameter, for writing: made if there is none."""
    return record_of(parameter).extras.of(WeightState)


def find_state(parameter: Any) -> WeightState:
    """The state of a parameter, for reading: if there is none, an empty one, which is not kept."""
    return find(parameter).extras.get(WeightState) or WeightState()
