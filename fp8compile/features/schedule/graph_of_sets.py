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
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from ... import compat, process
from ...compilation import Job
from ...config.policy import Policy
from ...errors import one_line
from ...logs import get_logger, say_once
from ...runtime.compiled_graph import CompiledGraph
from ...runtime.optimizer_steps import STEPS, count_steps
from . import by_hand
from .by_hand import Scheduled

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
        made, alike, unfit = {0: main}, main.done.alike, main.done.unfit
        if (count := len({*alike} - unfit)) > 1:
            text = "fp8: %s is compiled %d times, for the sets of rules of its policy"
            logger.info(text, job.inputs.root, count)
        for i, like in enumerate(alike):
            if like not in made and like not in unfit:
                made[like] = compiled(replace(job, policy=job.policies[like]))
            if like in made:
                self.graphs[job.policies[i]] = made[like]
        why = f"{job.inputs.root} has dynamic sizes, and is compiled at its first call only"
        self.why_not_late = why if _has_dynamic_sizes(job.gm) else ""
        self.unfit = {job.policies[i] for i in unfit}
        self.job = replace(job, given=())
        process.of(Scheduled).graphs[self] = True
        count_steps()

    @property
    def late(self) -> str:
        """Why a set of rules that is active now cannot be compiled; "" if there is none."""
        wanted = (by_hand.active(x, self.policy) for x in list(self.known))
        return self.why_not_late if any(one not in self.graphs for one in wanted) else ""

    def policy_of(self, parameter: Tensor, args: tuple[Any, ...]) -> Policy:
        """That of the model with this parameter now; in a recomputation, that of the call before it."""
        before, ticks = self.known.get(parameter, (None, -1))
        if before is not None and (ticks == STEPS.ticks or compat.autograd.recomputing()):
            return before
        STEPS.lead(parameter)
        now = by_hand.active(parameter, self.policy)
        if now not in self.graphs and now not in self.unfit:
            self._compile_late(now, args)
        if now in self.unfit:
            now = before if before is not None else next(iter(self.graphs))
        if before not in (None, now):
            always = {
                x for x, rule in zip(self.policy.names, self.policy.timed, strict=True) if not rule.during
            }
            rules = ", ".join(x for x in now.labels if x not in always) or "none"
            text = f"fp8: step {STEPS.step_of(parameter)}: rules with a window that are active: {rules}"
            say_once(logger, logging.INFO, text)
            if self.graphs.get(now) is not self.graphs[before]:
                self.graphs[before].rest()
                self.graphs[now].resume()
        self.known[parameter] = now, STEPS.ticks
        return now

    def __call__(self, *args: Any) -> Any:
        # DDPOptimizer asks for the outputs' shapes. AOTAutograd answers the first call of each graph with
        # fake outputs: so call all, or the first real call of another one would get them
        if isinstance(args[self.first], compat.FakeTensor):
            return [graph(*args) for graph in dict.fromkeys(self.graphs.values())][0]
        policy = self.policy_of(compat.flat.owners(args, (self.first,))[self.first], args)
        result = self.graphs[policy](*args)
        if by_hand.BY_HAND.listeners:
            outputs = result if isinstance(result, (tuple, list)) else (result,)
            scalars = [x for x in outputs if isinstance(x, Tensor) and x.dim() == 0 and x.requires_grad]
            if scalars:
                process.of(Scheduled).loss = scalars[-1].detach()
        return result

    def _compile_late(self, policy: Policy, args: tuple[Any, ...]) -> None:
        """For a set of rules that no step of the policy has. If it cannot be, the rules stay as they are."""
        began, policies, made = time.perf_counter(), (*self.job.policies, policy), None
        why = self.why_not_late
        try:
            if not why:
                made = self.compiled(replace(self.job, given=list(args), policies=policies, policy=policy))
        except Exception as error:
            why = one_line(error)
        if made is None or len(policies) - 1 in made.done.unfit:
            self.unfit.add(policy)
            if why:
                logger.warning("fp8: %s keeps the rules that it has: %s", self.job.inputs.root, why)
            return
        self.graphs[policy] = self.graphs.get(policies[made.done.alike[-1]], made)
        took = time.perf_counter() - began
        logger.info("fp8: %s is compiled for a further set of rules, in %.1f s", self.job.inputs.root, took)


def _has_dynamic_sizes(gm: GraphModule) -> bool:
    """Outside of Dynamo, it would be compiled for the sizes of one call."""
    values = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    sizes = [size for x in values for size in (x.shape if isinstance(x, Tensor) else (x,))]
    return any(isinstance(size, torch.SymInt) for size in sizes)
