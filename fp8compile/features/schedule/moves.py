"""Rules that are added while a model trains, before all others: what a guard moves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor, nn

from ...config.policy import Policy, Rule, preceded
from ...runtime.optimizer_steps import STEPS
from ...runtime.parameters import find, record_of

T = TypeVar("T")


@dataclass(eq=False)
class Moves:
    """The rules of one model; its parameters share this object."""

    rules: tuple[Rule, ...] = ()
    policies: dict[Policy, Policy] = field(default_factory=dict)  # with these rules

    def extended(self, policy: Policy) -> Policy:
        if policy not in self.policies:
            self.policies[policy] = preceded(policy, self.rules)
        return self.policies[policy]


def rules_of(model: nn.Module) -> tuple[Rule, ...]:
    """Those that were put for a model."""
    moved = known(model.parameters(), Moves)
    return moved.rules if moved is not None else ()


def known(parameters: Iterable[Tensor], kind: type[T]) -> T | None:
    """What the first of these parameters that has such a fact knows."""
    found = (find(parameter).extras.get(kind) for parameter in parameters)
    return next((fact for fact in found if fact is not None), None)


@contextlib.contextmanager
def tried(model: nn.Module, rules: Sequence[Rule]) -> Iterator[None]:
    """With these rules in place of those that were put."""
    before = rules_of(model)
    put(model, rules)
    try:
        yield
    finally:
        put(model, before)


def put(model: nn.Module, rules: Sequence[Rule]) -> None:
    """Let these rules decide about a model before those of its policy, in place of earlier ones. Where they
    first hold together with others, graphs are compiled late."""
    made = Moves(tuple(rules))
    for parameter in model.parameters():
        record_of(parameter).extras.put(made)
    STEPS.ticks += 1
