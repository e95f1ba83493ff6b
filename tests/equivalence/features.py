"""What a user can switch on, each with its promise: the training with it equals the training without it.

A new feature is an entry of `FEATURES`. The suite trains with it on every model, by every protocol and recipe
that it takes, and beside every other feature.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.optim import AdamW
from tests.equivalence.protocols import Run
from tests.support import hooks
from tests.support.harness import ALL_FP8
from tests.support.models import Checkpointed, Gated, Lora, Mlp, Moe, ResidualMlp, Stack, Uses, make
from tests.support.reference_settings import RECIPES

BITWISE = math.inf
BF16 = torch.bfloat16
Options = Mapping[str, Any]

# -- models: shared by all cases, [batch, length, 128] -> the same --


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: make(Mlp),
    "gated": lambda: make(Gated, BF16),
    "checkpointed": lambda: make(lambda: Checkpointed(Gated())),
    "uses": lambda: make(Uses, BF16),
    "lora": lambda: make(Lora, BF16),
    "experts": lambda: make(Moe, BF16),
    "blocks": lambda: make(lambda: Stack(ResidualMlp(), ResidualMlp())),
}

# -- features --

ONE_SCALE = ("delayed", "tensorwise")
# how weights are scaled that are cast between calls
CURRENT_WEIGHTS = {"current_scaling": (False, True, False)}
POWERS = {"power_of_2_scale": True}


@dataclass(frozen=True, eq=False)
class Feature:
    """`options`: what switches it on. `both`: options of both sides, {recipe: options}: where the
    documentation says that the feature changes a setting, the side without it has this setting, too.
    `forward`, `backward`: outputs and gradients are equal, or differ by so many dB. `around`: a context of
    compilation and calls. `compiled(model, how)`: compiles the model in its own way. `called(model, call)`:
    wraps what is called. `optimizer(model, on)`: of both sides. `acted`: whether it did anything; one that is
    ignored would pass every comparison. `dear`: it compiles slowly, and is left to the slow tests.
    """

    name: str
    options: Options = field(default_factory=dict)
    both: Mapping[str, Options] = field(default_factory=dict)
    forward: float = BITWISE
    backward: float = BITWISE
    recipes: tuple[str, ...] = RECIPES
    models: tuple[str, ...] = tuple(MODELS)
    refuses: frozenset[str] = frozenset()  # protocols, and other features
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    compiled: Callable[[nn.Module, dict[str, Any]], Callable[..., Tensor]] | None = None
    called: Callable[[nn.Module, Callable[..., Tensor]], Callable[..., Tensor]] | None = None
    optimizer: Callable[[nn.Module, bool], torch.optim.Optimizer] | None = None
    acted: Callable[[Run], bool] = lambda run: True
    dear: bool = False

    @property
    def bitwise(self) -> bool:
        return self.backward == BITWISE


def _report(run: Run) -> Any:
    return fp8compile.report(run.model)


def _by_blocks(model: nn.Module, how: dict[str, Any]) -> Callable[..., Tensor]:
    for block in model.inner:  # type: ignore[union-attr]
        block.compile(**how)
    return model


def _in_place(model: nn.Module, how: dict[str, Any]) -> Callable[..., Tensor]:
    model.compile(**how)
    return model


def _skipping(*passes: str) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.dict(os.environ, FP8COMPILE_SKIP=",".join(passes))


def _measured(model: nn.Module, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Every second call is measured."""
    calls = itertools.count()

    def measured(x: Tensor) -> Tensor:
        fp8compile.stats(model, measure=model.training and next(calls) % 2 == 0)
        return call(x)

    return measured


def _casts(run: Run) -> bool:
    return len(run.casts) > 0


FEATURES = (
    Feature(
        "cache_weights",
        {"cache_weights": True},
        {"delayed": CURRENT_WEIGHTS},
        refuses=frozenset({"schedule"}),
        acted=_casts,
    ),
    Feature(
        "one copy of cached weights",
        {"cache_weights": True, "recast_weights": True},
        {"delayed": CURRENT_WEIGHTS},
        refuses=frozenset({"cache_weights", "recast_weights", "schedule"}),
        acted=_casts,
    ),
    Feature("recast_weights", {"recast_weights": True}),
    Feature(
        "fp8_weights",
        {"cache_weights": True},
        {"delayed": {**CURRENT_WEIGHTS, **POWERS}, "tensorwise": POWERS},
        optimizer=lambda model, on: AdamW(model.parameters(), lr=1e-2, compiled=False, fp8_weights=on),
        refuses=frozenset({"schedule"}),
        acted=_casts,
    ),
    Feature(
        "frozen",
        {"frozen": "fp8"},
        {"delayed": CURRENT_WEIGHTS},
        models=("lora",),
        recipes=("delayed", "tensorwise", "blockwise"),
        refuses=frozenset({"evaluation between", "loaded weights", "resumed", "schedule"}),
        acted=lambda run: any(map(hooks.frozen, run.model.parameters())),
    ),
    Feature(
        "save",
        {"save": "fp8"},
        backward=16.0,
        models=("gated", "mlp", "blocks", "lora"),
        # what adapters keep is read by matmuls, unless frozen weights are cast again
        acted=lambda run: isinstance(run.model, Lora) or any(graph.kept for graph in _report(run).graphs),
    ),
    Feature(
        "merge_matmuls",
        {"merge_matmuls": True},
        forward=18.0,
        backward=14.0,
        recipes=ONE_SCALE,
        models=("gated", "checkpointed"),
        acted=lambda run: any(record.merged for record in _report(run).matmuls),
    ),
    Feature(
        "weight_tiles",
        {"weight_tiles": True},
        forward=18.0,
        backward=14.0,
        recipes=("mxfp8",),
        models=("mlp", "gated", "blocks"),
    ),
    Feature(
        "serve",
        {"serve": "vllm"},
        forward=18.0,
        backward=14.0,
        recipes=("blockwise",),
        models=("mlp", "gated", "blocks", "lora"),
    ),
    Feature(
        "schedule",
        {"policy": {**ALL_FP8, "schedule": {"warmup_steps": 0}}},
        refuses=frozenset({"compiled in blocks"}),
    ),
    Feature("dynamic", {"dynamic": True}, models=("mlp", "gated", "lora"), dear=True),
    Feature("compiled in place", compiled=_in_place, refuses=frozenset({"compiled in blocks"})),
    Feature("compiled in blocks", compiled=_by_blocks, models=("blocks",)),
    Feature(
        "without optional passes",
        around=_skipping("recast", "scatters", "flatten", "all_gathers", "all_to_alls"),
    ),
    Feature("lowered", around=hooks.lowered, models=("mlp", "gated", "blocks", "lora"), dear=True),
    Feature(
        "measured calls",
        called=_measured,
        refuses=frozenset({"measured"}),
        acted=lambda run: any(row["sqnr"] is not None for row in fp8compile.stats(run.model).rows()),
    ),
)
