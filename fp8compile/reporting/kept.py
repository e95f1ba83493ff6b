"""What is kept in FP8, as text: by forward for backward, with `save="fp8"`; and frozen weights, with `frozen="fp8"`."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.records import FrozenRecord, KeptRecord
from .columns import aligned
from .layer_rows import alike, repeated


def brief(records: Sequence[KeptRecord]) -> str:
    """ "kept for backward in FP8: 623 MB instead of 1,208"."""
    before, after = (sum(sizes) / 1e6 for sizes in ([x.before for x in records], [x.bytes for x in records]))
    return f"kept for backward in FP8: {after:,.4g} MB instead of {before:,.4g}"


def rows(records: Sequence[KeptRecord]) -> list[tuple[str, int, str, str, str]]:
    """(module, how many tensors, dtype and sizes of each, bytes of all of them without FP8, with FP8)."""
    found: list[tuple[str, int, str, str, str]] = []
    for name, of in alike(records, lambda record: record.module, lambda record: (record.tensor, record.bytes)):
        before, after = sum(record.before for record in of), sum(record.bytes for record in of)
        found.append((name, len(of), of[0].tensor, f"{before:,}", f"{after:,}"))
    return found


def text(records: Sequence[KeptRecord]) -> str:
    """A table of these rows."""
    body = [(name + repeated(count), *cells) for name, count, *cells in rows(records)]
    return aligned(("kept for backward in FP8", "tensor", "bytes", "in FP8"), body, "<<>>")


def brief_frozen(records: Sequence[FrozenRecord]) -> str:
    """ "frozen weights in FP8 only: 224 of 225, 6,980 MB instead of 13,960"."""
    stored = [record for record in records if not record.reason]
    before, after = (sum(sizes) / 1e6 for sizes in ([x.before for x in stored], [x.bytes for x in stored]))
    return f"frozen weights in FP8 only: {len(stored)} of {len(records)}, {after:,.4g} MB instead of {before:,.4g}"


def text_frozen(records: Sequence[FrozenRecord]) -> str:
    """A table of the frozen weights; equal ones of repeated blocks share a line."""
    body = []
    for name, of in alike(records, lambda record: record.parameter, lambda record: (record.bytes, record.reason)):
        before, after = sum(record.before for record in of), sum(record.bytes for record in of)
        body.append((name + repeated(len(of)), f"{before:,}", f"{after:,}", of[0].reason or "fp8 only"))
    return aligned(("frozen weight", "bytes", "kept", "why"), body, "<>><")
