"""The call after an overflow: a tensor that its slot's scale would saturate is scaled by its amax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support import hooks
from tests.support.harness import compiled, grads_of, histories, noise, sqnr
from tests.support.models import Positive, Stack, linear
from tests.support.reference import Reference

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


def seen(run, value: float, grad: float | None = 1.0) -> float:
    """One training call on x = value with weights of 1. Returns x after the cast: less if it saturated."""
    x = torch.full((16, 128), value, requires_grad=True)
    y = run(x)
    if grad is not None:
        y.backward(torch.full_like(y, grad))
    return round(y[0, 0].item() / 128, 2)


def cold(model: nn.Module) -> dict[str, bool]:
    return {role: cold for (_, role, _), cold in hooks.cold(model).items()}


def test_the_step_after_a_jump() -> None:
    """100 saturates with the scale of 1. The next step's 300 does not: its scale comes from its own amax."""
    model = linear(1.0)
    run = compiled(model)
    for _ in range(20):
        assert seen(run, 1.0) == 1.0
    assert seen(run, 100.0) == 1.0
    assert cold(model) == {"input": True, "weight": False, "gradient": False}
    assert seen(run, 300.0) == 300.0
    assert not cold(model)["input"]
    assert seen(run, 310.0) == 300.0  # warm again


ZERO = 0.0  # the gradient; None: no backward


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, [(1.0, 1.0), (1.9, 1.0), (15.2, 1.9)]),  # twice the range of the scale is not yet an overflow
        ({}, [(1.0, 1.0), (2.1, 1.0), (16.8, 16.8)]),
        (
            {},
            [
                (1.0, 1.0),
                (2.0, 1.0),
                (100.0, 2.0, None),
                (900.0, 900.0, None),
                (100.0, 96.43),
                (1000.0, 900.0),
            ],
        ),
        # after 20 calls with zero gradients the host looks no longer for cold slots, but for overflows
        ({}, [*[(1.0, 1.0, ZERO)] * 20, (100.0, 1.0, ZERO), (300.0, 300.0, ZERO), (400.0, 300.0, ZERO)]),
        # a gradient that has only been zero makes calls cold: nothing saturates in them
        ({}, [(1.0, 1.0, ZERO), (1.0, 1.0, ZERO), (1000.0, 1000.0, ZERO)]),
        ({"on_overflow": "saturate"}, [(1.0, 1.0, ZERO), (1.0, 1.0, ZERO), (1000.0, 1.0, ZERO)]),
        ({"on_overflow": "saturate"}, [(1.0, 1.0), *[(2.0**-30, 0.0)] * 3]),
        ({}, [(1.0, 1.0), (0.0, 0.0), (3.0, 1.0)]),  # zeros are no underflow: the history stays
        ({}, [(1.0, 1.0), (1e6, 1.0), (1.0, 1.0), (3.0, 1.0)]),  # a spike is forgotten
    ],
    ids=[
        *["fits", "overflows", "no backward", "no patience", "zero gradient", "zero gradient, saturate"],
        *["underflow, saturate", "zeros", "spike"],
    ],
)
def test_what_each_call_reads(options: dict[str, Any], calls: list[tuple]) -> None:
    """Calls are (x, x as it is read, gradient); 1.0 is the gradient if it is not given."""
    model = linear(1.0)
    run = compiled(model, **options)
    for x, expected, *grad in calls:
        assert seen(run, x, *grad) == pytest.approx(expected, abs=0.01)
    assert not options or not cold(model)["input"]


@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize(
    ("options", "covered"), [({}, 2048.0), ({"margin": 0}, 1.0), ({"fp8_format": "e4m3"}, 8.0)], ids=str
)
def test_a_gradient(options: dict[str, Any], covered: float) -> None:
    """A gradient has headroom. One that saturates all the same, by 100 times here, is scaled by its amax in
    the next step."""
    model = linear(1.0)
    run = compiled(model, **options)
    far = 100.0 * covered
    for grad, expected in (
        (1.0, 1.0),
        (covered, covered),
        (covered * far, covered * covered),
        (far * far, far * far),
    ):
        x = torch.ones(16, 128, requires_grad=True)
        run(x).backward(torch.full((16, 128), grad))
        assert x.grad[0, 0].item() == pytest.approx(128 * expected)


# -- a jump that hides others


def chain() -> nn.Module:
    return Stack(*map(Positive, range(4)))


def load(model: nn.Module, factor: float) -> None:
    """Multiplies all weights by a factor, as if other weights were loaded."""
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
        assert histories(model) == {
            key: (slot.history, slot.scale) for key, slot in reference.slots.items()
        }, call
        assert hooks.cold(model) == {key: slot.cold for key, slot in reference.slots.items()}, call
    assert cold == [True] + [call in (3, 4, 7) and "on_overflow" not in options for call in range(1, 8)]


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


def smaller_batch(model: Any) -> None:
    model.inputs = 1e-5


def smaller_loss(model: Any) -> None:
    model.grads = 1e-6


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("change", [smaller_weights, smaller_batch, smaller_loss])
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


def test_one_odd_batch_changes_no_scale() -> None:
    """Where the host does not know yet (on a GPU, it learns later), the next batch is as exact as ever."""
    model = linear(1.0)
    run = compiled(model)
    seen(run, 1.0)
    (before,) = (slot.scale() for (_, role, _), slot in hooks.slots_of(model).items() if role == "input")
    seen(run, 1e-7)
    (after,) = (slot.scale() for (_, role, _), slot in hooks.slots_of(model).items() if role == "input")
    assert before == after and cold(model)["input"]
    assert seen(run, 1.0) == 1.0 and not cold(model)["input"]
