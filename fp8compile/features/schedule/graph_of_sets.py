"""One Dynamo graph, compiled once for each set of rules that decides otherwise about it.

All compilations plan the slots of all sets (`passes.plan`), and share pages: a switch is free, and no call
after it is cold. Parameters, gradients and optimizer state are the same in all. `runtime.optimizer_steps`
counts steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from ... import compat, process
from ...errors import OptionError
from ...logs import get_logger, say_once
from ...runtime.compiled_graph import CompiledGraph
from ...runtime.optimizer_steps import STEPS, count_steps
from . import by_hand
from .by_hand import Scheduled

if TYPE_CHECKING:
    from ...compilation import Job
    from ...config.policy import Policy

logger = get_logger(__name__)


class GraphOfSets:
    """Serves as the callable of one graph. `main` was compiled under the first of the job's policies."""

    def __init__(self, job: Job, main: CompiledGraph, compiled: Callable[[Job], CompiledGraph]):
        self.policy, self.compiled = job.options.policy, compiled
        weights = main.interface.weights
        # the input whose identity tells which model this is
        self.first = next((i for i in weights if job.given[i].requires_grad), weights[0])
        self.graphs: dict[Policy, CompiledGraph] = {}
        self.known: Any = WeakIdKeyDictionary()  # parameter -> policy of its last call, ticks at that time
        made = {0: main}
        text = "fp8: %s is compiled %d times, for the sets of rules of its policy"
        logger.info(text, job.inputs.root, len({*main.alike} - main.unfit))
        for i, like in enumerate(main.alike):
            if like not in made and like not in main.unfit:
                made[like] = compiled(replace(job, policy=job.policies[like]))
            if like in made:
                self.graphs[job.policies[i]] = made[like]
        why = f"{job.inputs.root} has dynamic sizes, and is compiled at its first call only"
        self.why_not_late = why if _has_dynamic_sizes(job.gm) else ""
        self.given_in_fp8 = bool(main.unfit)
        self.job = replace(job, given=())
        process.of(Scheduled).graphs[self] = True
        count_steps()

    @property
    def late(self) -> str:
        """Why a set of rules that is active now cannot be compiled; "" if there is none."""
        wanted = (self.policy.during(by_hand.active(x, self.policy)) for x in list(self.known))
        return self.why_not_late if any(one not in self.graphs for one in wanted) else ""

    def policy_of(self, parameter: Tensor) -> Policy:
        """That of the model with this parameter now; in a recomputation, that of the call before it."""
        before, ticks = self.known.get(parameter, (None, -1))
        if before is not None and (ticks == STEPS.ticks or compat.autograd.recomputing()):
            return before
        STEPS.lead(parameter)
        active = by_hand.active(parameter, self.policy)
        now = self.policy.during(active)
        if self.given_in_fp8 and now not in self.graphs:
            now = before if before is not None else next(iter(self.graphs))
        if before not in (None, now):
            rules = ", ".join(self.policy.active_names(active)) or "none"
            text = f"fp8: step {STEPS.step_of(parameter)}: rules with a window that are active: {rules}"
            say_once(logger, logging.INFO, text)
            if self.graphs.get(now) is not self.graphs[before]:
                self.graphs[before].rest()
        self.known[parameter] = now, STEPS.ticks
        return now

    def __call__(self, *args: Any) -> Any:
        # DDPOptimizer asks for the outputs' shapes. AOTAutograd answers the first call of each graph with
        # fake outputs: so call all, or the first real call of another one would get them
        if isinstance(args[self.first], compat.FakeTensor):
            return [graph(*args) for graph in dict.fromkeys(self.graphs.values())][0]
        policy = self.policy_of(compat.flat.owners(args, (self.first,))[self.first])
        if policy not in self.graphs:
            self._compile_late(policy, args)
        result = self.graphs[policy](*args)
        if by_hand.BY_HAND.listeners:
            outputs = result if isinstance(result, (tuple, list)) else (result,)
            scalars = [x for x in outputs if isinstance(x, Tensor) and x.dim() == 0 and x.requires_grad]
            if scalars:
                process.of(Scheduled).loss = scalars[-1].detach()
        return result

    def _compile_late(self, policy: Policy, args: tuple[Any, ...]) -> None:
        """For a set of rules that no step has, switched by hand."""
        if self.why_not_late:
            allowed = f"'by hand' for what is switched by hand: {self.why_not_late}"
            raise OptionError.of("during", "a window", allowed)
        began = time.perf_counter()
        policies = *self.job.policies, policy
        made = self.compiled(replace(self.job, given=list(args), policies=policies, policy=policy))
        like = policies[made.alike[-1]]
        self.graphs[policy] = self.graphs.get(like, made)
        took = time.perf_counter() - began
        logger.info("fp8: %s is compiled for a further set of rules, in %.1f s", self.job.inputs.root, took)


def _has_dynamic_sizes(gm: GraphModule) -> bool:
    """Outside of Dynamo, it would be compiled for the sizes of one call."""
    values = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    sizes = [size for x in values for size in (x.shape if isinstance(x, Tensor) else (x,))]
    return any(isinstance(size, torch.SymInt) for size in sizes)
