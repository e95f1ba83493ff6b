"""In the place of `dryrun.times.Times`, which compiles for minutes: FLOPs of each module, times a factor of its recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fp8compile
from fp8compile.config.policy import Policy, load
from fp8compile.dryrun.estimate_result import Cost

FACTORS = {"delayed": 0.5, "tensorwise": 0.6, "rowwise": 0.7, "rowwise_with_gw_hp": 0.8, "blockwise": 0.65}


class Times:
    factors: Mapping[str, float] = FACTORS

    def __init__(self, model: Any, args: Any, kwargs: Any, device: Any, here: bool = True) -> None:
        self.given, self.device = (model, args, kwargs), device

    def bf16(self) -> dict[str, Cost]:
        return self.fp8(load({"extends": "none", "rules": [{"fp8": "off"}]}))

    def fp8(self, policy: Policy) -> dict[str, Cost]:
        model, args, kwargs = self.given
        costs: dict[str, Cost] = {}
        for record in fp8compile.explain(model, *args, options={"policy": policy}, **kwargs).matmuls:
            cost = Cost(seconds=1e-9 * record.flops * self.factors.get(record.recipe, 1.0))
            costs[record.fqn] = costs.get(record.fqn, Cost()) + cost
        return costs
