"""One record for each parameter, with all that the runtime knows of it. Found by identity, and deleted with the parameter."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from .phases import Steps
    from .probe import Cast, Name
    from .state import Slot


@dataclass(eq=False, slots=True)
class ParameterRecord:
    """The record of a parameter, or of a buffer that is used as a weight. It does not keep the parameter alive."""

    reference: weakref.ref | None = None
    graphs: set[int] = field(default_factory=set)  # indices in the ledger of the graphs that read it
    # scaling state: see `state` and `state_dict`
    slots: dict[tuple[str, int], Slot] = field(default_factory=dict)  # by role and use
    loaded: str | None = None  # its name in a loaded state that graphs have to fit
    # what compiled graphs quantize with it, and what the last measurements found: see `probe`
    casts: dict[Name, Cast] = field(default_factory=dict)
    measured: dict[Name, Tensor] = field(default_factory=dict)
    outdated: bool = False  # `casts` and `measured` come from graphs that are gone
    # where it is in its training: see `phases`
    steps: list[Steps] = field(default_factory=list)  # of the optimizers that had it, alive or not; the latest is last
    leads: bool = False  # a graph finds its phase by it
    offset: int | None = None  # added to the steps that were counted; None: the offset of the process
    phase: str | None = None  # set by hand; "": the schedule decides; None: the phase of the process


_records: dict[int, ParameterRecord] = {}  # by id: a reference's callback runs before another tensor can get the id


def record_of(parameter: Any) -> ParameterRecord:
    """The record of a parameter, for writing: made if there is none. Several threads may ask for it at once."""
    key, records = id(parameter), _records
    if key not in records:
        records.setdefault(key, ParameterRecord(weakref.ref(parameter, lambda _: records.pop(key, None))))
    return records[key]


def find(parameter: Any) -> ParameterRecord:
    """The record of a parameter, for reading: if there is none, an empty one, which is not kept."""
    return _records.get(id(parameter)) or ParameterRecord()


def all_records() -> list[tuple[int, ParameterRecord]]:
    """Every record, with the id of its parameter."""
    return list(_records.items())


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Inside, there are no records; those that are made inside are forgotten."""
    global _records
    before, _records = _records, {}
    try:
        yield
    finally:
        _records = before
