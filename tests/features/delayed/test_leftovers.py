"""What cold calls leave in CUDA's caching allocator is given back once a model, and not while capturing."""

from __future__ import annotations

import pytest
import torch

from tests.support import hooks
from tests.support.harness import compiled
from tests.support.models import linear

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


def test_once_for_all_graphs_before_the_first_warm_call() -> None:
    events: list[str] = []
    layers = [compiled(linear(1.0)) for _ in range(3)]

    def step(value: float) -> list[str]:
        events.clear()
        x = torch.full((16, 128), value, requires_grad=True)
        for layer in layers:
            x = layer(x) / 128
            events.append("layer")
        x.backward(torch.ones_like(x))
        return list(events)

    usual = ["layer"] * 3
    with hooks.caching_allocator(events) as capturing:
        assert step(1.0) == usual  # cold
        capturing[0] = True
        assert step(1.0) == usual  # warm, but nothing may be freed
        capturing[0] = False
        assert step(1.0) == ["given back", *usual]
        assert step(1.0) == usual
        assert step(100.0) == usual  # an overflow: the next call is cold, too
        assert step(100.0) == step(100.0) == usual
