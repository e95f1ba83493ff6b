"""FSDP2 gathers weights in FP8: `fp8compile.distributed.fp8_all_gather`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from ...codegen.text import dtype_name
from ...compilation import Job
from ...extension import Feature, GraphFeature
from ...frontend.inputs import Inputs, plain
from ...ir.records import FP8, HIGH_PRECISION, TableRecord
from ...logs import get_logger, say_once
from ...reporting.record_tables import WHY
from ...runtime.parameters import find
from ...runtime.probe import CastKind
from . import all_gather
from .all_gather import Gathers
from .gathered_scales import form_of, format_of

logger = get_logger(__name__)


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

    @classmethod
    def cells(cls, alike: Sequence[GatherRecord]) -> tuple[str, ...]:
        return alike[0].dtype, alike[0].reason

    @classmethod
    def brief(cls, records: Sequence[GatherRecord]) -> str:
        """ "all-gather: 28 of 31 matrices in FP8"."""
        fp8 = sum(record.gathered == FP8 for record in records)
        return f"all-gather: {fp8} of {sum(record.matrix for record in records)} matrices in FP8"


class GatheredWeights(Feature):
    name = "fsdp_gather"

    def describe(self, job: Job) -> Inputs:
        sharded = all_gather.asked(job.given)
        recipes = job.options.policy.possible
        if sharded and any(recipe.name == "delayed" or recipe.built_in.tile for recipe in recipes):
            text = "gathered weights are scaled by their current amax (mxfp8, rowwise: with weight_tiles)"
            say_once(logger, logging.INFO, f"fp8: all-gather: {text}")
        return replace(job.inputs, gathered=sharded)

    def of_graph(self, job: Job) -> GraphFeature:
        return Gathers(job.inputs.gathered, job.options)

    def cast_outside(self, weight: Tensor) -> tuple[CastKind, Callable[[], Mapping[str, float]]] | None:
        entry = find(weight).extras.get(all_gather.Gathered)
        return (entry.cast, entry.numbers) if entry is not None and entry.cast is not None else None

    def records(self, tensors: Sequence[Tensor]) -> Sequence[TableRecord]:
        found = [find(tensor).extras.get(all_gather.Gathered) for tensor in tensors]
        records = []
        for entry in {id(entry): entry for entry in found if entry is not None}.values():
            name, matrix = plain(entry.parameter.name), entry.parameter.shard.dim() == 2
            if entry.code:
                dtype = format_of(form_of(entry.code)).name
                records.append(GatherRecord(name, FP8, dtype, "", matrix))
            else:
                dtype = dtype_name(entry.parameter.dtype)
                records.append(GatherRecord(name, HIGH_PRECISION, dtype, entry.reason, matrix))
        return records

    def reset(self) -> None:
        all_gather.forget()
