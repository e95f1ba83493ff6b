"""The result of `fp8compile.tune`: candidates chosen for groups of layers, as a policy and a commented file.

    blocks.0.mlp.up, blocks.1.mlp.up, ...                           ->  the group blocks.*.mlp.up
    "delayed", "delayed, e4m3", "rowwise", ..., "high precision"    ->  its candidates

A *choice* has a candidate for each group. It is written as rules of a policy, one for each group.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ..config.policy import Policy, load
from ..config.policy.patterns import matcher
from ..config.recipe import BUILT_IN, WHOLE
from ..devices.gpu import Gpu
from ..errors import OptionError
from ..ir.records import FP8, MatmulRecord
from ..reporting.columns import aligned
from ..reporting.layer_rows import pattern

HIGH = "high precision"

Choice = tuple[str, ...]  # in the order of the groups


def candidates(gpu: Gpu) -> tuple[str, ...]:
    """What a GPU multiplies natively, from coarse to fine."""
    found: list[str] = []
    for name, recipe in BUILT_IN.items():
        if recipe.native(gpu):
            found += [name, f"{name}, e4m3"] if recipe.block == WHOLE else [name]
    return tuple(found)


def recipe_of(candidate: str) -> str:
    """The recipe of a candidate, on which its time depends: its formats take the same."""
    return candidate.partition(",")[0]


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Layers whose names differ in numbers only. `name`: with * for the numbers. `where`: the condition of
    its rule. `settings`: what the policy that is extended sets for these layers."""

    name: str
    where: Mapping[str, str | list[str]]
    modules: tuple[str, ...]
    settings: Mapping[str, Any]


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
    """What fits these and no other of `names`: a glob (* is any text), a regular expression, or a list."""
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


# -- the result --


@dataclass(frozen=True)
class Whole:
    """A measured whole policy: its error, and its estimated seconds a step (inf: its error is too large)."""

    name: str
    choice: Choice
    error: float
    seconds: float


@dataclass(frozen=True)
class Tuned:
    """The fastest policy whose gradients have a relative error of at most `max_error`. ``str()`` has the
    tables, ``to_toml()`` the policy as a file, ``write(path)`` writes it, ``to_dict()`` is for JSON.

    `policy` can be given to the backend: ``options={"policy": tuned.policy}``. `error` is its measured
    relative error of gradients, `seconds` its estimated time of a step (forward and backward) on `device`,
    `bf16` that of bf16. `speedup` is their ratio. docs/tune.md has the definitions.
    """

    model: str
    device: str
    max_error: float
    extends: str
    groups: tuple[LayerGroup, ...]
    alone: tuple[Mapping[str, tuple[float, float]], ...]  # of each group's candidates: seconds saved, error
    bf16: float
    wholes: tuple[Whole, ...]
    chosen: Whole

    @property
    def policy(self) -> Policy:
        return load(tables(self.groups, self.chosen.choice, self.extends))

    @property
    def error(self) -> float:
        return self.chosen.error

    @property
    def seconds(self) -> float:
        return self.chosen.seconds

    @property
    def speedup(self) -> float:
        return self.bf16 / self.seconds

    @property
    def choice(self) -> dict[str, str]:
        """What each group of layers gets: {"blocks.*.mlp.up": "rowwise", ...}."""
        pairs = zip(self.groups, self.chosen.choice, strict=True)
        return {group.name: candidate for group, candidate in pairs}

    def rows(self) -> list[dict[str, Any]]:
        """A flat dict for each group and candidate: "layers", "candidate", "error" (with this group alone in
        FP8), "seconds" (saved a step), "chosen"."""
        rows = []
        for (name, chosen), row in zip(self.choice.items(), self.alone, strict=True):
            for candidate, (seconds, error) in row.items():
                numbers = {"error": error, "seconds": seconds, "chosen": candidate == chosen}
                rows.append({"layers": name, "candidate": candidate, **numbers})
        return rows

    def to_dict(self) -> dict[str, Any]:
        """{"model", "device", "max_error", "error", "seconds", "bf16_seconds", "speedup", "choice", "rows",
        "policies": [{"name", "error", "seconds", "chosen"}], "toml"}, for JSON. "seconds" is None for a
        policy above `max_error`."""
        policies = []
        for whole in self.wholes:
            seconds = None if whole.seconds == math.inf else whole.seconds
            policies.append(
                {"name": whole.name, "error": whole.error, "seconds": seconds, "chosen": whole is self.chosen}
            )
        return {
            "model": self.model,
            "device": self.device,
            "max_error": self.max_error,
            "error": self.error,
            "seconds": self.seconds,
            "bf16_seconds": self.bf16,
            "speedup": self.speedup,
            "choice": self.choice,
            "rows": self.rows(),
            "policies": policies,
            "toml": self.to_toml(),
        }

    def summary(self) -> str:
        return (
            f"{self.model} on {self.device}: {self.speedup:.2f}x, {1e3 * self.bf16:.4g} ms in bf16, "
            f"{1e3 * self.seconds:.4g} ms tuned (estimated, forward and backward); error of gradients "
            f"{self.error:.4f}, at most {self.max_error:g}"
        )

    def __str__(self) -> str:
        return "\n".join(["fp8: " + self.summary(), "", *self._groups(), "", *self._policies()])

    def __repr__(self) -> str:
        return f"<fp8compile.Tuned: {self.summary()}>"

    def _groups(self) -> list[str]:
        lines, last = [], ""
        for row in self.rows():
            name, last = ("" if row["layers"] == last else row["layers"]), row["layers"]
            saved = f"{1e3 * row['seconds']:.3f}"
            lines.append(["*" if row["chosen"] else "", name, row["candidate"], saved, f"{row['error']:.4f}"])
        return aligned(("", "layers", "candidate", "ms saved", "error"), lines, "<<<>>").splitlines()

    def _policies(self) -> list[str]:
        lines = [["", "bf16", f"{1e3 * self.bf16:.4g}", "1.00x", f"{0:.4f}"]]
        for whole in self.wholes:
            took = [f"{1e3 * whole.seconds:.4g}", f"{self.bf16 / whole.seconds:.2f}x"]
            if whole.seconds == math.inf:
                took = ["error too large", ""]
            lines.append(["*" if whole is self.chosen else "", whole.name, *took, f"{whole.error:.4f}"])
        return aligned(("", "policy", "ms", "speedup", "error"), lines, "<<>>>").splitlines()

    def to_toml(self, folder: str | PathLike[str] = ".") -> str:
        """The policy as the text of a file in `folder`, with the candidates as comments."""
        extends = self.extends
        if extends.endswith(".toml") or "/" in extends or os.sep in extends:
            extends = os.path.relpath(extends, folder)
        made = tables(self.groups, self.chosen.choice, extends)
        others = "Layers that no rule names are left to the policy that is extended."
        lines = [
            f"# Chosen by `fp8compile tune`: {self.summary()}.",
            f"# Times are estimates: docs/tune.md. {others}",
            "",
            f"extends = {json.dumps(made['extends'])}",
        ]
        for rule, group in zip(made["rules"], self.groups, strict=True):
            lines += ["", f"# layers: {len(group.modules)}", "[[rules]]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in rule.items()]  # JSON that is TOML, too
        lines += ["", "# Whole policies. ms: a step. *: this file.", *_commented(self._policies())]
        lines += ["", "# Each group alone in FP8. *: chosen.", *_commented(self._groups())]
        return "\n".join(lines) + "\n"

    def write(self, path: str | PathLike[str]) -> None:
        """Write the policy file. OptionError if it cannot be written."""
        path = Path(path)
        try:
            path.write_text(self.to_toml(path.parent), encoding="utf-8")
        except OSError as error:
            raise OptionError(f"{path} cannot be written: {error.strerror}") from None


def _commented(lines: Sequence[str]) -> list[str]:
    return [f"# {line}".rstrip() for line in lines]
