"""Phases of a training run: high precision first, then FP8, then high precision again, without a new compilation.

A graph whose policy has a `[schedule]` is compiled twice when it is first met: for FP8, and for high precision. The second also
computes the amaxes of all tensors that FP8 would quantize. Each call runs one of the two. Both move the same scaling state, so
FP8 begins with the histories of the warm-up, and a switch costs nothing. Parameters, gradients and optimizer state are the same
in both.

The step is the number of `optimizer.step()` calls that the graph's parameters have seen, as torch's own hook on optimizers
reports them: forwards that accumulate gradients, recomputations and evaluations do not count. `set_step` sets the step if the
training loop has no `torch.optim.Optimizer`, steps inside of a CUDA graph, or starts from a checkpoint.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from .. import compat
from ..config.policy import Schedule
from ..config.settings import integer
from ..errors import OptionError
from ..ir.records import FP8, HIGH_PRECISION
from ..logs import get_logger, say_once
from .ledger import LEDGER
from .parameters import all_records, find, record_of

if TYPE_CHECKING:
    from .compiled_graph import CompiledGraph

logger = get_logger(__name__)

PRECISIONS = {"bf16": HIGH_PRECISION, FP8: FP8, HIGH_PRECISION: HIGH_PRECISION}  # the last one: its name in version 0.2
Callback = Callable[[int, "float | None"], "str | None"]


@dataclass(eq=False)
class Steps:
    """The steps of one optimizer: how many it took, and its parameters (by identity)."""

    count: int = 0
    parameters: frozenset[int] = frozenset()


@dataclass(eq=False)
class _Watch:
    """A callback, with the model that it is for (a weak reference; None: for all) and the last step that it was called for."""

    callback: Callback
    every: int
    model: Any
    reads_loss: bool
    last: int = -1

    def due(self, step: int, parameters: frozenset[int]) -> bool:
        if step == self.last or step % self.every:
            return False
        if self.model is None:
            return True
        model = self.model()
        return model is not None and any(id(p) in parameters for p in model.parameters())


class _State:
    """The state of this process; that of one parameter is in its record. Optimizers are held weakly."""

    def __init__(self) -> None:
        self.steps: Any = WeakKeyDictionary()  # optimizer -> Steps
        self.ticks = 0  # steps of all optimizers, and settings by hand; a phase found at an earlier tick is looked up again
        self.phase: str | None = None  # set by hand, for all models
        self.offset = 0  # added to the steps that were counted
        self.callbacks: dict[int, _Watch] = {}
        self.loss: Tensor | None = None  # the last scalar that a scheduled graph returned
        self.scheduled: Any = WeakKeyDictionary()  # graphs with two phases
        self.hook: Any = None

    def listen(self) -> None:
        if self.hook is None:
            self.hook = register_optimizer_step_post_hook(_stepped)

    def counted(self, parameter: Tensor) -> int:
        """How many optimizer steps this parameter has seen: the largest count of the optimizers that have it, and of the last
        one that had it. If none ever had it (sharded, frozen): the largest count of the optimizers without a parameter by which
        some graph finds its phase. If there is none of these: the largest count of all, or 0 if it requires gradients."""
        had = find(parameter).steps
        counting = [steps for steps in had if steps is had[-1] or id(parameter) in steps.parameters]
        if not counting:
            every = list(self.steps.values())
            leading = [key for key, record in all_records() if record.leads]
            counting = [steps for steps in every if steps.parameters.isdisjoint(leading)]
            counting = counting or ([] if parameter.requires_grad else every)
        return max((steps.count for steps in counting), default=0)

    def offset_of(self, parameter: Tensor) -> int:
        offset = find(parameter).offset
        return self.offset if offset is None else offset


_state = _State()


def set_precision(precision: str | None, model: nn.Module | None = None) -> None:
    """Run in "fp8" or in "bf16" from the next call on, whatever the schedule says; None goes back to it.

    "bf16" is what the model computes in without FP8: its own dtype, or that of autocast. For one model, or for all of them. It
    acts on graphs whose policy has a `[schedule]` (which may be empty); all others were compiled for FP8 alone. OptionError (a
    ValueError) for another name.
    """
    phase = _checked(precision)
    if model is None:
        _state.phase = phase
        for _, record in all_records():
            record.phase = None
    for parameter in _parameters(model):
        record_of(parameter).phase = phase or ""
    _state.ticks += 1
    if phase is not None and LEDGER and not _state.scheduled:
        message = 'set_precision: no compiled graph has phases; give its policy a schedule: {"schedule": {}}'
        say_once(logger, logging.WARNING, message)


def _checked(precision: str | None, of: str = "") -> str | None:
    """The phase of a precision."""
    if precision is not None and (not isinstance(precision, str) or precision not in PRECISIONS):
        raise OptionError.of("precision", precision, f"'fp8', 'bf16' or None{of}")
    return None if precision is None else PRECISIONS[precision]


def set_step(step: int, model: nn.Module | None = None) -> None:
    """Set the number of optimizer steps that were taken: after loading a checkpoint, or where steps cannot be counted."""
    integer("step", step, 0)
    if model is None:
        _state.offset = step - max((steps.count for steps in _state.steps.values()), default=0)
        for _, record in all_records():
            record.offset = record.begins = None
    for parameter in _parameters(model):
        record = record_of(parameter)
        record.offset = step - _state.counted(parameter)
        record.begins = None if record.steps else step
    _state.ticks += 1


def on_step(callback: Callback, model: nn.Module | None = None, every: int = 1) -> Callable[[], None]:
    """Call `callback(step, loss)` after every `every`-th optimizer step (of the model's optimizer). A precision that it returns
    is set as by `set_precision`; None changes nothing. Returns a function that removes the callback.

    `loss` is the last scalar that a graph with phases returned. It is None if no graph did, because the loss is computed
    outside of the compiled code or after a graph break. Reading it waits for the device. Each rank of a distributed job sees
    its own loss: reduce it before deciding.
    """
    if not callable(callback):
        raise OptionError.of("callback", callback, "callable as callback(step, loss)")
    integer("every", every, 1)
    return _call_back(callback, model, every)


def each_step(callback: Callable[[int], None], model: nn.Module) -> Callable[[], None]:
    """As `on_step` for every step, for a callback that needs no loss (reading it waits for the device) and returns nothing."""

    def step_only(step: int, _: float | None) -> None:
        callback(step)

    return _call_back(step_only, model, reads_loss=False)


def _call_back(callback: Any, model: nn.Module | None, every: int = 1, reads_loss: bool = True) -> Callable[[], None]:
    _state.listen()
    _parameters(model)  # TypeError if it is no model
    number = max(_state.callbacks, default=-1) + 1
    _state.callbacks[number] = _Watch(callback, every, weakref.ref(model) if model is not None else None, reads_loss)
    return lambda: (_state.callbacks.pop(number, None), None)[1]


def _phase(parameter: Tensor, schedule: Schedule, ahead: int = 0) -> str:
    """The phase of the model that has this parameter, so many optimizer steps from now."""
    record = find(parameter)
    step = _state.counted(parameter) + _state.offset_of(parameter) + ahead
    cooling = schedule.cooldown_at is not None and step >= schedule.cooldown_at
    scheduled = HIGH_PRECISION if step < schedule.warmup_steps or cooling else FP8
    return (_state.phase if record.phase is None else record.phase) or scheduled


def stays_in_fp8(parameter: Tensor, schedule: Schedule) -> bool:
    """Are this step and the next one in FP8, as far as is known?"""
    return all(_phase(parameter, schedule, ahead) == FP8 for ahead in (0, 1))


def steps_of(model: nn.Module) -> int:
    """How many optimizer steps a model has seen, as far as is known: those of the first parameter that an optimizer had."""
    parameters = _parameters(model)
    parameter = next((p for p in parameters if find(p).steps), next(iter(parameters), None))
    return 0 if parameter is None else _state.counted(parameter) + _state.offset_of(parameter)


def _parameters(model: nn.Module | None) -> Sequence[nn.Parameter]:
    if model is None:
        return ()
    if not callable(getattr(model, "parameters", None)):
        raise TypeError(f"expected a torch.nn.Module or None, not {type(model).__name__}")
    return list(model.parameters())


@torch._disable_dynamo
def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    every = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = frozenset(map(id, every))
    steps = _state.steps.get(optimizer)
    if steps is None or steps.parameters != parameters:
        records = [record_of(p) for p in every]
        if steps is None:  # a second optimizer of a model continues the count of the first one
            before = max((had.count for record in records for had in record.steps), default=0)
            steps = _state.steps[optimizer] = Steps(before)
        alive = list(_state.steps.values())
        for record in records:
            if record.begins is not None:  # until now it followed the optimizers of other models
                record.offset, record.begins = record.begins - steps.count, None
            record.steps = [had for had in record.steps if had is not steps and had in alive] + [steps]
        steps.parameters = parameters
    steps.count += 1
    _state.ticks += 1
    parameter = next(iter(every), None)
    step = steps.count + (_state.offset if parameter is None else _state.offset_of(parameter))
    for watch in list(_state.callbacks.values()):
        if not watch.due(step, parameters):
            continue
        watch.last = step  # where several optimizers take one step, the callback is called once
        precision = watch.callback(step, float(_state.loss) if watch.reads_loss and _state.loss is not None else None)
        if precision is not None:
            _checked(precision, " (the callback's return value)")
            set_precision(precision, watch.model() if watch.model is not None else None)


class ScheduledGraph:
    """One Dynamo graph in both precisions; serves as its callable."""

    def __init__(self, graphs: Mapping[str, CompiledGraph], schedule: Schedule, first: int):
        self.graphs, self.schedule = dict(graphs), schedule
        self.first = first  # the input whose identity tells which model this is
        self.known: Any = WeakIdKeyDictionary()  # parameter -> phase of its last call, and the ticks when that was looked up
        _state.scheduled[self] = True
        _state.listen()

    def phase(self, parameter: Tensor) -> str:
        """The phase of the model that has this parameter. A recomputation gets the phase of the call before it."""
        before, ticks = self.known.get(parameter, (None, -1))
        if before is not None and (ticks == _state.ticks or compat.recomputing()):
            return before
        record_of(parameter).leads = True
        phase = _phase(parameter, self.schedule)
        if before not in (None, phase):
            step = _state.counted(parameter) + _state.offset_of(parameter)
            say_once(logger, logging.INFO, f"fp8: step {step}: from {before} to {phase}".replace("_", " "))
        self.known[parameter] = (phase, _state.ticks)
        return phase

    def __call__(self, *args: Any) -> Any:
        # DDPOptimizer asks for the outputs' shapes. AOTAutograd answers the first call of each graph with fake outputs: so call
        # both, or the first real call of the other one would get them
        if isinstance(args[self.first], compat.FakeTensor):
            return [graph(*args) for graph in self.graphs.values()][0]
        result = self.graphs[self.phase(compat.owners(args, (self.first,))[self.first])](*args)
        if _state.callbacks:
            outputs = result if isinstance(result, (tuple, list)) else (result,)
            scalars = [x for x in outputs if isinstance(x, Tensor) and x.dim() == 0 and x.requires_grad]
            if scalars:
                _state.loss = scalars[-1].detach()
        return result
