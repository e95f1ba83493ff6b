"""What is gathered in FP8, or in high precision and why, as text: by FSDP2 for each parameter, and inside of graphs."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.records import FP8, CollectiveRecord, GatherRecord
from .columns import aligned
from .layer_rows import alike, repeated


def brief(records: Sequence[GatherRecord]) -> str:
    """ "all-gather: 28 of 31 matrices in FP8"."""
    fp8 = sum(record.gathered == FP8 for record in records)
    return f"all-gather: {fp8} of {sum(record.matrix for record in records)} matrices in FP8"


def rows(records: Sequence[GatherRecord]) -> list[tuple[str, str, str, int]]:
    """(parameter, what is gathered, why not FP8, how many). Parameters whose names differ in numbers only share a row:
    `h.0-11.fc.weight`."""
    groups = alike(records, lambda record: record.parameter, lambda record: (record.dtype, record.reason))
    return [(name, of[0].dtype, of[0].reason, len(of)) for name, of in groups]


def text(records: Sequence[GatherRecord]) -> str:
    """A table of these rows."""
    body = [(name + repeated(count), dtype, reason) for name, dtype, reason, count in rows(records)]
    return aligned(("all-gather in training", "as", "why not FP8"), body)


def rows_of_graph(records: Sequence[CollectiveRecord]) -> list[tuple[str, int, str, str, str, str]]:
    """(matmul and role, how many, kind, bytes that a rank sends of all of them without FP8, with FP8, why not FP8)."""
    found: list[tuple[str, int, str, str, str, str]] = []
    for name, of in alike(records, lambda record: record.tensor, lambda record: (record.kind, record.bytes, record.reason)):
        before, sent = sum(record.before for record in of), sum(record.bytes for record in of)
        found.append((name, len(of), of[0].kind, f"{before:,}", f"{sent:,}", of[0].reason))
    return found


def in_graph(records: Sequence[CollectiveRecord]) -> str:
    """A table of these rows."""
    body = [(name + repeated(count), *cells) for name, count, *cells in rows_of_graph(records)]
    return aligned(("read from other ranks", "by", "bytes a rank", "with FP8", "why not FP8"), body, "<<>><")
