"""What `fp8compile.tune` chooses between: groups of layers, and candidates for each of them.

    blocks.0.mlp.up, blocks.1.mlp.up, ...  ->  the group blocks.*.mlp.up
    delayed, delayed in E4M3, ..., or high precision  ->  its candidates

A *choice* has a candidate for each group, or None for high precision. It is written as rules of a policy, one for each group.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..config.policy import Policy, load
from ..config.policy.patterns import matcher
from ..config.policy.policy_tables import SETTINGS
from ..config.recipe import BUILT_IN, WHOLE
from ..devices.formats import FP8_FORMATS
from ..devices.gpu import Gpu
from ..ir.records import FP8, MatmulRecord
from ..reporting.layer_rows import pattern


class Candidate(NamedTuple):
    """A recipe and a format (None: the recipe's own, and only one)."""

    recipe: str
    fp8_format: str | None = None

    @property
    def label(self) -> str:
        return f"{self.recipe}, e4m3" if self.fp8_format == "e4m3" else self.recipe


def candidates(gpu: Gpu) -> tuple[Candidate, ...]:
    """What a GPU multiplies natively, from coarse to fine."""
    found = []
    for name, made in BUILT_IN.items():
        if made.native(gpu):
            formats: Iterable[str | None] = sorted(FP8_FORMATS, reverse=True) if made.block == WHOLE else (None,)
            found += [Candidate(name, fp8_format) for fp8_format in formats]
    return tuple(found)


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Layers whose names differ in numbers only. `name`: with * for the numbers. `where`: the condition of its rule.
    `settings`: what the policy that is extended sets for these layers."""

    name: str
    where: Mapping[str, str | list[str]]
    modules: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


Choice = tuple[Candidate | None, ...]  # in the order of the groups


def groups_of(matmuls: Sequence[MatmulRecord], policy: Policy) -> tuple[LayerGroup, ...]:
    """The groups of the matmuls that `policy` has in FP8."""
    rules = dict(zip(policy.labels, policy.rules, strict=True))
    names = {"module": {r.fqn for r in matmuls}, "parameter": {r.parameter for r in matmuls}}
    members: dict[tuple[str, str], dict[str, MatmulRecord]] = {}
    for record in matmuls:
        if record.decision == FP8:
            what, name = ("module", record.fqn) if record.fqn else ("parameter", record.parameter)
            members.setdefault((what, "".join(pattern(name))), {}).setdefault(name, record)
    made = []
    for (what, name), records in members.items():
        rule = rules.get(next(iter(records.values())).rule)
        settings = {key: getattr(rule, key) for key in SETTINGS if key != "fp8_format" and getattr(rule, key, None) is not None}
        made.append(LayerGroup(name, {what: _condition(name, records, names[what])}, tuple(records), settings))
    return tuple(made)


def _condition(name: str, members: Collection[str], names: set[str]) -> str | list[str]:
    """What fits these members and no other of `names`: a glob (where * is any text), a regular expression, or their names."""
    for text in (name, "re:" + r"\d+".join(re.escape(part) for part in name.split("*"))):
        if {other for other in names if matcher(text)(other)} <= set(members):
            return text
    return list(members)


def tables(groups: Sequence[LayerGroup], choice: Choice, extends: str) -> dict[str, Any]:
    """The policy of a choice, as the tables of a file."""
    rules = []
    for group, candidate in zip(groups, choice, strict=True):
        rule: dict[str, Any] = {"name": f"tuned: {group.name}"[:100], **group.where}
        if candidate is None:
            rule["fp8"] = "off"
        else:
            rule["recipe"] = candidate.recipe
            if candidate.fp8_format == "e4m3":
                rule["fp8_format"] = "e4m3"
            for key, value in group.settings.items():
                if key != "current_scaling" or candidate.recipe == "delayed":
                    rule[key] = list(value) if isinstance(value, tuple) else value
        rules.append(rule)
    return {"extends": extends, "rules": rules}


def policy_of(groups: Sequence[LayerGroup], choice: Choice, extends: str) -> Policy:
    """The policy of a choice, for all of a training and no device."""
    return dataclasses.replace(load(tables(groups, choice, extends)), device=None, schedule=None)
