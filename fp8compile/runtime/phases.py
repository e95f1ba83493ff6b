"""Phases of a training run: high precision first, then FP8, then high precision again, without a new compilation.

A graph whose policy has a `[schedule]` is compiled twice when it is first met: for FP8, and for high precision with the amaxes
of everything that FP8 would quantize. Each call runs one of the two. Both move the same scaling state, so FP8 begins with the
histories of the warm-up, and a switch costs nothing; parameters, gradients and optimizer state know of neither.

The step is the number of `optimizer.step()` calls that the graph's parameters have seen, as torch's own hook on optimizers
reports them: forwards that accumulate gradients, recomputations and evaluations do not count. Where a training loop has no
`torch.optim.Optimizer`, steps inside of a CUDA graph, or starts from a checkpoint, `set_step` says where it is.
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
from ..config.recipe import integer
from ..errors import OptionError
from ..ir.records import FP8, HIGH_PRECISION
from ..logs import get_logger, say_once
from .ledger import LEDGER

if TYPE_CHECKING:
    from .compiled_graph import CompiledGraph

logger = get_logger(__name__)

PHASES = (HIGH_PRECISION, FP8)
Callback = Callable[[int, "float | None"], "str | None"]


class _Steps:
    """One optimizer's: how many, and of which parameters (by identity)."""

    def __init__(self) -> None:
        self.count = 0
        self.parameters: frozenset[int] = frozenset()


@dataclass(eq=False)
class _Watch:
    """A callback, with the model that it is for (a weak reference; None: for all) and the last step that it was asked about."""

    callback: Callback
    every: int
    model: Any
    last: int = -1
    reads_loss: bool = True

    def due(self, step: int, parameters: frozenset[int]) -> bool:
        if step == self.last or step % self.every:
            return False
        if self.model is None:
            return True
        model = self.model()
        return model is not None and any(id(p) in parameters for p in model.parameters())


class _State:
    """Of this process. Parameters and optimizers are held weakly."""

    def __init__(self) -> None:
        self.steps: Any = WeakKeyDictionary()  # optimizer -> _Steps
        self.reached: Any = WeakIdKeyDictionary()  # parameter by which a graph goes -> steps of its optimizers, alive or not
        self.had: Any = WeakIdKeyDictionary()  # parameter -> _Steps of the optimizer that had it last, alive or not
        self.ticks = 0  # steps of all optimizers: what was found out before the last one has to be found out again
        self.phase: str | None = None  # set by hand, for everything
        self.phases: Any = WeakIdKeyDictionary()  # parameter -> phase set by hand
        self.offset = 0  # added to the steps that were counted
        self.offsets: Any = WeakIdKeyDictionary()  # parameter -> the same
        self.callbacks: dict[int, _Watch] = {}
        self.loss: Tensor | None = None  # the last scalar that a scheduled graph returned
        self.scheduled: Any = WeakKeyDictionary()  # graphs with two phases
        self.hook: Any = None

    def listen(self) -> None:
        if self.hook is None:
            self.hook = register_optimizer_step_post_hook(_stepped)

    def counted(self, parameter: Tensor) -> int:
        """Steps of the optimizer that has this parameter, and of those that had it before. If none has it (sharded, frozen):
        of whichever took the most, of those that are not some other graph's, or of all if it never will have one."""
        every = list(self.steps.values())
        counting = [steps for steps in every if id(parameter) in steps.parameters]
        if parameter in self.had:
            counting.append(self.had[parameter])
        if not counting:
            counting = [steps for steps in every if not any(id(p) in steps.parameters for p in self.reached)]
            counting = counting or ([] if parameter.requires_grad else every)
        return max((steps.count for steps in counting), default=0) if counting else self.reached.get(parameter, 0)


_state = _State()


def set_phase(phase: str | None, model: nn.Module | None = None) -> None:
    """Run in "fp8" or in "high_precision" from the next call on, whatever the schedule says; None goes back to it.

    For one model, or for all of them. It acts on what was compiled with a policy that has a `[schedule]` (which may be empty);
    anything else was compiled for FP8 alone. ValueError for another name.
    """
    if phase is not None and phase not in PHASES:
        raise OptionError.of("phase", phase, "'fp8', 'high_precision' or None")
    if model is None:
        _state.phase = phase
        _state.phases.clear()
    for parameter in _parameters(model):
        _state.phases[parameter] = phase
    _state.ticks += 1
    if phase is not None and LEDGER.graphs() and not _state.scheduled:
        message = 'set_phase: no compiled graph has phases; give its policy a schedule: {"schedule": {}}'
        say_once(logger, logging.WARNING, message)


def set_step(step: int, model: nn.Module | None = None) -> None:
    """Say that `step` optimizer steps were taken: after loading a checkpoint, or where steps cannot be seen."""
    integer("step", step, 0)
    if model is None:
        _state.offset = step - max((steps.count for steps in _state.steps.values()), default=0)
        _state.offsets.clear()
    for parameter in _parameters(model):
        _state.offsets[parameter] = step - _state.counted(parameter)
    _state.ticks += 1


def on_step(callback: Callback, model: nn.Module | None = None, every: int = 1) -> Callable[[], None]:
    """Call `callback(step, loss)` behind every `every`-th optimizer step (of the model's optimizer); the phase that it returns
    is set as by `set_phase`, None changes nothing. Returns a function that takes the callback away.

    `loss` is the last number that a graph with phases returned, None if none did (the loss is computed outside of what is
    compiled, or behind a graph break): reading it waits for the device. Ranks of a distributed job see a loss each: reduce it
    before deciding.
    """
    if not callable(callback):
        raise OptionError.of("callback", callback, "callable as callback(step, loss)")
    integer("every", every, 1)
    _state.listen()
    _parameters(model)  # complains about what is no model
    number = max(_state.callbacks, default=-1) + 1
    _state.callbacks[number] = _Watch(callback, every, weakref.ref(model) if model is not None else None)
    return lambda: (_state.callbacks.pop(number, None), None)[1]


def each_step(callback: Callable[[int], None], model: nn.Module) -> Callable[[], None]:
    """As `on_step` of every step, for what does not look at the loss (reading it waits for the device) and changes no phase."""

    def step_only(step: int, _: float | None) -> None:
        callback(step)

    forget = on_step(step_only, model)  # type: ignore[arg-type]
    _state.callbacks[max(_state.callbacks)].reads_loss = False
    return forget


def steps_of(model: nn.Module) -> int:
    """How many optimizer steps a model has seen, as far as is known."""
    parameter = next(iter(_parameters(model)), None)
    return 0 if parameter is None else _state.counted(parameter) + _state.offsets.get(parameter, _state.offset)


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
    known = [p for p in _state.reached if id(p) in parameters]
    steps = _state.steps.get(optimizer)
    if steps is None:  # a second optimizer of a model goes on where the first one was
        steps = _state.steps[optimizer] = _Steps()
        before = [_state.reached[p] for p in known] + [_state.had[p].count for p in every if p in _state.had]
        steps.count = max(before, default=0)
    if steps.parameters != parameters:
        for p in every:
            _state.had[p] = steps
    steps.count, steps.parameters = steps.count + 1, parameters
    for p in known:
        _state.reached[p] = max(_state.reached[p], steps.count)
    _state.ticks += 1
    parameter = next(iter(every), None)
    step = steps.count + (_state.offset if parameter is None else _state.offsets.get(parameter, _state.offset))
    for watch in list(_state.callbacks.values()):
        if not watch.due(step, parameters):
            continue
        watch.last = step  # the optimizers of one step, where there are several, ask once
        phase = watch.callback(step, float(_state.loss) if watch.reads_loss and _state.loss is not None else None)
        if phase is not None:
            if phase not in PHASES:
                raise OptionError.of("phase", phase, "'fp8', 'high_precision' or None (the callback's return value)")
            set_phase(phase, watch.model() if watch.model is not None else None)


class ScheduledGraph:
    """One Dynamo graph in both precisions; serves as its callable."""

    def __init__(self, graphs: Mapping[str, CompiledGraph], schedule: Schedule, first: int):
        self.graphs, self.schedule = dict(graphs), schedule
        self.first = first  # the input whose identity tells which model this is
        self.outside: Any = WeakIdKeyDictionary()  # parameter -> phase of the last call that was no recomputation
        self.known: Any = WeakIdKeyDictionary()  # parameter -> (ticks, phase)
        self.last: Any = WeakIdKeyDictionary()  # parameter -> phase
        _state.scheduled[self] = True
        _state.listen()

    def phase(self, parameter: Tensor) -> str:
        """The phase of the model that has this parameter."""
        if compat.recomputing() and parameter in self.outside:
            return self.outside[parameter]
        phase = self.outside[parameter] = self._now(parameter)
        return phase

    def _now(self, parameter: Tensor) -> str:
        _state.reached.setdefault(parameter, 0)
        ticks, phase = self.known.get(parameter, (-1, FP8))
        if ticks == _state.ticks:
            return phase
        step = _state.counted(parameter) + _state.offsets.get(parameter, _state.offset)
        phase = _state.phases.get(parameter, _state.phase) or self.scheduled(step)
        before = self.last.get(parameter)
        if before != phase:
            self.last[parameter] = phase
            if before is not None:
                say_once(logger, logging.INFO, f"fp8: step {step}: from {before} to {phase}".replace("_", " "))
        self.known[parameter] = (_state.ticks, phase)
        return phase

    def scheduled(self, step: int) -> str:
        """The phase of a step, counted from 0."""
        cooling = self.schedule.cooldown_at is not None and step >= self.schedule.cooldown_at
        return HIGH_PRECISION if step < self.schedule.warmup_steps or cooling else FP8

    def __call__(self, *args: Any) -> Any:
        # DDPOptimizer asks for shapes; AOTAutograd answers the first call of each graph with them
        if isinstance(args[self.first], compat.FakeTensor):
            return [graph(*args) for graph in self.graphs.values()][0]
        result = self.graphs[self.phase(args[self.first])](*args)
        if _state.callbacks:
            outputs = result if isinstance(result, (tuple, list)) else (result,)
            scalars = [x for x in outputs if isinstance(x, Tensor) and x.dim() == 0 and x.requires_grad]
            if scalars:
                _state.loss = scalars[-1].detach()
        return result
