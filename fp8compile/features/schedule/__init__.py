"""Phases of high precision and of FP8: `[schedule]` of a policy, `set_precision` and `on_step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...extension import Feature
from ...ir.gathered_weight import GatheredWeight
from ...ir.records import FP8, HIGH_PRECISION
from ...logs import get_logger
from . import phases
from .phases import ScheduledGraph

if TYPE_CHECKING:
    from torch import Tensor

    from ...compilation import Job
    from ...config.policy import Schedule
    from ...runtime.compiled_graph import CompiledGraph

logger = get_logger(__name__)


class Phases(Feature):
    name = "schedule"

    def callable(self, job: Job, graph: CompiledGraph, compiled: Callable[[str], CompiledGraph]) -> Callable[..., Any] | None:
        schedule, weights = job.options.policy.schedule, graph.interface.weights
        if schedule is None:
            return None
        observing = graph
        if not any(isinstance(x, GatheredWeight) for x in job.given):  # those that were gathered in FP8 are for FP8 phases
            root = job.inputs.root
            logger.info("fp8: %s is compiled twice, for the FP8 and the high-precision phases of the schedule", root)
            observing = compiled(HIGH_PRECISION)  # one entry in the ledger for both, whichever is called first
        first = next((i for i in weights if job.given[i].requires_grad), weights[0])
        return ScheduledGraph({FP8: graph, HIGH_PRECISION: observing}, schedule, first)

    def in_fp8(self, parameter: Tensor, schedule: Schedule) -> bool:
        return phases.stays_in_fp8(parameter, schedule)
