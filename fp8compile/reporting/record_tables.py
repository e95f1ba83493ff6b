"""Tables of what a report says beside its matmuls, for its text and for the HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..ir.records import TableRecord
from .columns import aligned
from .layer_rows import alike, repeated

WHY = "why not FP8"


class RecordTable(NamedTuple):
    """`titles` and `sides`: those of its records. A row: (name, how many, *cells)."""

    titles: tuple[str, ...]
    sides: str
    rows: list[tuple[Any, ...]]
    about: str

    def __str__(self) -> str:
        rows = [(name + repeated(count), *cells) for name, count, *cells in self.rows]
        return aligned(self.titles, rows, self.sides)


def tables(records: Sequence[TableRecord], collapse: bool = True) -> list[RecordTable]:
    """A table for each kind of records that there is."""
    found = []
    for kind, of in _by_kind(records).items():
        groups = alike(of, lambda record: record.name, lambda record: record.like, collapse)
        rows = [(shared, len(members), *kind.cells(members)) for shared, members in groups]
        found.append(RecordTable(kind.titles, kind.sides, rows, kind.about))
    return found


def briefs(records: Sequence[TableRecord]) -> list[str]:
    """What the kinds of records say in a few words."""
    return [brief for kind, of in _by_kind(records).items() if (brief := kind.brief(of))]


def _by_kind(records: Sequence[TableRecord]) -> dict[type[TableRecord], list[Any]]:
    found: dict[type[TableRecord], list[Any]] = {}
    for record in records:
        found.setdefault(type(record), []).append(record)
    return found


def sizes(records: Sequence[Any]) -> tuple[str, str]:
    """The cells of their bytes `before`, and of their `bytes`."""
    return f"{sum(record.before for record in records):,}", f"{sum(record.bytes for record in records):,}"


def megabytes(records: Sequence[Any]) -> str:
    """ "623 MB instead of 1,208"."""
    before, after = (sum(sizes) / 1e6 for sizes in ([x.before for x in records], [x.bytes for x in records]))
    return f"{after:,.4g} MB instead of {before:,.4g}"
