"""How long a step takes with many policies: the estimate of `fp8compile.estimate`, with the work in bf16 done once.

Repeated blocks are compiled one and two times, and extrapolated, where a model has three or more of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..config.policy import Policy
from ..devices.catalog import Device
from ..errors import Fp8CompileError, OptionError
from .autocast import wanted
from .estimate import Compiler, Costs, carried_on, repeated
from .sandbox import modules_of, taken


class Times:
    """Estimated times of training steps of one model on `device`: under bf16 autocast if a parameter is float32, and `here`, if
    autocast is on."""

    def __init__(
        self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: Device, here: bool = True
    ):
        from . import fake_gpu

        if (why := fake_gpu.unavailable()) is not None:
            raise Fp8CompileError(f"tune: no GPU can be described here, so no time can be estimated: {why}")
        self.device, self.model = device, taken(model)
        modules = modules_of((self.model, args, kwargs))
        self.compiler = Compiler(self.model, modules, args, kwargs, device, {}, {}, None, True)
        self.container: nn.Module | None = None
        with contextlib.suppress(OptionError):  # nothing repeats
            self.container, _ = repeated(modules)
        self.count = len(list(self.container.children())) if self.container is not None else 0
        self.autocast = wanted(modules, None) or (here and torch.is_autocast_enabled("cpu"))

    def bf16(self) -> Costs:
        return self._whole(self.compiler.plain)

    def fp8(self, policy: Policy) -> Costs:
        compiler = dataclasses.replace(self.compiler, options={"policy": policy, "device": self.device.key})
        return self._whole(lambda container=None, blocks=0: compiler.ours(container, blocks)[0])

    def _whole(self, costs: Callable[..., Costs]) -> Costs:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            if self.container is None:
                return costs()
            return carried_on(costs(self.container, 1), costs(self.container, 2), self.count)


def seconds(costs: Mapping[str, Any]) -> float:
    return sum(cost.seconds for cost in costs.values())


def of_modules(costs: Mapping[str, Any], modules: Mapping[str, Any]) -> dict[Any, float]:
    """Seconds by what `modules` maps a module to; all other modules are under None."""
    found: dict[Any, float] = {None: 0.0}
    for fqn, cost in costs.items():
        key = modules.get(fqn)
        found[key] = found.get(key, 0.0) + cost.seconds
    return found
