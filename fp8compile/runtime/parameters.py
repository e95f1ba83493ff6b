"""One record for each parameter: all that the runtime knows of it. Found by identity, deleted with it.

Under FSDP2 a parameter is two tensors: the module and the optimizer hold the sharded one, compiled graphs
read the unsharded one. Both have the same record. So what features keep, reports and steps are those of the
parameter that the user holds.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import process
from ..process import Extras

if TYPE_CHECKING:
    from torch import Tensor

    from ..config.options import Options
    from .optimizer_steps import Steps
    from .probe import CastKind, Name


@dataclass(eq=False, slots=True)
class ParameterRecord:
    """The record of a parameter, or of a buffer that is used as a weight. It does not keep that alive."""

    references: list[weakref.ref] = field(default_factory=list)  # to the tensors of the parameter
    # the graphs that read it, by index in the ledger: what names begin with in the part that the graph serves
    graphs: dict[int, str] = field(default_factory=dict)
    name: str = ""  # in its model, as graphs met it
    # what compiled graphs quantize with it, and what the last measurements found: see `probe`
    casts: dict[Name, CastKind] = field(default_factory=dict)
    measured: dict[Name, Tensor] = field(default_factory=dict)
    outdated: bool = False  # `casts` and `measured` come from graphs that are gone
    options: Options | None = None  # of the last training graph that was called with it
    # where it is in its training: see `optimizer_steps`
    steps: list[Steps] = field(default_factory=list)  # of optimizers that had it, alive or not; latest last
    leads: bool = False  # a graph finds its step by it
    reached: bool = False  # since it leads, a gradient has reached it
    follows: bool = False  # it trains, and by no optimizer that has it: see `OptimizerSteps.counted`
    offset: int | None = None  # added to the steps that were counted; None: the offset of the process
    begins: int | None = None  # the step that `set_step` gave before any optimizer had it
    extras: Extras = field(default_factory=Extras)  # of features


_LOCK = threading.RLock()


class Records(dict[int, ParameterRecord]):
    """All records, by id: a reference's callback runs before another tensor can get the id."""


def record_of(parameter: Any) -> ParameterRecord:
    """The record of a parameter, for writing: made if there is none. Threads may ask for it at once."""
    records = process.of(Records)
    if id(parameter) not in records:
        from .. import compat  # imported late, because it imports Dynamo

        with _LOCK:
            pairs = compat.fsdp.sharded_pairs()
            pair = next((pair for pair in pairs if any(x is parameter for x in pair)), (parameter,))
            known = [records[id(tensor)] for tensor in pair if id(tensor) in records]
            record = known[0] if known else ParameterRecord()
            for tensor in pair:
                if id(tensor) not in records:
                    _add(tensor, record)
    return records[id(parameter)]


def share_records(tensors: Iterable[Any]) -> None:
    """Give the sharded and the unsharded tensor of each parameter one record. `tensors`: either of these."""
    from .. import compat  # late, as above

    wanted, records = set(map(id, tensors)), process.of(Records)
    for pair in compat.fsdp.sharded_pairs():
        if wanted.isdisjoint(map(id, pair)):
            continue
        with _LOCK:
            known = [records[id(tensor)] for tensor in pair if id(tensor) in records]
            if len(known) == 1:
                _add(next(tensor for tensor in pair if id(tensor) not in records), known[0])


def _add(tensor: Any, record: ParameterRecord) -> None:
    key, records = id(tensor), process.of(Records)
    record.references = [reference for reference in record.references if reference() is not None]
    record.references.append(weakref.ref(tensor, lambda _: records.pop(key, None)))
    records[key] = record


def adopt(parameter: Any, other: Any) -> None:
    """`other` takes the place of a parameter: it gets its record."""
    record = record_of(parameter)
    with _LOCK:
        _add(other, record)


def find(parameter: Any) -> ParameterRecord:
    """The record of a parameter, for reading: if there is none, an empty one, which is not kept."""
    return process.of(Records).get(id(parameter)) or ParameterRecord()


def ids_of(tensors: Iterable[Any]) -> frozenset[int]:
    """The ids of these tensors, and of those that have one record with them."""
    found: set[int] = set()
    for tensor in tensors:
        others = (reference() for reference in find(tensor).references)
        found |= {id(tensor), *(id(other) for other in others if other is not None)}
    return frozenset(found)


def all_records() -> list[tuple[int, ParameterRecord]]:
    """Every record, with the id of its parameter."""
    return list(process.of(Records).items())
