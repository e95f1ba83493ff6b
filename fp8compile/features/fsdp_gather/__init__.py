"""FSDP2 gathers weights in FP8: `fp8compile.distributed.fp8_all_gather`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...extension import Feature, GraphFeature
from ...frontend.inputs import Inputs
from ...ir.records import TableRecord
from ...logs import get_logger, say_once
from ...runtime.parameters import find
from ...runtime.probe import CastKind
from . import all_gather
from .all_gather import Gathers, Sharded
from .gather_records import gather_records

if TYPE_CHECKING:
    from torch import Tensor

    from ...compilation import Job

logger = get_logger(__name__)


class GatheredWeights(Feature):
    name = "fsdp_gather"

    def describe(self, job: Job) -> Inputs:
        sharded = all_gather.asked(job.given)
        recipes = job.options.policy.possible
        if sharded and any(recipe.name == "delayed" or recipe.built_in.tile for recipe in recipes):
            text = "gathered weights are scaled by their current amax (mxfp8, rowwise: with weight_tiles)"
            say_once(logger, logging.INFO, f"fp8: all-gather: {text}")
        job.shared.put(Sharded(sharded))
        return replace(job.inputs, gathered=frozenset(sharded))

    def of_graph(self, job: Job) -> GraphFeature:
        options = job.options
        return Gathers(job.shared.of(Sharded).names, options.strict, job.policies, options.policy)

    def cast_outside(self, weight: Tensor) -> tuple[CastKind, Callable[[], Mapping[str, float]]] | None:
        entry = find(weight).extras.get(all_gather.Gathered)
        return (entry.cast, entry.numbers) if entry is not None and entry.cast is not None else None

    def records(self, tensors: Sequence[Tensor]) -> Sequence[TableRecord]:
        return gather_records(tensors)

    def reset(self) -> None:
        all_gather.forget()
