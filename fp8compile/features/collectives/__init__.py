"""Collectives of a graph that carry FP8: its all-gathers and, with `fp8_all_to_all`, its all-to-alls."""

from __future__ import annotations

from collections.abc import Sequence

from ...compilation import Job
from ...extension import Feature, GraphFeature, Pass
from ...ir.records import GraphReport
from ...passes.joint import Rewritten
from .all_gathers import all_gathers as run_all_gathers
from .all_gathers import move_all_gathers
from .all_to_alls import all_to_alls as run_all_to_alls
from .all_to_alls import move_all_to_alls
from .collectives import Collectives


class _Sent(GraphFeature):
    def decisions(self, done: Rewritten) -> Sequence[str]:
        return [f"{x.kind} of {x.tensor} {x.reason or 'fp8'}" for x in done.results.of(Collectives).records]

    def report(self, job: Job, report: GraphReport, done: Rewritten) -> GraphReport:
        return report.plus(done.results.of(Collectives).records)


class FP8Collectives(Feature):
    name = "collectives"
    passes = {
        "amax_groups": (
            Pass("all_gathers", run_all_gathers, optional=True),  # which all-gathers can carry FP8
            Pass("all_to_alls", run_all_to_alls, optional=True),  # with `fp8_all_to_all`, all-to-alls
        ),
        "substitute": (
            Pass("move_all_gathers", move_all_gathers),
            Pass("move_all_to_alls", move_all_to_alls),
        ),
    }

    def of_graph(self, job: Job) -> GraphFeature:
        return _Sent()
