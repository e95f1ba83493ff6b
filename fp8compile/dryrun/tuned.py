"""The result of `fp8compile.tune`: the policy, as a commented file, and the candidates that were compared."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ..config.policy import Policy, load
from ..errors import OptionError
from ..reporting.columns import aligned
from .candidates import Choice, LayerGroup, tables


@dataclass(frozen=True)
class Whole:
    """A whole policy that was measured: its error and, if that is small enough, its estimated seconds a step (else inf)."""

    name: str
    choice: Choice
    error: float
    seconds: float


@dataclass(frozen=True)
class Tuned:
    """The fastest policy whose gradients have a relative error of at most `max_error`. ``str()`` has the tables, ``to_toml()``
    the policy as a file, ``write(path)`` writes it, ``to_dict()`` is for JSON.

    `policy` can be given to the backend: ``options={"policy": tuned.policy}``. `error` is its measured relative error of
    gradients, `seconds` its estimated time of a step (forward and backward) on `device`, `bf16` that of bf16. `speedup` is
    their ratio. docs/tune.md has the definitions.
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
        return {group.name: candidate for group, candidate in zip(self.groups, self.chosen.choice, strict=True)}

    def rows(self) -> list[dict[str, Any]]:
        """A flat dict for each group and candidate: "layers", "candidate", "error" (with this group alone in FP8), "seconds"
        (saved a step), "chosen"."""
        return [
            {"layers": name, "candidate": candidate, "error": error, "seconds": seconds, "chosen": candidate == chosen}
            for (name, chosen), row in zip(self.choice.items(), self.alone, strict=True)
            for candidate, (seconds, error) in row.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """{"model", "device", "max_error", "error", "seconds", "bf16_seconds", "speedup", "choice", "rows", "policies":
        [{"name", "error", "seconds", "chosen"}], "toml"}, for JSON. "seconds" is None for a policy above `max_error`."""
        policies = []
        for whole in self.wholes:
            seconds = None if whole.seconds == math.inf else whole.seconds
            policies.append({"name": whole.name, "error": whole.error, "seconds": seconds, "chosen": whole is self.chosen})
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
            f"{self.model} on {self.device}: {self.speedup:.2f}x, {1e3 * self.bf16:.4g} ms in bf16, {1e3 * self.seconds:.4g} "
            f"ms tuned (estimated, forward and backward); error of gradients {self.error:.4f}, at most {self.max_error:g}"
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
        lines = [
            f"# Chosen by `fp8compile tune`: {self.summary()}.",
            "# Times are estimates: docs/tune.md. Layers that no rule names are left to the policy that is extended.",
            "",
            f"extends = {json.dumps(made['extends'])}",
        ]
        for rule, group in zip(made["rules"], self.groups, strict=True):
            lines += ["", f"# layers: {len(group.modules)}", "[[rules]]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in rule.items()]  # strings, booleans, lists: also TOML
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
