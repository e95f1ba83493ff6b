"""Frozen weights are kept in FP8 only: the option `frozen="fp8"`."""

from __future__ import annotations

from dataclasses import replace

from ...compilation import Job
from ...extension import Feature, GraphFeature, Pass
from ...frontend.inputs import Inputs
from ...ir.records import HIGH_PRECISION
from . import frozen_weights
from .frozen_weights import FrozenInGraph


class FrozenWeights(Feature):
    name = "frozen"
    passes = {"gather": (Pass("freeze", frozen_weights.freeze),)}  # before the graph is compiled

    def describe(self, job: Job) -> Inputs:
        found = frozen_weights.frozen_in(job)
        job.shared.put(found)
        return replace(job.inputs, frozen=found.stored | found.homes.keys())

    def of_graph(self, job: Job) -> GraphFeature | None:
        return job.shared.get(FrozenInGraph) if job.only != HIGH_PRECISION else None
