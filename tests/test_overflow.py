"""What follows an overflow: the step after a jump is scaled by its current amax, the tensors that jumped and no others."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from harness import Pair, compiled, histories, like, noise
from models import Mlp, make
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8compile import watch
from fp8compile.state import slots_of

pytestmark = pytest.mark.usefixtures("interpreted")


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def linear() -> nn.Linear:
    module = Linear(128, 128, bias=False)
    nn.init.constant_(module.weight, 1.0)
    return module


def seen(run, value: float, grad: float | None = 1.0, eager_checkpoint: bool = False) -> float:
    """One training call on x = value, by a weight of 1: what became of x, which is less where it was saturated."""
    x = torch.full((16, 128), value, requires_grad=True)
    y = checkpoint(run, x, use_reentrant=False) if eager_checkpoint else run(x)
    if grad is not None:
        y.backward(torch.full_like(y, grad))
    return round(y[0, 0].item() / 128, 2)


def ages(model: nn.Module) -> dict[str, float]:
    return {role: slot.page.tensor[slot.row, 2].item() for (_, role, _), slot in slots_of(model).items()}


@pytest.mark.parametrize("eager_checkpoint", [False, True])
def test_the_step_after_a_jump(eager_checkpoint: bool) -> None:
    """100 is saturated to what 1 covers. The next step's 300 is not, and is scaled by its own amax, not by that of 100."""
    model = linear()
    run = compiled(model)
    for _ in range(20):
        assert seen(run, 1.0, eager_checkpoint=eager_checkpoint) == 1.0
    assert seen(run, 100.0, eager_checkpoint=eager_checkpoint) == 1.0
    assert ages(model) == {"input": -1.0, "weight": 0.0, "gradient": 0.0}
    assert seen(run, 300.0, eager_checkpoint=eager_checkpoint) == 300.0
    assert ages(model)["input"] == 0.0
    assert seen(run, 310.0, eager_checkpoint=eager_checkpoint) == 300.0  # warm again


def test_saturate() -> None:
    model = linear()
    run = compiled(model, on_overflow="saturate")
    seen(run, 1.0)
    assert [seen(run, value) for value in (100.0, 300.0, 300.0)] == [1, 100, 300]


@pytest.mark.parametrize("jump", [1.9, 2.1])
def test_headroom(jump: float) -> None:
    """Twice what the scale covers is none yet."""
    model = linear()
    run = compiled(model)
    seen(run, 1.0)
    seen(run, jump)
    assert seen(run, 8 * jump) == pytest.approx(jump if jump < 2 else 8 * jump, abs=0.01)


def test_a_gradient() -> None:
    model = linear()
    run = compiled(model)
    for grad, expected in ((1.0, 1.0), (100.0, 1.0), (500.0, 500.0), (600.0, 500.0)):
        x = torch.ones(16, 128, requires_grad=True)
        run(x).backward(torch.full((16, 128), grad))
        assert x.grad[0, 0].item() == pytest.approx(128 * expected)


def test_between_forward_and_backward_of_others() -> None:
    """Evaluation, and a second forward before the backward of the first."""
    model = linear()
    run = compiled(model)
    seen(run, 1.0)
    first = run(torch.full((16, 128), 100.0))
    with torch.no_grad():
        run(torch.ones(16, 128))
    model.eval()
    run(torch.full((16, 128), 5000.0))
    model.train()
    second = run(torch.full((16, 128), 300.0))
    assert (first[0, 0].item() / 128, second[0, 0].item() / 128) == pytest.approx((1.0, 300.0))
    first.backward(torch.ones_like(first))
    second.backward(torch.ones_like(second))
    assert seen(run, 400.0) == 300.0


def test_forwards_without_backward() -> None:
    model = linear()
    run = compiled(model)
    for value in (1.0, 2.0):
        seen(run, value)
    assert seen(run, 100.0, None) == 2.0
    assert seen(run, 900.0, None) == 900.0
    seen(run, 1.0)
    assert seen(run, 1000.0) == 900.0  # and this is a warm call


def test_after_patience_has_run_out() -> None:
    """20 calls whose gradients are zero are enough for the host to stop looking for cold slots, not for overflows."""
    model = linear()
    run = compiled(model)
    for _ in range(20):
        seen(run, 1.0, 0.0)
    assert ages(model)["gradient"] == -1.0
    assert seen(run, 100.0, 0.0) == 1.0
    assert seen(run, 300.0, 0.0) == 300.0
    assert seen(run, 400.0, 0.0) == 300.0


def test_a_phase_that_observes() -> None:
    """An overflow in high precision is nobody's; the first step in FP8 has the scale that it made, or the current amax."""
    model = linear()
    run = compiled(model, policy={"schedule": {"warmup_steps": 3}})
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for value in (1.0, 1.0, 100.0):
        assert seen(run, value) == value
        optimizer.step()
    assert seen(run, 300.0) == 300.0


@pytest.mark.parametrize("options", [{}, {"interval": 4}, {"amax_history_len": 2, "margin": 2}], ids=str)
def test_against_the_reference(options: dict[str, Any]) -> None:
    """Outputs, gradients and state of jumps, in inputs and in gradients."""
    factors = (1, 9, 1, 100, 250, 1, 1, 90, 900, 1, 40)
    pair = Pair(make(Mlp), **options)
    for step, factor in enumerate(factors):
        x = noise(16, 128, seed=step, scale=float(factor))
        pair.step(x, grad=like(x, step) * factors[-1 - step])
    pair.assert_fp8()


def test_the_log(caplog, monkeypatch) -> None:
    monkeypatch.setattr(watch, "_Said", type("Said", (), {"at": float("-inf"), "missed": 0}))
    model = make(Mlp)
    run = compiled(model)
    with caplog.at_level(logging.INFO, "fp8compile"):
        for factor in (1.0, 1.0, 100.0, 1.0, 1.0):
            run(noise(16, 128, seed=3) * factor).sum().backward()
        amax = noise(16, 128, seed=3).abs().max().item()
        (line,) = [record.getMessage() for record in caplog.records if "overflow" in record.getMessage()]
        assert f"up.weight (input): amax {100 * amax:.4g}, its scale covered {amax:.4g}" in line
        assert "down.weight (input)" in line and "(weight)" not in line
        assert histories(model)
        for _ in range(20):
            run(noise(16, 128, seed=3)).sum().backward()
        caplog.clear()
        for factor in (1e4, 1.0):
            run(noise(16, 128, seed=3) * factor).sum().backward()
        assert not [record for record in caplog.records if "overflow" in record.getMessage()]  # too soon
        assert watch._Said.missed >= 2
