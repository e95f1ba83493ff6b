"""What the log says of overflows, underflows and tensors that are not finite, and when the host looks."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from tests.support import hooks
from tests.support.harness import compiled, noise
from tests.support.models import Mlp, linear, make

pytestmark = [pytest.mark.shares_graphs, pytest.mark.compat, pytest.mark.usefixtures("interpreted")]


class Named(nn.Module):
    """A linear under a name of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, linear(1 / 128))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.name)(x)


def layers(names: str = "a b c") -> list[nn.Module]:
    made = [Named(name) for name in names.split()]
    for layer in made:
        layer.compile(backend="fp8", options={"policy": {"rules": [{"fp8": "on"}]}})
    return made


def step(made: list[nn.Module], factor: float = 1.0, grad: float = 1.0) -> None:
    """A training step of layers side by side. The input of the second one is multiplied by a factor."""
    x = noise(16, 128, seed=1).requires_grad_()
    outs = [layer(x * factor if i == 1 else x) for i, layer in enumerate(made)]
    torch.autograd.backward(outs, [torch.full_like(y, grad) for y in outs])


def said(caplog: Any, words: str) -> list[str]:
    return [text for record in caplog.records if words in (text := record.getMessage())]


def test_a_line_names_what_did_not_fit_since_the_last_one(caplog: Any) -> None:
    made = layers()
    with hooks.noticed_at_once(), caplog.at_level(logging.INFO, "fp8compile"):
        for factor in (1.0, 1.0, 1000.0, 1.0, 1.0, 1e-4, 1.0):
            step(made, factor)
    first, second = said(caplog, "scales did not fit")
    assert first.endswith(": b.weight (input): 1 overflow")
    assert second.endswith(": b.weight (input): 1 underflow"), "later"
    (row,) = [row for row in fp8compile.stats(made[1]) if row["role"] == "input"]
    found = [row[f"{what}_calls"] for what in ("overflow", "underflow", "not_finite")]
    assert (row["name"], found) == ("b.weight", [1, 1, 0])


@pytest.mark.parametrize(
    ("factor", "grad", "named"),
    [(math.nan, math.inf, "b.weight (input)"), (1.0, math.inf, "a.weight (gradient)")],
)
def test_the_first_tensor_that_is_not_finite_is_named_once(
    factor: float, grad: float, named: str, caplog: Any
) -> None:
    made = layers()
    with hooks.noticed_at_once():
        for _ in range(2):
            step(made)
            step(made, factor, grad)
        step(made)
    (line,) = said(caplog, "infinity or a NaN")
    assert named in line


def test_the_host_looks_at_its_own_pace(caplog: Any, monkeypatch: Any) -> None:
    """Not between two looks, so that a warm step waits for nothing, and not while a graph is captured."""
    from fp8compile.features.delayed import notices

    now = [100.0]
    monkeypatch.setattr(notices.time, "monotonic", lambda: now[0])
    run = compiled(make(Mlp))
    with hooks.noticed_at_once(), monkeypatch.context() as patch, caplog.at_level(logging.INFO, "fp8compile"):
        patch.setattr(notices, "PACE", 10.0)
        for at, factor in ((100.0, 1.0), (101.0, 1.0), (102.0, 1000.0), (109.0, 1000.0)):
            now[0] = at
            run(noise(16, 128) * factor).sum().backward()
        assert not said(caplog, "scales did not fit")
        now[0] = 111.0
        with hooks.capturing():
            notices.look()
        assert not said(caplog, "scales did not fit")
        run(noise(16, 128)).sum().backward()
        assert len(said(caplog, "scales did not fit")) == 1


def test_a_state_that_is_loaded_brings_no_line(caplog: Any) -> None:
    """Of what its run has met, that run has told."""
    model = make(Mlp)
    run = compiled(model)
    with hooks.noticed_at_once():
        for factor in (1.0, 1.0, 1e4, 1e4):
            run(noise(16, 128) * factor).sum().backward()
    caplog.clear()
    state = fp8compile.ScalingState(model).state_dict()
    other = make(Mlp)
    again = compiled(other)
    fp8compile.ScalingState(other).load_state_dict(state)
    with hooks.noticed_at_once(), caplog.at_level(logging.INFO, "fp8compile"):
        for _ in range(2):
            again(noise(16, 128) * 1e4).sum().backward()
    assert not said(caplog, "scales did not fit")
    assert fp8compile.stats(other).rows()[0]["overflow_calls"] == 1
