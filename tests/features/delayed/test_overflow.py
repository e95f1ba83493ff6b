"""The calls after an overflow or an underflow: the device alone moves the scale, and no call is cold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import hooks
from tests.support.harness import compiled, grads_of, histories, noise, sqnr
from tests.support.models import Mlp, Positive, Stack, linear, make
from tests.support.reference import Reference

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


def seen(run: Callable[..., Any], value: float, grad: float | None = 1.0) -> float:
    """One training call on x = value with weights of 1. Returns x after the cast: less if it saturated."""
    x = torch.full((16, 128), value, requires_grad=True)
    y = run(x)
    if grad is not None:
        y.backward(torch.full_like(y, grad))
    return round(y[0, 0].item() / 128, 2)


def test_the_steps_after_a_jump() -> None:
    """100 saturates with the scale of 1. The next step has the scale of 100; and no step is cold."""
    model = linear(1.0)
    run = compiled(model)
    with hooks.cold_calls() as cold:
        for _ in range(3):
            assert seen(run, 1.0) == 1.0
        assert [seen(run, 100.0) for _ in range(2)] == [1.0, 100.0]
        assert [seen(run, 300.0) for _ in range(2)] == [100.0, 300.0]
    assert cold == [True] + [False] * 6


ZERO = 0.0  # the gradient; None: no backward


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        # twice the range of the scale is not yet an overflow: the scale is not due
        ({"interval": 9}, [(1.0, 1.0), (1.9, 1.0), (1.9, 1.0), (2.1, 1.0), (2.1, 2.1)]),
        ({"interval": 9}, [(1.0, 1.0), (100.0, 1.0), (100.0, 100.0), (900.0, 100.0), (900.0, 900.0)]),
        ({"interval": 9, "on_overflow": "saturate"}, [(1.0, 1.0), (100.0, 1.0), (100.0, 1.0)]),
        # a gradient that has only been zero makes calls cold: a slot that has a scale uses it
        ({}, [(1.0, 1.0, ZERO), (1.0, 1.0, ZERO), (1000.0, 1.0, ZERO), (1000.0, 1000.0, ZERO)]),
        ({"on_overflow": "saturate"}, [(1.0, 1.0), *[(2.0**-30, 0.0)] * 3]),
        ({}, [(1.0, 1.0), *[(2.0**-30, 0.0)] * 2, (2.0**-30, 2.0**-30)]),
        ({}, [(1.0, 1.0), (0.0, 0.0), (3.0, 1.0)]),  # zeros are no underflow: the history stays
        ({}, [(1.0, 1.0), (1e6, 1.0), (1.0, 0.0), (1.0, 1.0)]),  # a spike is forgotten
    ],
    ids=[
        *("fits", "overflows", "saturate", "zero gradient", "underflow, saturate", "underflow", "zeros"),
        "spike",
    ],
)
def test_what_each_call_reads(options: dict[str, Any], calls: list[tuple]) -> None:
    """Calls are (x, x as it is read, gradient); 1.0 is the gradient if it is not given."""
    run = compiled(linear(1.0), **options)
    for x, expected, *grad in calls:
        assert seen(run, x * 2.0**40, *grad) / 2.0**40 == pytest.approx(expected, rel=0.01, abs=2.0**-40)


@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize(
    ("options", "covered"), [({}, 2048.0), ({"margin": 0}, 1.0), ({"fp8_format": "e4m3"}, 8.0)], ids=str
)
def test_a_gradient(options: dict[str, Any], covered: float) -> None:
    """A gradient has headroom. One that saturates all the same, by 100 times here, fits in the next step."""
    run = compiled(linear(1.0), **options)
    far = 100.0 * covered
    for grad, expected in (
        (1.0, 1.0),
        (covered, covered),
        (covered * far, covered * covered),
        (covered * far, covered * far),
    ):
        x = torch.ones(16, 128, requires_grad=True)
        run(x).backward(torch.full((16, 128), grad))
        assert x.grad is not None and x.grad[0, 0].item() == pytest.approx(128 * expected)


# -- several tensors at once


def chain() -> nn.Module:
    return Stack(*map(Positive, range(4)))


def step(
    run: Callable[[Tensor], Tensor], model: nn.Module, inputs: float = 1.0, grads: float = 1.0
) -> list[Tensor]:
    """A training call on batches times these factors: its output, and all gradients."""
    x = (noise(32, 128, seed=1).abs() * inputs).requires_grad_()
    model.zero_grad()
    y = run(x)
    y.backward(noise(32, 128, seed=2).abs() * grads)
    return [y.detach(), x.grad, *grads_of(model).values()]


def load(model: nn.Module, factor: float) -> None:
    """Multiplies all weights by a factor, as if other weights were loaded, which nothing notices."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.detach().copy_(weight * factor)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 8.0),
        ({}, 64.0),
        ({"interval": 3}, 64.0),
        ({"margin": 1}, 8.0),
        ({"on_overflow": "saturate"}, 64.0),
    ],
    ids=str,
)
def test_weights_loaded_later_against_the_reference(options: dict[str, Any], factor: float) -> None:
    """On exact numbers, state, outputs and gradients are the reference's bitwise, step by step."""
    model = chain()
    for weight in model.parameters():
        nn.init.constant_(weight, 1.75 / 128)
    reference = Reference(model, **options)
    run = compiled(model, **options)
    with hooks.cold_calls() as cold:
        for call in range(8):
            if call in (2, 6):
                load(model, factor)
                load(reference.model, factor)
            sides = []
            for side, parameters in ((run, model), (reference, reference.model)):
                x = torch.full((16, 128), 1.75, requires_grad=True)
                parameters.zero_grad()
                y = side(x)
                y.backward(torch.full_like(y, 1.75))
                sides.append([y, x.grad, *grads_of(parameters).values()])
            for got, expected in zip(*sides, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
            moved = {key: (slot.history, slot.scale) for key, slot in reference.slots.items()}
            assert histories(model) == moved, call
    assert cold == [True] + [False] * 7


def test_an_infinity_after_an_overflow() -> None:
    """Nothing moves: the call after it is the one after the overflow."""
    run = compiled(linear(1.0))
    assert [seen(run, value) for value in (1.0, 1000.0)] == [1.0, 1.0]
    x = torch.full((16, 128), 500.0)
    x[3, 5] = float("inf")
    y = run(x)
    assert not y[3].isfinite().any() and y[0, 0].item() / 128 == pytest.approx(500.0)
    y.sum().backward()
    assert [seen(run, 3000.0) for _ in range(2)] == [1000.0, 3000.0]


# -- tensors that become much smaller than their history


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    ("weights", "inputs", "grads"), [(1e-3, 1.0, 1.0), (1.0, 1e-5, 1.0), (1.0, 1.0, 1e-6)], ids=str
)
@pytest.mark.parametrize(
    "options", [{}, {"amax_history_len": 64}, {"interval": 4, "margin": 2}, {"fp8_format": "e4m3"}], ids=str
)
def test_what_a_spike_leaves(weights: float, inputs: float, grads: float, options: dict[str, Any]) -> None:
    """A layer is exact two calls after it is smaller, whatever the histories remember; what it has hidden of
    the next layer, as many calls later."""
    model, plain = chain(), chain()
    run = compiled(model, **options)

    def error(inputs: float = 1.0, grads: float = 1.0) -> float:
        pairs = zip(step(plain, plain, inputs, grads), step(run, model, inputs, grads), strict=True)
        return min(sqnr(*pair) for pair in pairs)

    before = [error() for _ in range(4)]
    for net in (model, plain):
        load(net, weights)
    after = [error(inputs, grads) for _ in range(12)]
    assert before[-1] > 24 and min(after[-3:]) > before[-1] - 6, (before, after)


def test_one_odd_batch_changes_no_scale() -> None:
    model = linear(1.0)
    run = compiled(model)
    seen(run, 1.0)
    (before,) = (slot.scale() for (_, role, _), slot in hooks.slots_of(model).items() if role == "input")
    seen(run, 1e-7)
    (after,) = (slot.scale() for (_, role, _), slot in hooks.slots_of(model).items() if role == "input")
    assert before == after and seen(run, 1.0) == 1.0


def test_no_warm_call_runs_unfused() -> None:
    """Spikes, jumps and drops of inputs and of the loss."""
    run = compiled(make(Mlp))
    with hooks.cold_calls() as cold:
        for step, (inputs, loss) in enumerate([(1, 1), (1e3, 1), (1, 1e4), (1e-4, 1e-4), (1, 1), (1e4, 1)]):
            run(noise(16, 128, seed=step) * inputs).square().sum().mul(loss).backward()
    assert cold == [True] + [False] * 5
