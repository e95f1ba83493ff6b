"""What is gathered in FP8, or in high precision and why, as text: by FSDP2 for each parameter, and inside of graphs."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.records import FP8, AllGatherRecord, GatherRecord
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


def in_graph(records: Sequence[AllGatherRecord]) -> str:
    """A table. Bytes are those of all tensors of a row."""
    from tabulate import tabulate

    body = []
    for name, of in alike(records, lambda record: record.tensor, lambda record: (record.bytes, record.reason)):
        sizes = (sum(record.before for record in of), sum(record.bytes for record in of))
        body.append((name + repeated(len(of)), *(f"{size:,}" for size in sizes), of[0].reason))
    head = ("all-gathers of the graph", "bytes a rank", "with FP8", "why not FP8")
    return tabulate(body, head, tablefmt="simple", disable_numparse=True, colalign=("left", "right", "right", "left"))
