"""Optimizers that people have, with backend="fp8": it learns, and the FP8 copies of weights follow each step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile.optim import AdamW
from tests.support.harness import ALL_FP8, noise
from tests.support.models import ResidualMlp, make

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


class Both:
    """Two optimizers for the two kinds of parameters, as Muon's users have them."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        self.parts = [torch.optim.Muon(matrices, lr=0.03), torch.optim.AdamW(others, lr=3e-3)]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def torchao(model: nn.Module) -> Any:
    return pytest.importorskip("torchao.optim").AdamW8bit(model.parameters(), lr=3e-3)


def bitsandbytes(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip("bitsandbytes")
    return library.optim.AdamW8bit(model.parameters(), lr=3e-3)


OTHERS: dict[str, Callable[[nn.Module], Any]] = {
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True),
    "ours": lambda model: AdamW(model.parameters(), lr=3e-3, compiled=False),
    "muon": Both,
    "torchao": torchao,
    "bitsandbytes": bitsandbytes,
}


def losses(optimizer: Callable[[nn.Module], Any], options: dict[str, Any] | None) -> list[float]:
    """Of 12 steps of two micro-batches; in high precision without `options`."""
    model = make(lambda: ResidualMlp(128))
    steps, found = optimizer(model), []
    target = make(lambda: nn.Linear(128, 128), seed=7)
    call: Callable[[Tensor], Tensor] = torch.compile(model, backend="fp8", options=options) if options else model
    for step in range(12):
        total = 0.0
        for micro in range(2):
            x = noise(64, 128, seed=2 * step + micro)
            loss = (call(x) - target(x).detach()).square().mean() / 2
            loss.backward()
            total += loss.item()
        steps.step()
        steps.zero_grad()
        found.append(total)
    return found


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("torchao", "muon")]


@pytest.mark.cases(test=2, slow=1)
@pytest.mark.parametrize("name", [*(name for name in OTHERS if name not in ("torchao", "muon")), *SLOW])
def test_it_learns_and_no_copy_is_stale(name: str) -> None:
    fp8 = {"policy": ALL_FP8, "recipe": "tensorwise"}
    plain = losses(OTHERS[name], None)
    found = losses(OTHERS[name], fp8)
    assert plain[-1] < 0.8 * plain[0]
    assert found != plain
    assert all(abs(a - b) <= 0.03 * b for a, b in zip(found, plain, strict=True))
    assert losses(OTHERS[name], {**fp8, "cache_weights": True}) == found
