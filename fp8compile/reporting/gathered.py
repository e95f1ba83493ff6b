"""What FSDP2 gathers for each parameter, as text: in FP8, or in high precision and why."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.records import FP8, GatherRecord
from .layers import alike, repeated


def brief(records: Sequence[GatherRecord]) -> str:
    """ "all-gather: 28 of 31 matrices in FP8"."""
    fp8 = sum(record.gathered == FP8 for record in records)
    return f"all-gather: {fp8} of {sum(record.matrix for record in records)} matrices in FP8"


def text(records: Sequence[GatherRecord]) -> str:
    """A table. Parameters whose names differ in numbers only share a row: `h.0-11.fc.weight`."""
    from tabulate import tabulate

    groups = alike(records, lambda record: record.parameter, lambda record: (record.dtype, record.reason))
    body = [(name + repeated(len(of)), of[0].dtype, of[0].reason) for name, of in groups]
    return tabulate(body, ("all-gather in training", "as", "why not FP8"), tablefmt="simple")
