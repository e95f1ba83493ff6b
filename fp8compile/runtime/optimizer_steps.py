"""The steps of optimizers, from one pair of torch's hooks: who listens, and at which step each model is.

The step of a model is the number of `optimizer.step()` calls that its parameters have seen: forwards that
accumulate gradients, recomputations and evaluations do not count. `set_step` sets it if the training loop has
no `torch.optim.Optimizer`, steps inside of a CUDA graph, or starts from a checkpoint.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..config.settings import integer
from .parameters import ParameterRecord, all_records, find, ids_of, record_of

Listener = Callable[[torch.optim.Optimizer], None]


@dataclass(eq=False)
class Steps:
    """The steps of one optimizer: how many it took, and its parameters (by identity)."""

    count: int = 0
    parameters: frozenset[int] = frozenset()


@dataclass(eq=False)
class _Watch:
    """A callback, its model (a weak reference; None: for all), and the last step that it was called for."""

    callback: Callable[[int], None]
    every: int
    model: Any
    last: int = -1

    def due(self, step: int, parameters: frozenset[int]) -> bool:
        if step == self.last or step % self.every:
            return False
        if self.model is None:
            return True
        model = self.model()
        return model is not None and any(id(p) in parameters for p in model.parameters())


class OptimizerSteps:
    """What is known of this process's optimizers, held weakly; of one parameter, in its record."""

    def __init__(self) -> None:
        self.of: Any = WeakKeyDictionary()  # optimizer -> Steps
        # steps of all optimizers, and settings by hand: what was found at an earlier tick may have changed
        self.ticks = 0
        self.offset = 0  # added to the steps that were counted
        self.watches: dict[_Watch, None] = {}

    def counted(self, parameter: Tensor) -> int:
        """How many optimizer steps this parameter has seen: the largest count of the optimizers that have it,
        and of the last one that had it. Others count for what no optimizer has: frozen parameters, and those
        that train by copies or shards of themselves, so that gradients reach them. These count the most steps
        of an optimizer without a parameter by which some graph finds its step, or that only other graphs
        read; if there is none, the most of all, or 0 if they require gradients."""
        own = find(parameter)
        had = own.steps
        counting = [steps for steps in had if steps is had[-1] or id(parameter) in steps.parameters]
        if not counting and not self._waits(parameter, own):
            every, read = list(self.of.values()), all_records()
            others = [(key, x) for key, x in read if x.graphs and own.graphs.keys().isdisjoint(x.graphs)]
            theirs = [key for key, _ in others] + [key for key, x in read if x.leads]
            counting = [steps for steps in every if steps.parameters.isdisjoint(theirs)]
            counting = counting or ([] if parameter.requires_grad else every)
        return max((steps.count for steps in counting), default=0)

    def _waits(self, parameter: Tensor, own: ParameterRecord) -> bool:
        """True if this is a parameter whose training has not begun, or whose optimizer has taken no step."""
        if not self.of or own.follows or not parameter.requires_grad:
            return False
        waits = (own.leads and not own.reached) or _held(parameter)
        own.follows = own.reached and not waits
        return waits

    def lead(self, parameter: Tensor) -> None:
        """A graph finds its step by this parameter."""
        record = record_of(parameter)
        if not record.leads and parameter.requires_grad:
            handle = parameter.register_hook(lambda _: reached())

            def reached() -> None:
                record.reached = True
                handle.remove()

        record.leads = True

    def step_of(self, parameter: Tensor) -> int:
        """The step of the model that has this parameter."""
        offset = find(parameter).offset
        return self.counted(parameter) + (self.offset if offset is None else offset)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step, and call those who wait for it."""
        every = [p for group in optimizer.param_groups for p in group["params"]]
        parameters = frozenset(map(id, every))
        steps = self.of.get(optimizer)
        if steps is None or steps.parameters != parameters:
            records = [record_of(p) for p in every]
            if steps is None:  # a second optimizer of a model continues the count of the first one
                before = max((had.count for record in records for had in record.steps), default=0)
                steps = self.of[optimizer] = Steps(before)
            alive = list(self.of.values())
            for record in records:
                if record.begins is not None:  # until now it followed the optimizers of other models
                    record.offset, record.begins = record.begins - steps.count, None
                record.steps = [had for had in record.steps if had is not steps and had in alive] + [steps]
            steps.parameters = parameters
        steps.count += 1
        self.ticks += 1
        offset = find(every[0]).offset if every else None
        step = steps.count + (self.offset if offset is None else offset)
        for watch in list(self.watches):
            if watch.due(step, parameters):
                watch.last = step  # where several optimizers take one step, the callback is called once
                watch.callback(step)


def _held(parameter: Tensor) -> bool:
    """True if some optimizer has this parameter. Torch has no list of optimizers that have taken no step."""
    ids = ids_of((parameter,))
    optimizers = [x for x in gc.get_objects() if issubclass(type(x), torch.optim.Optimizer)]
    groups = (group for x in optimizers for group in getattr(x, "param_groups", ()))
    return any(id(p) in ids for group in groups for p in group["params"])


STEPS = OptimizerSteps()
_before: list[Listener] = []
_after: list[Listener] = []
_hooks: list[Any] = []


@torch.compiler.disable
def _step_begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for listener in _before:
        listener(optimizer)


@torch.compiler.disable
def _step_ends(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for listener in _after:
        listener(optimizer)


def listen(after: Listener, before: Listener | None = None) -> None:
    """From now on, call these after, and before, each step of each optimizer; the same function only once."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_step_begins))
        _hooks.append(register_optimizer_step_post_hook(_step_ends))
    if after not in _after:
        _after.append(after)
    if before is not None and before not in _before:
        _before.append(before)


def _count(optimizer: torch.optim.Optimizer) -> None:
    STEPS.stepped(optimizer)


def count_steps() -> None:
    """Count the steps of each optimizer from now on."""
    listen(_count)


def set_step(step: int, model: nn.Module | None = None) -> None:
    """Set the number of optimizer steps taken: after loading a checkpoint, or if they cannot be counted."""
    integer("step", step, 0)
    if model is None:
        STEPS.offset = step - max((steps.count for steps in STEPS.of.values()), default=0)
        for _, record in all_records():
            record.offset = record.begins = None
    for parameter in parameters_of(model):
        record = record_of(parameter)
        record.offset = step - STEPS.counted(parameter)
        record.begins = None if record.steps else step
    STEPS.ticks += 1


def each_step(callback: Callable[[int], None], model: nn.Module | None, every: int = 1) -> Callable[[], None]:
    """Call `callback(step)` after every `every`-th optimizer step (of the model's optimizer). Returns a
    function that removes the callback. TypeError if `model` is none."""
    count_steps()
    parameters_of(model)
    watch = _Watch(callback, every, weakref.ref(model) if model is not None else None)
    STEPS.watches[watch] = None
    return lambda: STEPS.watches.pop(watch, None)


def steps_of(model: nn.Module) -> int:
    """The steps that a model has seen, if known: those of its first parameter that an optimizer had."""
    parameters = parameters_of(model)
    parameter = next((p for p in parameters if find(p).steps), next(iter(parameters), None))
    return 0 if parameter is None else STEPS.step_of(parameter)


def parameters_of(model: nn.Module | None) -> Sequence[nn.Parameter]:
    """The parameters of a model; none of None."""
    if model is None:
        return ()
    if not callable(getattr(model, "parameters", None)):
        raise TypeError(f"expected a torch.nn.Module or None, not {type(model).__name__}")
    return list(model.parameters())
