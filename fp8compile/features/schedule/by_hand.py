"""Which rules are active for a model: at its step, and as switched by hand."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ... import process
from ...config.policy import Policy
from ...config.policy.windows import SCHEDULE
from ...config.settings import integer
from ...errors import OptionError, near
from ...ir.records import FP8, HIGH_PRECISION
from ...logs import get_logger, say_once
from ...runtime.ledger import Ledger
from ...runtime.optimizer_steps import STEPS, each_step, parameters_of
from ...runtime.parameters import all_records, find, record_of
from .moves import Moves, known

logger = get_logger(__name__)

PRECISIONS = {"bf16": True, HIGH_PRECISION: True, FP8: False}  # is the rule of the schedule active?
Callback = Callable[[int, "float | None"], "str | None"]


@dataclass(eq=False)
class Switches:
    """Rules switched by hand, by name: of a parameter's model, or of all. None: the window decides."""

    of: dict[str, bool | None] = field(default_factory=dict)


@dataclass(eq=False)
class ByHand:
    """Facts of this process's training; those of one parameter's model are in its record."""

    switches: Switches = field(default_factory=Switches)
    listeners: int = 0  # callbacks of `on_step`


class Scheduled:
    """What this process knows of graphs that several sets of rules share."""

    def __init__(self) -> None:
        self.graphs: Any = WeakKeyDictionary()
        self.loss: Tensor | None = None  # the last scalar that a graph returned, for callbacks of `on_step`


BY_HAND = ByHand()


def active(parameter: Tensor, policy: Policy, ahead: int = 0) -> Policy:
    """The rules that decide about the model that has this parameter, so many optimizer steps from now."""
    extras = find(parameter).extras
    own, moved = extras.get(Switches), extras.get(Moves)
    policy = moved.extended(policy) if moved is not None else policy
    switches = {**BY_HAND.switches.of, **(own.of if own is not None else {})}
    by_hand = {name: on for name, on in switches.items() if on is not None}
    return policy.during(policy.active(STEPS.step_of(parameter) + ahead, by_hand))


def set_rule(name: str, on: bool | None, model: nn.Module | None = None) -> None:
    """Switch the rule of this name on or off by hand, from the next call on; None: its window decides again.

    The rule has `during`; with "by hand", it is off until it is switched. For one model, or for all of them.
    What the rule and all others decide together is compiled at the first call if they are together at some
    step, or if it is for "by hand"; else at the next call, which takes as long as the first one did.

    OptionError (a ValueError) for a name that no compiled model's policy has, and where a graph with dynamic
    sizes would have to be compiled late."""
    if on not in (True, False, None):
        raise OptionError.of("on", on, "True, False or None")
    graphs = list(process.of(Scheduled).graphs)
    names = {rule.name for graph in graphs for rule in graph.policy.timed if rule.during is not None}
    if name not in names and (graphs or len(process.of(Ledger))):
        allowed = "the name of a rule with 'during' in the policy of a compiled model"
        raise OptionError.of("name", name, allowed, near(str(name), [x for x in names if x is not None]))
    switches = BY_HAND.switches if model is None else known(parameters_of(model), Switches)
    before = switches.of.get(name) if switches is not None else None
    _switch(name, on, model)
    late = next((graph.late for graph in graphs if graph.late), None)
    if late:
        _switch(name, before, model)
        raise OptionError.of("name", name, f"a rule with during = 'by hand': {late}")


def why_not_late(model: nn.Module) -> str:
    """Why graphs of a model cannot be compiled for sets of rules that come up later; "" if they can."""
    known = {id(parameter) for parameter in model.parameters()}
    graphs = [graph for graph in process.of(Scheduled).graphs if known & {*map(id, graph.known)}]
    return next((graph.why_not_late for graph in graphs if graph.why_not_late), "")


def _switch(name: str, on: bool | None, model: nn.Module | None) -> None:
    if model is None:
        BY_HAND.switches.of[name] = on
        for _, record in all_records():
            if (switches := record.extras.get(Switches)) is not None:
                switches.of.pop(name, None)
    for parameter in parameters_of(model):
        record_of(parameter).extras.of(Switches).of[name] = on
    STEPS.ticks += 1


def set_precision(precision: str | None, model: nn.Module | None = None) -> None:
    """Run in "fp8" or in "bf16" from the next call on, whatever the schedule says; None goes back to it.

    "bf16" is what the model computes in without FP8: its own dtype, or that of autocast. For one model, or
    for all of them. It acts on graphs whose policy has a `[schedule]` (which may be empty); all others were
    compiled for FP8 alone. OptionError (a ValueError) for another name."""
    _switch(SCHEDULE, _checked(precision), model)
    phases = any(graph.policy.schedule is not None for graph in process.of(Scheduled).graphs)
    if precision is not None and process.of(Ledger) and not phases:
        message = 'set_precision: no compiled graph has phases; give its policy a schedule: {"schedule": {}}'
        say_once(logger, logging.WARNING, message)


def _checked(precision: str | None, of: str = "") -> bool | None:
    """Whether the rule of the schedule is active in this precision; None for None. OptionError for others."""
    if precision is not None and (not isinstance(precision, str) or precision not in PRECISIONS):
        raise OptionError.of("precision", precision, f"'fp8', 'bf16' or None{of}")
    return None if precision is None else PRECISIONS[precision]


def on_step(callback: Callback, model: nn.Module | None = None, every: int = 1) -> Callable[[], None]:
    """Call `callback(step, loss)` after every `every`-th optimizer step (of the model's optimizer). A
    precision that it returns is set as by `set_precision`; None changes nothing. It may call `set_rule`.
    Returns a function that removes the callback.

    `loss` is the last scalar that a graph with several sets of rules returned. It is None if no graph did,
    because the loss is computed outside of the compiled code or after a graph break. Reading it waits for the
    device. Each rank of a distributed job sees its own loss: reduce it before deciding."""
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
    BY_HAND.listeners += 1
    return remove
