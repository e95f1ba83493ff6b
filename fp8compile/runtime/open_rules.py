"""Rules of models that are compiled in parts: whether one decides something is known when all parts have run.

A graph of a part reports its gemms here when a model first calls it. At the first optimizer step of a model,
forward and backward of all its parts have run, and the rules are judged by all gemms together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .. import process
from ..config.options import Options
from ..config.policy import Site, unmatched
from ..frontend.inputs import names_of
from .optimizer_steps import listen


@dataclass
class _Open:
    """The gemms of a model, by graph, and the options that all its parts have."""

    options: Options
    sites: dict[int, Sequence[Site]] = field(default_factory=dict)
    judged: bool = False


class _Models(WeakKeyDictionary[nn.Module, dict[str, _Open]]):
    """By model and by the text of the policy."""


def add(model: nn.Module, options: Options, graph: int, sites: Sequence[Site]) -> None:
    """The model calls this part. `graph`: its index in the ledger."""
    if any(rule.conditions for rule in options.policy.rules[: options.policy.own]):
        listen(_judge)
        policies = process.of(_Models).setdefault(model, {})
        policies.setdefault(options.policy.key, _Open(options)).sites.setdefault(graph, sites)


def _judge(optimizer: torch.optim.Optimizer) -> None:
    waiting = [(m, x) for m, known in process.of(_Models).items() for x in known.values() if not x.judged]
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]} if waiting else ()
    for model, found in waiting:
        if any(id(p) in stepped for p in model.parameters()):
            found.judged = True
            sites = [site for each in found.sites.values() for site in each]
            names = names_of([model])
            known = names["modules"], names["parameter_names"]
            for message in unmatched(found.options.policy, sites, *known, whole=True):
                found.options.warn(message)
