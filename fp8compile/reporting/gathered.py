"""What FSDP2 gathers for each parameter, as text: in FP8, or in high precision and why."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.records import FP8, GatherRecord
from .layers import alike, repeated


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
    from tabulate import tabulate

    body = [(name + repeated(count), dtype, reason) for name, dtype, reason, count in rows(records)]
    return tabulate(body, ("all-gather in training", "as", "why not FP8"), tablefmt="simple")
