"""What `fp8compile.tune` chooses between: groups of layers, and candidates for each of them; and the fastest choices.

    blocks.0.mlp.up, blocks.1.mlp.up, ...  ->  the group blocks.*.mlp.up
    delayed, delayed in E4M3, ..., or high precision  ->  its candidates

An *assignment* maps each group to a candidate, or to None for high precision. It is written as rules of a policy, one for each
group. `frontier` combines times and errors of groups, which it takes to add up, into the assignments that are worth a look: no
other one is faster with no more error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..config.policy import Policy, load
from ..config.policy.model import SETTINGS
from ..config.policy.patterns import matcher
from ..config.recipe import BUILT_IN, WHOLE
from ..devices.formats import FP8_FORMATS
from ..devices.gpu import Gpu
from ..ir.records import FP8, MatmulRecord
from ..reporting.layers import pattern

MOST_POINTS = 4096  # of a frontier


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
class Group:
    """Layers whose names differ in numbers only. `name`: with * for the numbers. `where`: the condition of its rule.
    `settings`: what the policy that is extended sets for these layers."""

    name: str
    where: Mapping[str, str | list[str]]
    modules: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


Assignment = Mapping[Group, Candidate | None]
Choice = tuple[Candidate | None, ...]  # an assignment, in the order of the groups


def groups_of(matmuls: Sequence[MatmulRecord], policy: Policy) -> tuple[Group, ...]:
    """The groups of the matmuls that `policy` has in FP8."""
    rules = dict(zip(policy.labels, policy.rules, strict=True))
    kinds: dict[tuple[str, str], dict[str, MatmulRecord]] = {}
    for record in matmuls:
        if record.decision != FP8:
            continue
        what, name = ("module", record.fqn) if record.fqn else ("parameter", record.parameter)
        key = (what, "".join(pattern(name)))
        kinds.setdefault(key, {}).setdefault(name, record)
    names = {"module": {r.fqn for r in matmuls}, "parameter": {r.parameter for r in matmuls}}
    made = []
    for (what, name), members in kinds.items():
        first = next(iter(members.values()))
        rule = rules.get(first.rule)
        settings = {key: getattr(rule, key) for key in SETTINGS if key != "fp8_format" and getattr(rule, key, None) is not None}
        where = {what: _condition(name, members, names[what])}
        made.append(Group(name, where, tuple(members), settings))
    return tuple(made)


def _condition(name: str, members: Collection[str], names: set[str]) -> str | list[str]:
    """What fits these members and no other of `names`: a glob (where * is any text), a regular expression, or their names."""
    for text in (name, "re:" + r"\d+".join(re.escape(part) for part in name.split("*"))):
        if {other for other in names if matcher(text)(other)} <= set(members):
            return text
    return list(members)


def tables(assignment: Assignment, extends: str) -> dict[str, Any]:
    """The policy of an assignment, as the tables of a file."""
    rules = []
    for group, candidate in assignment.items():
        rule: dict[str, Any] = {"name": f"tuned: {group.name}"[:100], **group.where}
        if candidate is None:
            rules.append({**rule, "fp8": "off"})
            continue
        rule["recipe"] = candidate.recipe
        if candidate.fp8_format == "e4m3":
            rule["fp8_format"] = "e4m3"
        delayed = candidate.recipe == "delayed"
        kept = {key: value for key, value in group.settings.items() if delayed or key != "current_scaling"}
        rules.append({**rule, **{key: list(value) if isinstance(value, tuple) else value for key, value in kept.items()}})
    return {"extends": extends, "rules": rules}


def policy_of(assignment: Assignment, extends: str) -> Policy:
    """The policy of an assignment, for all of a training and no device."""
    return dataclasses.replace(load(tables(assignment, extends)), device=None, schedule=None)


# -- the frontier ------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A whole policy. `seconds` and `error` are sums over its groups."""

    seconds: float
    error: float
    choice: Choice


def frontier(options: Sequence[Mapping[Candidate | None, tuple[float, float]]]) -> list[Point]:
    """The assignments that no other one beats in both seconds and error, fastest last. `options`: for each group the
    (seconds, error) of each candidate."""
    found = [Point(0.0, 0.0, ())]
    for group in options:
        every = [
            Point(point.seconds + seconds, point.error + error, (*point.choice, candidate))
            for point in found
            for candidate, (seconds, error) in group.items()
        ]
        found = _undominated(every)
    return found


def _undominated(points: Iterable[Point]) -> list[Point]:
    """By increasing error, each faster than all before it. At most MOST_POINTS, evenly taken."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.error, point.seconds)):  # stable: the first of equals stays
        if not kept or point.seconds < kept[-1].seconds:
            kept.append(point)
    if len(kept) > MOST_POINTS:
        last = len(kept) - 1
        kept = [kept[i * last // (MOST_POINTS - 1)] for i in range(MOST_POINTS)]
    return kept
