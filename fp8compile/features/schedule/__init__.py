"""Rules that decide at some steps only: `during` of a rule and `[schedule]` of a policy, `set_rule`,
`set_precision` and `on_step`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...compilation import Job
from ...config.policy import Policy
from ...extension import Feature
from ...runtime.compiled_graph import CompiledGraph
from . import by_hand
from .graph_of_sets import GraphOfSets


class RulesInTime(Feature):
    name = "schedule"

    def policies(self, policy: Policy) -> Sequence[Policy]:
        """Those of all sets of rules; first those in which the first rule does not keep all of the model in
        high precision."""
        found = [policy.during(active) for active in policy.sets] if _changes(policy) else []
        return sorted(found, key=_in_high_precision)  # stable

    def callable(
        self, job: Job, graph: CompiledGraph, compiled: Callable[[Job], CompiledGraph]
    ) -> Callable[..., Any] | None:
        several = len({*graph.done.alike}) > 1 or job.options.policy.guard is not None
        return GraphOfSets(job, graph, compiled) if several else None

    def active(self, parameter: Tensor, policy: Policy, ahead: int) -> Policy | None:
        return by_hand.active(parameter, policy, ahead) if _changes(policy) else None


def _changes(policy: Policy) -> bool:
    """True if other rules may be active at other steps."""
    return policy.varies or policy.guard is not None


def _in_high_precision(policy: Policy) -> bool:
    """True if its first rule keeps everything in high precision."""
    return bool(policy.rules) and not policy.rules[0].conditions and policy.rules[0].fp8 == "off"
