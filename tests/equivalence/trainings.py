"""The trainings of a case: a model with some features, by each of its protocols."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.equivalence.cases import Case
from tests.equivalence.features import MODELS, Feature
from tests.equivalence.protocols import PROTOCOLS, Run
from tests.support.harness import ALL_FP8


def sgd(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


def trainings(
    case: Case, on: Sequence[Feature], run: type[Run] = Run, lr: float | None = None
) -> dict[str, Run]:
    """The trainings of a case, by protocol, with these of its features."""
    options: dict[str, Any] = {
        "policy": ALL_FP8,
        "recipe": case.recipe,
        "merge_matmuls": False,
        "recast_weights": False,
    }
    for feature in case.features:
        options |= feature.both.get(case.recipe, {})
    for feature in on:
        options |= feature.options
    how = {"backend": "fp8", "dynamic": options.pop("dynamic", False), "options": options}

    def compiled(model: nn.Module) -> Callable[..., Tensor]:
        ways = [f.compiled for f in on if f.compiled is not None]
        call: Any = ways[0](model, how) if ways else torch.compile(model, **how)
        for feature in on:
            call = feature.called(model, call) if feature.called is not None else call
        return call

    chosen = next((f for f in case.features if f.optimizer is not None), None)
    # where gradients may differ, weights stay as they are: else forwards differ, too
    lr = (1e-2 if any(f.bitwise for f in case.features) else 0.0) if lr is None else lr
    optimizer = (lambda m: chosen.optimizer(m, chosen in on)) if chosen is not None else partial(sgd, lr=lr)
    apart = any(f.around is not contextlib.nullcontext for f in on)  # Dynamo does not know what differs
    if apart:
        torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        for feature in on:
            stack.enter_context(feature.around())
        runs = {
            name: run(MODELS[case.model], compiled, optimizer)(PROTOCOLS[name]) for name in case.protocols
        }
        ignored = [f.name for f in on if not any(map(f.acted, runs.values()))]
    if apart:
        torch._dynamo.reset()
    assert not ignored, f"{ignored} did nothing"
    return runs
