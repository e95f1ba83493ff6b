"""Tables of what a report says beside its matmuls, for its text and for the HTML page, and each in a few words.

Records whose names differ in numbers only, and that are alike, share a row: `h.0-11.fc.weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..ir.records import FP8, CollectiveRecord, FrozenRecord, GatherRecord, KeptRecord, OpaqueRecord
from .columns import aligned
from .layer_rows import alike, repeated

if TYPE_CHECKING:
    from .outside import OutsideRecord

WHY = "why not FP8"


class RecordTable(NamedTuple):
    """`titles`: what the table is of, and those of its cells. `sides`: as of `aligned`. A row: (name, how many, *cells)."""

    titles: tuple[str, ...]
    sides: str
    rows: list[tuple[Any, ...]]

    def __str__(self) -> str:
        return aligned(self.titles, [(name + repeated(count), *cells) for name, count, *cells in self.rows], self.sides)


def _table(
    titles: tuple[str, ...],
    sides: str,
    records: Sequence[Any],
    name: str,
    like: Callable[[Any], Hashable],
    cells: Callable[[list[Any]], tuple[str, ...]],
    collapse: bool = True,
) -> RecordTable:
    groups = alike(records, lambda record: getattr(record, name), like, collapse)
    return RecordTable(titles, sides, [(shared, len(of), *cells(of)) for shared, of in groups])


def _bytes(of: list[Any]) -> tuple[str, str]:
    return f"{sum(record.before for record in of):,}", f"{sum(record.bytes for record in of):,}"


def hidden(records: Sequence[OpaqueRecord], collapse: bool = True) -> RecordTable:
    """The operators that hide matmuls."""
    titles, like = ("not rewritten", "op", "why"), lambda x: (x.op, x.reason)
    return _table(titles, "<<<", records, "fqn", like, lambda of: (of[0].op, of[0].reason), collapse)


def collectives(records: Sequence[CollectiveRecord]) -> RecordTable:
    """Of a graph: the bytes are those that a rank sends of all of them."""
    titles, like = ("read from other ranks", "by", "bytes a rank", "with FP8", WHY), lambda x: (x.kind, x.bytes, x.reason)
    return _table(titles, "<<>><", records, "tensor", like, lambda of: (of[0].kind, *_bytes(of), of[0].reason))


def gathered(records: Sequence[GatherRecord]) -> RecordTable:
    """By FSDP2, outside of graphs."""
    titles, like = ("all-gather in training", "as", WHY), lambda x: (x.dtype, x.reason)
    return _table(titles, "<<<", records, "parameter", like, lambda of: (of[0].dtype, of[0].reason))


def kept(records: Sequence[KeptRecord]) -> RecordTable:
    """By forward, with `save="fp8"`."""
    titles, like = ("kept for backward in FP8", "tensor", "bytes", "in FP8"), lambda x: (x.tensor, x.bytes)
    return _table(titles, "<<>>", records, "module", like, lambda of: (of[0].tensor, *_bytes(of)))


def frozen(records: Sequence[FrozenRecord]) -> RecordTable:
    """With `frozen="fp8"`."""
    titles, like = ("frozen weight", "bytes", "kept", "why"), lambda x: (x.bytes, x.reason)
    return _table(titles, "<>><", records, "parameter", like, lambda of: (*_bytes(of), of[0].reason or "fp8 only"))


def outside(records: Sequence[OutsideRecord]) -> RecordTable:
    """What no graph reads."""
    titles, like = ("in no compiled graph", "of", "size"), lambda x: (x.module, f"{x.rows} x {x.columns}")
    return _table(titles, "<<<", records, "parameter", like, lambda of: like(of[0]))


# --- in a few words -----------------------------------------------------------------------------------


def _megabytes(records: Sequence[KeptRecord | FrozenRecord]) -> str:
    before, after = (sum(sizes) / 1e6 for sizes in ([x.before for x in records], [x.bytes for x in records]))
    return f"{after:,.4g} MB instead of {before:,.4g}"


def brief_gathered(records: Sequence[GatherRecord]) -> str:
    """ "all-gather: 28 of 31 matrices in FP8"."""
    fp8 = sum(record.gathered == FP8 for record in records)
    return f"all-gather: {fp8} of {sum(record.matrix for record in records)} matrices in FP8"


def brief_kept(records: Sequence[KeptRecord]) -> str:
    """ "kept for backward in FP8: 623 MB instead of 1,208"."""
    return f"kept for backward in FP8: {_megabytes(records)}"


def brief_frozen(records: Sequence[FrozenRecord]) -> str:
    """ "frozen weights in FP8 only: 224 of 225, 6,980 MB instead of 13,960"."""
    stored = [record for record in records if not record.reason]
    return f"frozen weights in FP8 only: {len(stored)} of {len(records)}, {_megabytes(stored)}"
