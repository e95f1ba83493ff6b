"""What the report of a model says of the weights that FSDP2 gathers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...codegen.text import dtype_name
from ...frontend.inputs import plain
from ...ir.records import FP8, HIGH_PRECISION, TableRecord
from ...reporting.record_tables import WHY
from ...runtime.parameters import find
from .all_gather import Gathered
from .gathered_scales import form_of, format_of


@dataclass(frozen=True)
class GatherRecord(TableRecord):
    """What FSDP2 gathers in training for one parameter, as `dtype`, where `fp8_all_gather` was asked for.
    `reason`: why it is not FP8, "" if it is."""

    key, of_model, titles, sides = "gathered", True, ("all-gather in training", "as", WHY), "<<<"
    about = (
        "What each all-gather of FSDP2 moves for a parameter. A forward without gradients "
        "gathers in high precision."
    )

    parameter: str
    gathered: Literal["fp8", "high_precision"]
    dtype: str
    reason: str = ""
    matrix: bool = True

    @property
    def like(self) -> Hashable:
        return self.dtype, self.reason

    @classmethod
    def cells(cls, alike: Sequence[GatherRecord]) -> tuple[str, ...]:
        return alike[0].dtype, alike[0].reason

    @classmethod
    def brief(cls, records: Sequence[GatherRecord]) -> str:
        """ "all-gather: 28 of 31 matrices in FP8"."""
        fp8 = sum(record.gathered == FP8 for record in records)
        return f"all-gather: {fp8} of {sum(record.matrix for record in records)} matrices in FP8"


def gather_records(tensors: Iterable[Any]) -> list[GatherRecord]:
    """What is gathered for each of these parameters, where `fp8_all_gather` was asked for."""
    found = [find(tensor).extras.get(Gathered) for tensor in tensors]
    entries = {id(entry): entry for entry in found if entry is not None}
    return [
        GatherRecord(
            parameter=plain(entry.parameter.name),
            gathered=FP8 if entry.code else HIGH_PRECISION,
            dtype=format_of(form_of(entry.code)).name if entry.code else dtype_name(entry.parameter.dtype),
            reason="" if entry.code else entry.reason,
            matrix=entry.parameter.shard.dim() == 2,
        )
        for entry in entries.values()
    ]
