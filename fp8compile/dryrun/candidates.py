"""What `fp8compile.tune` chooses between: groups of layers, and candidates for each of them.

    blocks.0.mlp.up, blocks.1.mlp.up, ...                           ->  the group blocks.*.mlp.up
    "delayed", "delayed, e4m3", "rowwise", ..., "high precision"    ->  its candidates

A *choice* has a candidate for each group. It is written as rules of a policy, one for each group.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.policy import Policy, load
from ..config.policy.patterns import matcher
from ..config.recipe import BUILT_IN, WHOLE
from ..devices.gpu import Gpu
from ..ir.records import FP8, MatmulRecord
from ..reporting.layer_rows import pattern

HIGH = "high precision"

Choice = tuple[str, ...]  # in the order of the groups


def candidates(gpu: Gpu) -> tuple[str, ...]:
    """What a GPU multiplies natively, from coarse to fine."""
    native = {name: made for name, made in BUILT_IN.items() if made.native(gpu)}
    return tuple(name + e4m3 for name, made in native.items() for e4m3 in (("", ", e4m3") if made.block == WHOLE else ("",)))


def recipe_of(candidate: str) -> str:
    """The recipe of a candidate, on which its time depends: its formats take the same."""
    return candidate.partition(",")[0]


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Layers whose names differ in numbers only. `name`: with * for the numbers. `where`: the condition of its rule.
    `settings`: what the policy that is extended sets for these layers."""

    name: str
    where: Mapping[str, str | list[str]]
    modules: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


def groups_of(matmuls: Sequence[MatmulRecord], policy: Policy) -> tuple[LayerGroup, ...]:
    """The groups of the matmuls that `policy` has in FP8."""
    settings = {label: rule.settings for label, rule in zip(policy.labels, policy.rules, strict=True)}
    names = {"module": {r.fqn for r in matmuls}, "parameter": {r.parameter for r in matmuls}}
    members: dict[tuple[str, str], dict[str, MatmulRecord]] = {}
    for record in matmuls:
        if record.decision == FP8:
            what, name = ("module", record.fqn) if record.fqn else ("parameter", record.parameter)
            members.setdefault((what, "".join(pattern(name))), {}).setdefault(name, record)
    made = []
    for (what, name), records in members.items():
        first = next(iter(records.values()))
        where = {what: _condition(name, records, names[what])}
        made.append(LayerGroup(name, where, tuple(records), settings.get(first.rule, {})))
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
        if candidate == HIGH:
            rule["fp8"] = "off"
        else:
            rule["recipe"] = recipe_of(candidate)
            if candidate.endswith("e4m3"):
                rule["fp8_format"] = "e4m3"
            for key, value in group.settings.items():
                if key != "fp8_format" and (key != "current_scaling" or candidate.startswith("delayed")):
                    rule[key] = list(value) if isinstance(value, tuple) else value
        rules.append(rule)
    return {"extends": extends, "rules": rules}


def policy_of(groups: Sequence[LayerGroup], choice: Choice, extends: str) -> Policy:
    """The policy of a choice, for all of a training and no device."""
    return dataclasses.replace(load(tables(groups, choice, extends)), device=None, schedule=None)
