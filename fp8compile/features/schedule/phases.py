"""Phases of a training run, without a new compilation: high precision, then FP8, then high precision again.

A graph whose policy has a `[schedule]` is compiled twice when it is first met: for FP8, and for high
precision. The second also computes the amaxes of all tensors that FP8 would quantize. Each call runs one of
the two. Both move the same scaling state, so FP8 begins with the warm-up's histories, and a switch is free.
Parameters, gradients and optimizer state are the same in both. `runtime.optimizer_steps` counts steps.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ... import compat, process
from ...config.policy import Schedule
from ...config.settings import integer
from ...errors import OptionError
from ...extension import Feature
from ...ir.gathered_weight import GatheredWeight
from ...ir.records import FP8, HIGH_PRECISION
from ...logs import get_logger, say_once
from ...runtime.ledger import Ledger
from ...runtime.optimizer_steps import STEPS, count_steps, each_step, parameters_of
from ...runtime.parameters import all_records, find, record_of

if TYPE_CHECKING:
    from ...compilation import Job
    from ...runtime.compiled_graph import CompiledGraph

logger = get_logger(__name__)

PRECISIONS = {"bf16": HIGH_PRECISION, FP8: FP8, HIGH_PRECISION: HIGH_PRECISION}  # the last one: as in 0.2
Callback = Callable[[int, "float | None"], "str | None"]


@dataclass(eq=False)
class ByHand:
    """The phase of a parameter's model set by hand. "": the schedule decides; None: the process's phase."""

    phase: str | None = None


class _Phases:
    """Facts of this process's training; that of one parameter is in its record."""

    def __init__(self) -> None:
        self.phase: str | None = None  # set by hand, for all models
        self.listeners = 0  # callbacks of `on_step`


class Scheduled:
    """What this process knows of graphs with two phases."""

    def __init__(self) -> None:
        self.graphs: Any = WeakKeyDictionary()
        self.loss: Tensor | None = None  # the last scalar that one returned, for callbacks of `on_step`


_phases = _Phases()


def set_precision(precision: str | None, model: nn.Module | None = None) -> None:
    """Run in "fp8" or in "bf16" from the next call on, whatever the schedule says; None goes back to it.

    "bf16" is what the model computes in without FP8: its own dtype, or that of autocast. For one model, or
    for all of them. It acts on graphs whose policy has a `[schedule]` (which may be empty); all others were
    compiled for FP8 alone. OptionError (a ValueError) for another name."""
    phase = _checked(precision)
    if model is None:
        _phases.phase = phase
        for _, record in all_records():
            record.extras.pop(ByHand)
    for parameter in parameters_of(model):
        record_of(parameter).extras.put(ByHand(phase or ""))
    STEPS.ticks += 1
    if phase is not None and process.of(Ledger) and not process.of(Scheduled).graphs:
        message = 'set_precision: no compiled graph has phases; give its policy a schedule: {"schedule": {}}'
        say_once(logger, logging.WARNING, message)


def _checked(precision: str | None, of: str = "") -> str | None:
    """The phase of a precision."""
    if precision is not None and (not isinstance(precision, str) or precision not in PRECISIONS):
        raise OptionError.of("precision", precision, f"'fp8', 'bf16' or None{of}")
    return None if precision is None else PRECISIONS[precision]


def on_step(callback: Callback, model: nn.Module | None = None, every: int = 1) -> Callable[[], None]:
    """Call `callback(step, loss)` after every `every`-th optimizer step (of the model's optimizer). A
    precision that it returns is set as by `set_precision`; None changes nothing. Returns a function that
    removes the callback.

    `loss` is the last scalar that a graph with phases returned. It is None if no graph did, because the loss
    is computed outside of the compiled code or after a graph break. Reading it waits for the device. Each
    rank of a distributed job sees its own loss: reduce it before deciding."""
    if not callable(callback):
        raise OptionError.of("callback", callback, "callable as callback(step, loss)")
    integer("every", every, 1)
    watched = weakref.ref(model) if model is not None else lambda: None

    def stepped(step: int) -> None:
        loss = process.of(Scheduled).loss
        precision = callback(step, float(loss) if loss is not None else None)
        if precision is not None:
            _checked(precision, " (the callback's return value)")
            set_precision(precision, watched())

    remove = each_step(stepped, model, every)
    _phases.listeners += 1
    return remove


def _phase(parameter: Tensor, schedule: Schedule, ahead: int = 0) -> str:
    """The phase of the model that has this parameter, so many optimizer steps from now."""
    by_hand = find(parameter).extras.get(ByHand)
    step = STEPS.step_of(parameter) + ahead
    cooling = schedule.cooldown_at is not None and step >= schedule.cooldown_at
    scheduled = HIGH_PRECISION if step < schedule.warmup_steps or cooling else FP8
    return (_phases.phase if by_hand is None else by_hand.phase) or scheduled


class ScheduledGraph:
    """One Dynamo graph in both precisions; serves as its callable."""

    def __init__(self, graphs: Mapping[str, CompiledGraph], schedule: Schedule, first: int):
        self.graphs, self.schedule = dict(graphs), schedule
        self.first = first  # the input whose identity tells which model this is
        self.known: Any = WeakIdKeyDictionary()  # parameter -> phase of its last call, ticks at that time
        process.of(Scheduled).graphs[self] = True
        count_steps()

    def phase(self, parameter: Tensor) -> str:
        """The phase of the model that has this parameter; in a recomputation, that of the call before it."""
        before, ticks = self.known.get(parameter, (None, -1))
        if before is not None and (ticks == STEPS.ticks or compat.autograd.recomputing()):
            return before
        STEPS.lead(parameter)
        phase = _phase(parameter, self.schedule)
        if before not in (None, phase):
            step = STEPS.step_of(parameter)
            say_once(logger, logging.INFO, f"fp8: step {step}: from {before} to {phase}".replace("_", " "))
        self.known[parameter] = (phase, STEPS.ticks)
        return phase

    def __call__(self, *args: Any) -> Any:
        # DDPOptimizer asks for the outputs' shapes. AOTAutograd answers the first call of each graph with
        # fake outputs: so call both, or the first real call of the other one would get them
        if isinstance(args[self.first], compat.FakeTensor):
            return [graph(*args) for graph in self.graphs.values()][0]
        result = self.graphs[self.phase(compat.flat.owners(args, (self.first,))[self.first])](*args)
        if _phases.listeners:
            outputs = result if isinstance(result, (tuple, list)) else (result,)
            scalars = [x for x in outputs if isinstance(x, Tensor) and x.dim() == 0 and x.requires_grad]
            if scalars:
                process.of(Scheduled).loss = scalars[-1].detach()
        return result


class Phases(Feature):
    name = "schedule"

    def callable(
        self, job: Job, graph: CompiledGraph, compiled: Callable[[str], CompiledGraph]
    ) -> Callable[..., Any] | None:
        schedule, weights = job.options.policy.schedule, graph.interface.weights
        if schedule is None:
            return None
        observing = graph
        if not any(isinstance(x, GatheredWeight) for x in job.given):  # gathered ones are for FP8 phases
            text = "fp8: %s is compiled twice, for the FP8 and the high-precision phases of the schedule"
            logger.info(text, job.inputs.root)
            observing = compiled(HIGH_PRECISION)  # one entry in the ledger for both, whichever runs first
        first = next((i for i in weights if job.given[i].requires_grad), weights[0])
        return ScheduledGraph({FP8: graph, HIGH_PRECISION: observing}, schedule, first)

    def in_fp8(self, parameter: Tensor, schedule: Schedule) -> bool:
        return all(_phase(parameter, schedule, ahead) == FP8 for ahead in (0, 1))
