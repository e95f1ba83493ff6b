"""Writing FP8 checkpoints for servers: `fp8compile.export`. Graphs say how they multiply by each weight."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from ...compilation import Job
from ...extension import Feature, GraphFeature, Pass
from ...ir.records import HIGH_PRECISION
from ...passes.joint import Rewritten
from . import forwards
from .forwards import Forwards


class ForwardsOfGraph(GraphFeature):
    """How the fprops of one graph cast, under the first of its policies. `learns`: the graph has something to
    differentiate."""

    found, learns = Forwards(), False

    def after(self, job: Job, done: Rewritten) -> None:
        if job.policy == job.policies[0]:
            self.found = done.results.of(Forwards)
        self.learns = job.inputs.training and job.inputs.grad and not done.inference

    def first_call(self, args: Sequence[Any], owners: Mapping[int, weakref.ref], record: int | None) -> None:
        forwards.know(owners, self.found.by_input, self.learns)


class Export(Feature):
    name = "export"
    passes = {"amax_groups": (Pass("forwards", forwards.forwards),)}  # how the fprop of each weight casts

    def of_graph(self, job: Job) -> GraphFeature | None:
        return job.shared.of(ForwardsOfGraph) if job.only != HIGH_PRECISION else None

    def reset(self) -> None:
        forwards.forget()
