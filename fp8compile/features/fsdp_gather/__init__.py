"""FSDP2 gathers weights in FP8: `fp8compile.distributed.fp8_all_gather`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...extension import Feature, GraphFeature
from ...ir.inputs import Inputs
from ...ir.records import HIGH_PRECISION
from ...logs import get_logger, say_once
from ...passes.joint import Rewritten
from ...runtime.parameters import find
from ...runtime.probe import CastKind, Look
from . import all_gather
from .all_gather import Gathers

if TYPE_CHECKING:
    import weakref

    from torch import Tensor

    from ...compilation import Job

logger = get_logger(__name__)


class GathersOfGraph(GraphFeature):
    """What FSDP2 gathers for one graph. `sharded`: names of the weights that may be gathered in FP8, by input."""

    def __init__(self, sharded: Mapping[int, str], gathers: Gathers):
        self.sharded, self.gathers, self.warm = sharded, gathers, not sharded

    def after(self, job: Job, done: Rewritten) -> None:
        self.gathers.found = all_gather.of_graph(done.gatherable, self.sharded, job.warn)

    def meet(self, args: Sequence[Any], owners: Mapping[int, weakref.ref], record: int | None) -> None:
        self.gathers.learn(args, record)

    def measure(self, args: Sequence[Any], look: Look) -> None:
        self.gathers.measure(args, look)


class _Observing(GathersOfGraph):
    """The same in high precision: what may be gathered is known before the first FP8 phase."""

    def after(self, job: Job, done: Rewritten) -> None:
        """The FP8 graph has said it."""


class GatheredWeights(Feature):
    name = "fsdp_gather"

    def describe(self, job: Job) -> Inputs:
        sharded = all_gather.asked(job.given)
        if sharded and any(recipe.name not in ("tensorwise", "blockwise") for recipe in job.options.policy.possible):
            text = "gathered weights are scaled by their current amax (mxfp8, rowwise: with weight_tiles)"
            say_once(logger, logging.INFO, f"fp8: all-gather: {text}")
        gathers = Gathers({}, job.options.strict, job.options.policy.schedule)
        job.shared.put(GathersOfGraph(sharded, gathers))
        return replace(job.inputs, gathered=frozenset(sharded))

    def of_graph(self, job: Job, phase: str) -> GraphFeature:
        known = job.shared.get(GathersOfGraph)
        assert known is not None
        return known if phase != HIGH_PRECISION else _Observing(known.sharded, known.gathers)

    def cast_outside(self, weight: Tensor) -> tuple[CastKind, Callable[[], Mapping[str, float]]] | None:
        entry = find(weight).extras.get(all_gather.Gathered)
        return (entry.cast, entry.numbers) if entry is not None and entry.cast is not None else None

    def records(self, tensors: Sequence[Tensor]) -> Mapping[str, Sequence[Any]]:
        return {"gathered": all_gather.gather_records(tensors)}

    def reset(self) -> None:
        all_gather.forget()
