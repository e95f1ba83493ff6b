"""The call after an overflow: each tensor that the scale of its slot would saturate is scaled by its current amax."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import hooks
from tests.support.harness import Pair, compiled, grads_of, histories, like, noise, sqnr
from tests.support.models import Mlp, Positive, Stack, linear, make
from tests.support.reference import Reference

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


def seen(run, value: float, grad: float | None = 1.0) -> float:
    """One training call on x = value with weights of 1. Returns x after the cast: less than value if x saturated."""
    x = torch.full((16, 128), value, requires_grad=True)
    y = run(x)
    if grad is not None:
        y.backward(torch.full_like(y, grad))
    return round(y[0, 0].item() / 128, 2)


def cold(model: nn.Module) -> dict[str, bool]:
    return {role: cold for (_, role, _), cold in hooks.cold(model).items()}


def test_the_step_after_a_jump() -> None:
    """100 saturates with the scale of 1. The next step's 300 does not: its scale comes from its own amax, not from 100."""
    model = linear(1.0)
    run = compiled(model)
    for _ in range(20):
        assert seen(run, 1.0) == 1.0
    assert seen(run, 100.0) == 1.0
    assert cold(model) == {"input": True, "weight": False, "gradient": False}
    assert seen(run, 300.0) == 300.0
    assert not cold(model)["input"]
    assert seen(run, 310.0) == 300.0  # warm again


@pytest.mark.parametrize("jump", [1.9, 2.1])
def test_headroom(jump: float) -> None:
    """Twice the range of the scale is not yet an overflow."""
    model = linear(1.0)
    run = compiled(model)
    seen(run, 1.0)
    seen(run, jump)
    assert seen(run, 8 * jump) == pytest.approx(jump if jump < 2 else 8 * jump, abs=0.01)


@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize(("options", "covered"), [({}, 2048.0), ({"margin": 0}, 1.0), ({"fp8_format": "e4m3"}, 8.0)], ids=str)
def test_a_gradient(options: dict[str, Any], covered: float) -> None:
    """A gradient has headroom. One that saturates all the same, by 100 times here, is scaled by its amax in the next step."""
    model = linear(1.0)
    run = compiled(model, **options)
    far = 100.0 * covered
    for grad, expected in ((1.0, 1.0), (covered, covered), (covered * far, covered * covered), (far * far, far * far)):
        x = torch.ones(16, 128, requires_grad=True)
        run(x).backward(torch.full((16, 128), grad))
        assert x.grad[0, 0].item() == pytest.approx(128 * expected)


def test_between_forward_and_backward_of_others() -> None:
    """An evaluation, and a second forward, before the backward of the first."""
    model = linear(1.0)
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
    model = linear(1.0)
    run = compiled(model)
    for value in (1.0, 2.0):
        seen(run, value)
    assert seen(run, 100.0, None) == 2.0
    assert seen(run, 900.0, None) == 900.0
    seen(run, 100.0)
    assert seen(run, 1000.0) == 900.0  # a warm call


def test_after_patience_has_run_out() -> None:
    """After 20 calls with zero gradients the host no longer looks for cold slots, but it still looks for overflows."""
    model = linear(1.0)
    run = compiled(model)
    for _ in range(20):
        seen(run, 1.0, 0.0)
    assert cold(model)["gradient"]
    assert seen(run, 100.0, 0.0) == 1.0
    assert seen(run, 300.0, 0.0) == 300.0
    assert seen(run, 400.0, 0.0) == 300.0


@pytest.mark.feature("schedule")
def test_a_phase_that_observes() -> None:
    """An overflow in a high-precision phase clips nothing. The first FP8 step uses the scale from it, or the current amax."""
    model = linear(1.0)
    run = compiled(model, policy={"schedule": {"warmup_steps": 3}})
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for value in (1.0, 1.0, 100.0):
        assert seen(run, value) == value
        optimizer.step()
    assert seen(run, 300.0) == 300.0


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("options", [{}, {"interval": 4}, {"amax_history_len": 2, "margin": 2}], ids=str)
def test_against_the_reference(options: dict[str, Any]) -> None:
    """Outputs, gradients and state when inputs and gradients jump."""
    factors = (1, 9, 1, 100, 250, 1, 1, 90, 900, 1, 40)
    pair = Pair(make(Mlp), **options)
    for step, factor in enumerate(factors):
        x = noise(16, 128, seed=step, scale=float(factor))
        pair.step(x, grad=like(x, step) * factors[-1 - step])
    pair.assert_fp8()


def test_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model = make(Mlp)
    run = compiled(model)

    def lines(*factors: float) -> list[str]:
        caplog.clear()
        for factor in factors:
            run(noise(16, 128, seed=3) * factor).sum().backward()
        return [record.getMessage() for record in caplog.records if "overflow" in record.getMessage()]

    with caplog.at_level(logging.INFO, "fp8compile"), hooks.overflow_lines() as said:
        (line,) = lines(1.0, 1.0, 100.0, 1.0, 1.0)
        amax = noise(16, 128, seed=3).abs().max().item()
        assert f"up.weight (input): amax {100 * amax:.4g}, its scale covered {amax:.4g}" in line
        assert "down.weight (input)" in line and "(weight)" not in line
        lines(*[1.0] * 20)
        assert not lines(1e4, 1.0)  # too soon
        assert said.missed >= 2


# -- a jump that hides others


def chain() -> nn.Module:
    return Stack(*map(Positive, range(4)))


def load(model: nn.Module, factor: float) -> None:
    """Multiplies all weights by a factor, as if other weights were loaded."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.detach().copy_(weight * factor)


def trained(run, model: nn.Module) -> dict[str, Tensor]:
    """A training call: its output, and the gradients of all weights."""
    x = noise(32, 128, seed=1).abs().requires_grad_()
    model.zero_grad()
    y = run(x)
    y.backward(noise(32, 128, seed=2).abs())
    return {"output": y.detach(), "input": x.grad, **grads_of(model)}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("options", "factor"),
    [({}, 8.0), ({}, 64.0), ({"interval": 3}, 64.0), ({"margin": 1}, 8.0), ({"on_overflow": "saturate"}, 64.0)],
    ids=str,
)
def test_weights_loaded_later_against_the_reference(options: dict[str, Any], factor: float) -> None:
    """On exact numbers, state, outputs and gradients are the reference's bitwise, step by step."""
    model = chain()
    for weight in model.parameters():
        nn.init.constant_(weight, 1.75 / 128)
    reference = Reference(model, **options)
    run = compiled(model, **options)
    cold = []
    for call in range(8):
        if call in (2, 6):
            load(model, factor)
            load(reference.model, factor)
        paths = reference.paths.values()
        cold.append(not paths or any(path.cold or any(x.overflowed for x in path.slots) for path in paths))
        sides = []
        for side, parameters in ((run, model), (reference, reference.model)):
            x = torch.full((16, 128), 1.75, requires_grad=True)
            parameters.zero_grad()
            y = side(x)
            y.backward(torch.full_like(y, 1.75))
            sides.append([y, x.grad, *grads_of(parameters).values()])
        for got, expected in zip(*sides, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
        assert histories(model) == {key: (slot.history, slot.scale) for key, slot in reference.slots.items()}, call
        assert hooks.cold(model) == {key: slot.cold for key, slot in reference.slots.items()}, call
    assert cold == [True] + [call in (3, 4, 7) and "on_overflow" not in options for call in range(1, 8)]


def test_gradients_of_one_layer_hide_those_of_others() -> None:
    """In the first step, only the last layer's gradient jumps visibly, 100,000 times, and saturates. In the second all jump."""
    model, plain = chain(), chain()
    run = compiled(model)
    ratios = []
    for factor in (1.0, 1.0, 1e5, 5e5, 5e5, 5e5):
        sides = []
        for side, parameters in ((plain, plain), (run, model)):
            parameters.zero_grad()
            x = noise(32, 128, seed=1).abs().requires_grad_()
            y = side(x)
            y.backward(noise(32, 128, seed=2).abs() * factor)
            sides.append({"input": x.grad, **grads_of(parameters)})
        ratios.append(min(sqnr(x, sides[1][name]) for name, x in sides[0].items()))
    assert ratios[2] < 1 and min(ratios[:2] + ratios[3:]) > 24, ratios


@pytest.mark.parametrize("on_overflow, expected", [("current", 1000.0), ("saturate", 1.0)])
def test_a_call_that_is_cold_for_another_reason(on_overflow: str, expected: float) -> None:
    """A gradient that has only been zero makes calls cold. Nothing saturates in them, unless on_overflow is "saturate"."""
    model = linear(1.0)
    run = compiled(model, on_overflow=on_overflow)
    assert [seen(run, 1.0, 0.0) for _ in range(2)] == [1.0, 1.0]
    assert seen(run, 1000.0, 0.0) == expected


@pytest.mark.slow
def test_forwards_before_the_backwards_of_others() -> None:
    """One call that saturates and two cold calls, before any backward: each backward is cold or warm as its forward was."""
    model, plain = chain(), chain()
    run = compiled(model)
    for _ in range(2):
        trained(run, model)
    for side in (model, plain):
        load(side, 5.0)
    expected = trained(plain, plain)
    x, grad = (noise(32, 128, seed=seed).abs() for seed in (1, 2))
    outs = [run(x) for _ in range(3)]
    assert [sqnr(expected["output"], y) > 24 for y in outs] == [False, True, True]
    for i, y in enumerate(outs):
        model.zero_grad()
        y.backward(grad)
        assert all((sqnr(expected[name], got) > 24) == (i > 0) for name, got in grads_of(model).items()), i


def test_an_infinity_behind_an_overflow() -> None:
    """An infinity gives no scale: the other rows are cast with the scale of the overflow, not with 1."""
    model = linear(1.0)
    run = compiled(model)
    assert [seen(run, value) for value in (1.0, 1000.0)] == [1.0, 1.0]
    x = torch.full((16, 128), 500.0)
    x[3, 5] = float("inf")
    y = run(x)
    assert not y[3].isfinite().any() and y[0, 0].item() / 128 == pytest.approx(500.0)
    y.sum().backward()
    assert seen(run, 3000.0) == 3000.0  # nothing moved: this is the call after the overflow


# -- tensors that become much smaller than their history


def smaller_weights(model: Any) -> None:
    load(model, 1e-3)


def smaller_layer(model: Any) -> None:
    """One that is initialised again."""
    model.inner[1].linear.weight.data.mul_(1e-4)


def smaller_batch(model: Any) -> None:
    model.inputs = 1e-5


def smaller_loss(model: Any) -> None:
    model.grads = 1e-6


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("change", [smaller_weights, smaller_layer, smaller_batch, smaller_loss])
@pytest.mark.parametrize(
    "options", [{}, {"amax_history_len": 64}, {"interval": 4, "margin": 2}, {"fp8_format": "e4m3"}], ids=str
)
def test_what_a_spike_leaves(change: Any, options: dict[str, Any]) -> None:
    """The call after the first one that is smaller is exact, whatever the histories remember."""
    model, plain = chain(), chain()
    run = compiled(model, **options)

    def errors() -> list[float]:
        found = []
        for side, net in ((plain, plain), (run, model)):
            x = (noise(32, 128, seed=1).abs() * getattr(net, "inputs", 1.0)).requires_grad_()
            net.zero_grad()
            y = side(x)
            y.backward(noise(32, 128, seed=2).abs() * getattr(net, "grads", 1.0))
            found.append([y.detach(), x.grad, *grads_of(net).values()])
        return [sqnr(*pair) for pair in zip(*found, strict=True)]

    before = [min(errors()) for _ in range(4)]
    for net in (model, plain):
        change(net)
    after = [min(errors()) for _ in range(6)]
    assert before[-1] > 24 and min(after[1:]) > before[-1] - 6, (before, after)
    assert not any(hooks.cold(model).values())


def test_an_underflow_is_left_alone_where_overflows_are() -> None:
    model = linear(1.0)
    run = compiled(model, on_overflow="saturate")
    seen(run, 1.0)
    assert [seen(run, 2.0**-30) for _ in range(3)] == [0.0] * 3 and not any(cold(model).values())


def test_nothing_at_all_is_no_underflow() -> None:
    """A tensor of zeros has an amax of zero: the history stays."""
    model = linear(1.0)
    run = compiled(model)
    seen(run, 1.0)
    seen(run, 0.0)
    assert not any(cold(model).values()) and seen(run, 1.0) == 1.0


def test_one_odd_batch_changes_no_scale() -> None:
    """Where the host does not know yet (on a GPU, it learns later), the batch after it is as exact as ever."""
    model = linear(1.0)
    run = compiled(model)
    seen(run, 1.0)
    (before,) = (slot.scale() for (_, role, _), slot in hooks.slots_of(model).items() if role == "input")
    seen(run, 1e-7)
    (after,) = (slot.scale() for (_, role, _), slot in hooks.slots_of(model).items() if role == "input")
    assert before == after and cold(model)["input"]
    assert seen(run, 1.0) == 1.0 and not cold(model)["input"]


def test_a_spike_of_one_batch_is_forgotten() -> None:
    """The call after it is cold, and the next one has the scale of before."""
    model = linear(1.0)
    run = compiled(model)
    assert [seen(run, value) for value in (1.0, 1e6, 1.0, 1.0)] == [1.0, 1.0, 1.0, 1.0]
    assert not cold(model)["input"]
