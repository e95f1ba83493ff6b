"""Large tensors are kept for backward in FP8: the option `save="fp8"`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ... import process
from ...compilation import Job
from ...extension import Feature, GraphFeature, Pass
from ...ir.records import HIGH_PRECISION
from ...logs import get_logger
from ...passes.joint import Joint, Partitioned
from ...passes.pipeline import skipped
from ...runtime.ledger import Ledger
from .save import KeptRecord, SavedInFP8
from .save import save as run_save

logger = get_logger(__name__)


class _SavedOfGraph(GraphFeature):
    partitions, warm = True, False

    def before(self, job: Job, joint: Joint) -> None:
        joint.saves = "save" not in skipped()

    def partitioned(self, job: Job, halves: Partitioned, record: int | None) -> None:
        saved = halves.extras.of(SavedInFP8)
        if saved.records:
            logger.info("fp8: %s: %s", job.inputs.root, KeptRecord.brief(saved.records))
        if record is not None:
            records: list[Any] = [*saved.records, *saved.unkept]
            named = [replace(x, module=job.inputs.named(x.module)) for x in records]
            process.of(Ledger).extend(record, named)


class SavedTensors(Feature):
    name = "save"
    passes = {"partitioned": (Pass("save", run_save, optional=True),)}

    def of_graph(self, job: Job) -> GraphFeature | None:
        asked = job.policy.save == "fp8" and job.inputs.training and job.only != HIGH_PRECISION
        return _SavedOfGraph() if asked else None
