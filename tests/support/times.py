"""Instead of `dryrun.estimate.Compiler`, which compiles for minutes: a nanosecond for each weight of a
linear, times a factor of the recipe that a policy gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from fp8compile.config.policy import Policy
from fp8compile.config.policy.patterns import fits
from fp8compile.dryrun.estimate_result import Cost

FACTORS = {"delayed": 0.5, "tensorwise": 0.6, "rowwise": 0.7, "rowwise_with_gw_hp": 0.8, "blockwise": 0.65}


@dataclass(frozen=True)
class Compiler:
    factors: ClassVar[Mapping[str, float]] = FACTORS
    model: Any
    modules: Any
    args: Any
    kwargs: Any
    device: Any
    options: Any
    container: Any

    def bf16(self) -> dict[str, Cost]:
        return self._costs(Policy())

    def fp8(self) -> tuple[dict[str, Cost], None]:
        return self._costs(self.options["policy"]), None

    def _costs(self, policy: Policy) -> dict[str, Cost]:
        linears = {name: part for name, part in self.model.named_modules() if isinstance(part, nn.Linear)}
        return {
            name: Cost(seconds=1e-9 * part.weight.numel() * self._factor(policy, name))
            for name, part in linears.items()
        }

    def _factor(self, policy: Policy, name: str) -> float:
        rule = next((rule for rule in policy.rules[: policy.own] if fits(rule.module or (), name)), None)
        return 1.0 if rule is None or rule.fp8 == "off" else self.factors[str(rule.recipe)]
