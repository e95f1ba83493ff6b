"""Compiled autograd copies our backward graphs: gradients are right from the first call, or it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import nn

import fp8compile
from tests.support.harness import cosine
from tests.support.models import Mlp, make

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.compat]


def small_loss(y: torch.Tensor) -> torch.Tensor:
    """A loss whose gradients vanish if a tensor without history is cast with scale 1. (It contains no
    numbers: compiled autograd makes inputs of numbers, which an FX interpreter does not support.)"""
    return (y * y).mean() * torch.tensor(1e-3)


def train(step: Callable, expected: nn.Module, model: nn.Module) -> None:
    pairs = list(zip(expected.parameters(), model.parameters(), strict=True))
    for _ in range(3):
        x = torch.randn(16, 128)
        expected.zero_grad()
        model.zero_grad()
        small_loss(expected(x)).backward()
        step(x)
        assert all(cosine(p.grad, q.grad) > 0.97 for p, q in pairs)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_backward_inside_of_the_compiled_step(recipe: str) -> None:
    expected = make(Mlp)
    model = copy.deepcopy(expected)
    with torch._dynamo.config.patch(compiled_autograd=True):
        step = torch.compile(
            lambda x: small_loss(model(x)).backward(), backend="fp8", options={"recipe": recipe}
        )
        train(step, expected, model)
    report = fp8compile.report(model)
    assert report.fp8_flop_fraction == 1.0
    assert [graph.name for graph in report.graphs] == ["Mlp, training"], report


@pytest.mark.slow
def test_a_whole_train_step() -> None:
    """Forward, backward and optimizer in one compiled function: parameters are as of eager."""
    expected = make(Mlp)
    model = copy.deepcopy(expected)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in (expected, model)]

    def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(x).pow(2).mean().backward()
        optimizer.step()

    before = [p.detach().clone() for p in expected.parameters()]
    with torch._dynamo.config.patch(compiled_autograd=True):
        step = torch.compile(train_step, backend="fp8")
        for _ in range(3):
            x = torch.randn(16, 128)
            train_step(expected, optimizers[0], x)
            step(model, optimizers[1], x)
    for old, p, q in zip(before, expected.parameters(), model.parameters(), strict=True):
        assert cosine(p.detach() - old, q.detach() - old) > 0.97


def test_the_backward_alone() -> None:
    """Compiled autograd is on before the first call, and its compiler is ours."""
    expected = make(Mlp)
    model = copy.deepcopy(expected)
    run = torch.compile(model, backend="fp8")

    def step(x: torch.Tensor) -> None:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="fp8")):
            small_loss(run(x)).backward()

    train(step, expected, model)


@pytest.mark.feature("delayed")
@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize("backend", ["fp8", "aot_eager"])
def test_a_model_that_was_compiled_before_is_refused(backend: str) -> None:
    """The earlier backward expects state. With either backend, the error comes before any gradient."""
    model = make(Mlp)
    run = torch.compile(model, backend="fp8")
    run(torch.randn(16, 128)).sum().backward()
    model.zero_grad()
    with pytest.raises(Exception, match="before compiled autograd was on"):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
            small_loss(run(torch.randn(16, 128))).backward()
    assert all(p.grad is None for p in model.parameters())
