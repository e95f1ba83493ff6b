"""Frozen weights are kept in FP8 only: the option `frozen="fp8"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import Retrace
from ...extension import Feature, GraphFeature, Pass
from ...ir.inputs import Inputs
from ...ir.records import HIGH_PRECISION, GraphReport
from ...passes.joint import Joint, Rewritten
from . import frozen_weights
from .frozen_weights import Candidates, Home

if TYPE_CHECKING:
    from ...compilation import Job


@dataclass(frozen=True)
class Known:
    """The frozen weights of a Dynamo graph, for both of its phases."""

    candidates: Candidates
    homes: Mapping[int, Home]


class FrozenInGraph(GraphFeature):
    """The frozen weights of one graph. `homes`: where the possible ones live."""

    def __init__(self, candidates: Candidates, homes: Mapping[int, Home], observes: bool):
        self.candidates, self.homes, self.observes = candidates, homes, observes
        self.warm = not candidates.asked

    def before(self, job: Job, joint: Joint) -> None:
        joint.freezable = self.candidates.possible
        joint.extras.put(Freezing(self.homes, job.given, job.inputs.root))

    def report(self, job: Job, report: GraphReport, done: Rewritten) -> GraphReport:
        return replace(report, frozen=frozen_weights.records(job.inputs, self.candidates, done.gatherable))

    def after(self, job: Job, done: Rewritten) -> None:
        self.homes = {}  # they hold modules
        if not self.observes:
            frozen_weights.check(job.inputs, self.candidates, done.gatherable, job.warn)


@dataclass(frozen=True)
class Freezing:
    """What `freeze` needs: where the possible weights live, the inputs that Dynamo gave, and the name of the graph."""

    homes: Mapping[int, Home]
    given: Sequence[Any]
    root: str


def freeze(joint: Joint) -> int:
    """Stop where the graph reads weights that can be kept in FP8 only: they become so, and the graph is traced again."""
    known = joint.extras.get(Freezing)
    found = frozen_weights.freezable(joint) if known is not None else {}
    if known is not None and found:
        raise Retrace(partial(frozen_weights.freeze, found, known.homes, known.given, known.root))
    return 0


class FrozenWeights(Feature):
    name = "frozen"
    passes = {"gather": (Pass("freeze", freeze),)}  # weights that become FP8 before the graph is compiled

    def describe(self, job: Job) -> Inputs:
        asked = job.learns and job.only is None and any(x.frozen == "fp8" for x in job.options.policy.possible)
        found, homes = frozen_weights.candidates(job.gm, job.given, job.inputs, asked)
        job.shared.put(Known(found, homes))
        return replace(job.inputs, frozen=found.stored | found.possible)

    def of_graph(self, job: Job, phase: str) -> GraphFeature:
        known = job.shared.get(Known)
        assert known is not None
        return FrozenInGraph(known.candidates, known.homes, phase == HIGH_PRECISION)
