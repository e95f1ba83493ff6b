"""The result of `fp8compile.tune`: the policy, as a commented file, and the candidates that were weighed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ..config.policy import Policy, load
from ..errors import OptionError
from ..reporting.columns import aligned
from .candidates import Candidate, Choice, Group, Point, tables

HIGH = "high precision"
CHECKED = 0.002  # the smallest budget for which a study found the prediction to hold
_GROUPS = ("", "layers", "candidate", "ms saved", "loss gap")
_WHOLES = ("", "policy", "ms", "speedup", "loss gap")


@dataclass(frozen=True)
class Whole:
    """A whole policy that was measured: its predicted relative loss gap and, if that is within the budget, its estimated
    seconds a step."""

    name: str
    choice: Choice
    gap: float
    seconds: float | None

    @property
    def fits(self) -> bool:
        return self.seconds is not None


@dataclass(frozen=True)
class Tuned:
    """The fastest policy within a loss budget. ``str()`` has the tables, ``to_toml()`` the policy as a file, ``write(path)``
    writes it, ``plot(path)`` draws time against predicted loss, ``to_dict()`` is for JSON.

    `policy` can be given to the backend: ``options={"policy": tuned.policy}``. `gap` is its predicted relative increase of the
    loss, `seconds` its estimated time of a step (forward and backward) on `device`, `bf16` that of bf16. `speedup` is their
    ratio. The predictions are those of docs/tune.md.
    """

    model: str
    device: str
    budget: float
    loss: float  # relative loss gap for an error of 1
    extends: str
    groups: tuple[Group, ...]
    candidates: tuple[Candidate, ...]
    errors: tuple[Mapping[Candidate, float], ...]  # by group
    saved: tuple[Mapping[str, float], ...]  # seconds, by group and recipe
    together: float  # the error of all groups over the sum of their own
    bf16: float
    points: tuple[Point, ...]
    wholes: tuple[Whole, ...]
    chosen: Whole

    @property
    def policy(self) -> Policy:
        return load(self._tables(self.extends))

    @property
    def gap(self) -> float:
        return self.chosen.gap

    @property
    def seconds(self) -> float:
        assert self.chosen.seconds is not None
        return self.chosen.seconds

    @property
    def speedup(self) -> float:
        return self.bf16 / self.seconds

    @property
    def choice(self) -> dict[str, str]:
        """What each group of layers gets: {"blocks.*.mlp.up": "rowwise", ...}."""
        return {g.name: HIGH if c is None else c.label for g, c in zip(self.groups, self.chosen.choice, strict=True)}

    def rows(self) -> list[dict[str, Any]]:
        """A flat dict for each group and candidate: "layers", "candidate", "error", "gap" (predicted loss gap of this group
        alone), "seconds" (saved a step), "chosen"."""
        made = []
        for group, errors, saved, chosen in zip(self.groups, self.errors, self.saved, self.chosen.choice, strict=True):
            made.append({"layers": group.name, "candidate": HIGH, "error": 0.0, "gap": 0.0, "seconds": 0.0,
                         "chosen": chosen is None})  # fmt: skip
            for candidate in self.candidates:
                error = errors[candidate]
                made.append({"layers": group.name, "candidate": candidate.label, "error": error, "gap": self.loss * error,
                             "seconds": saved[candidate.recipe], "chosen": candidate == chosen})  # fmt: skip
        return made

    def to_dict(self) -> dict[str, Any]:
        """{"model", "device", "budget", "gap", "seconds", "bf16_seconds", "speedup", "choice", "notes", "together", "rows",
        "policies": [{"name", "gap", "seconds", "fits", "chosen"}], "frontier": [{"seconds", "gap"}], "toml"}, for JSON."""
        return {
            "model": self.model,
            "device": self.device,
            "budget": self.budget,
            "gap": self.gap,
            "seconds": self.seconds,
            "bf16_seconds": self.bf16,
            "speedup": self.speedup,
            "choice": self.choice,
            "notes": list(self.notes),
            "together": self.together,
            "rows": self.rows(),
            "policies": [
                {"name": w.name, "gap": w.gap, "seconds": w.seconds, "fits": w.fits, "chosen": w is self.chosen}
                for w in self.wholes
            ],
            "frontier": [{"seconds": p.seconds, "gap": self.loss * p.error} for p in self.points],
            "toml": self.to_toml(),
        }

    def summary(self) -> str:
        return (
            f"{self.model} on {self.device}: {self.speedup:.2f}x, {1e3 * self.bf16:.4g} ms in bf16, {1e3 * self.seconds:.4g} "
            f"ms tuned (estimated, forward and backward); predicted loss gap {_gap(self.gap)}, within {_gap(self.budget)}"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of the prediction."""
        small = f"budgets under {100 * CHECKED:.1f}% are below what studies can tell apart: docs/tune.md"
        return (small,) if self.budget < CHECKED else ()

    def __str__(self) -> str:
        return "\n".join(["fp8: " + self.summary(), *self.notes, "", *self._groups(), "", *self._policies()])

    def __repr__(self) -> str:
        return f"<fp8compile.Tuned: {self.summary()}>"

    def _groups(self) -> list[str]:
        lines, last = [], ""
        for row in self.rows():
            name, last = ("" if row["layers"] == last else row["layers"]), row["layers"]
            saved = "" if row["candidate"] == HIGH else f"{1e3 * row['seconds']:.3f}"
            lines.append(["*" if row["chosen"] else "", name, row["candidate"], saved, _gap(row["gap"])])
        return _table(_GROUPS, lines)

    def _policies(self) -> list[str]:
        lines = [["", "bf16", f"{1e3 * self.bf16:.4g}", "1.00x", _gap(0.0)]]
        for whole in self.wholes:
            took = ["over the budget", ""]
            if whole.seconds is not None:
                took = [f"{1e3 * whole.seconds:.4g}", f"{self.bf16 / whole.seconds:.2f}x"]
            lines.append(["*" if whole is self.chosen else "", whole.name, *took, _gap(whole.gap)])
        return _table(_WHOLES, lines)

    # -- the file --

    def _tables(self, extends: str) -> dict[str, Any]:
        return tables(dict(zip(self.groups, self.chosen.choice, strict=True)), extends)

    def to_toml(self, beside: str | PathLike[str] | None = None) -> str:
        """The policy as the text of a file, with the candidates as comments. `beside`: the folder that the file is for, if a
        policy with a relative path is extended (default: the current one)."""
        extends = self.extends
        if _is_path(extends) and beside is not None:
            extends = os.path.relpath(extends, beside)
        made = self._tables(extends)
        head = [
            "Chosen by `fp8compile tune`: " + self.summary() + ".",
            "The time is an estimate, and the loss gap a prediction: docs/tune.md. Layers that no rule names are left to the "
            "policy below.",
        ]
        lines = [f"# {line}" for line in [*head, *self.notes]]
        lines += ["", f"extends = {json.dumps(made['extends'])}"]
        for rule, group, candidate in zip(made["rules"], self.groups, self.chosen.choice, strict=True):
            lines += ["", f"# {self._why(group, candidate)}", "[[rules]]"]
            lines += [f"{key} = {_toml(value)}" for key, value in rule.items()]
        lines += ["", "# Whole policies. ms: a step. *: this file.", *_commented(self._policies())]
        lines += ["", "# Each group alone, the others in high precision. *: chosen.", *_commented(self._groups())]
        return "\n".join(lines) + "\n"

    def _why(self, group: Group, candidate: Candidate | None) -> str:
        i = self.groups.index(group)
        count = f"{len(group.modules)} layer" + ("s" if len(group.modules) > 1 else "")
        if candidate is None:
            return f"{count}, in {HIGH}"
        saved, gap = 1e3 * self.saved[i][candidate.recipe], self.loss * self.errors[i][candidate]
        return f"{count}: saves {saved:.3f} ms, for a loss gap of {_gap(gap)} alone"

    def write(self, path: str | PathLike[str]) -> None:
        """Write the policy file. OptionError if it cannot be written."""
        path = Path(path)
        try:
            path.write_text(self.to_toml(path.parent), encoding="utf-8")
        except OSError as error:
            raise OptionError(f"{path} cannot be written: {error.strerror}") from None

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the frontier, time against predicted loss gap, into an image, in the format of its suffix. OptionError if it
        cannot be written; Fp8CompileError if matplotlib is missing."""
        from ..reporting.plots import plot_frontier

        plot_frontier(self.to_dict(), self.summary(), path)


def _is_path(policy: str) -> bool:
    return policy.endswith(".toml") or "/" in policy or os.sep in policy


def _gap(gap: float) -> str:
    return f"{100 * gap:.3f}%"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    sides = "".join("<" if name in ("", "layers", "policy", "candidate") else ">" for name in head)
    return aligned(head, rows, sides).splitlines()


def _commented(lines: Sequence[str]) -> list[str]:
    return [f"# {line}".rstrip() for line in lines]


def _toml(value: Any) -> str:
    """A value of a rule. JSON's strings, booleans and lists are TOML's."""
    return json.dumps(value, ensure_ascii=True)
