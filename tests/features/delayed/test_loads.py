"""`load_state_dict` is an event: the next call scales by current amaxes what the histories do not fit."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.features.delayed.test_overflow import chain, step
from tests.support import hooks
from tests.support.harness import compiled, load_scaling, scaling_tensors, sqnr

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


def scaled(model: nn.Module, factor: float) -> dict[str, Tensor]:
    return {name: x * factor for name, x in model.state_dict().items()}


def in_another(model: nn.Module, weights: dict[str, Tensor]) -> None:
    nn.ModuleDict({"model": model}).load_state_dict({f"model.{name}": x for name, x in weights.items()})


def in_parts(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for i, block in enumerate(model.inner):
        block.linear.load_state_dict({"weight": weights[f"inner.{i}.linear.weight"]})


def blocks_in_a_loop(model: nn.Module, **options: Any) -> Callable[[Tensor], Tensor]:
    for block in model.inner:
        block.compile(backend="fp8", options={"recipe": "delayed", **options})
    return lambda x: functools.reduce(lambda x, block: block(x), model.inner, x)


def in_a_function(model: nn.Module, **options: Any) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()  # the code that was compiled for another test's model would serve here, unseen
    return torch.compile(lambda x: model(x), backend="fp8", options={"recipe": "delayed", **options})


@pytest.mark.parametrize(
    ("compile_it", "load", "factor", "options"),
    [
        (compiled, nn.Module.load_state_dict, 1e-3, {}),
        (blocks_in_a_loop, in_another, 30.0, {}),
        (in_a_function, in_parts, 1e-3, {"interval": 4, "margin": 2}),
        pytest.param(in_a_function, in_another, 30.0, {}, marks=pytest.mark.slow),
        pytest.param(blocks_in_a_loop, in_parts, 1e-3, {"save": "fp8"}, marks=pytest.mark.feature("save")),
    ],
)
def test_the_first_call_with_other_weights(
    compile_it: Any, load: Any, factor: float, options: dict[str, Any]
) -> None:
    """Without the event, that call is noise, and the next one is right: see
    tests/runtime/test_overflow.py."""
    model, plain = chain(), chain()
    run = compile_it(model, **options)
    for _ in range(3):
        before = step(run, model)
    expected = step(plain, plain)
    usual = min(sqnr(a, b) for a, b in zip(expected, before, strict=True))
    for net in (model, plain):
        load(net, scaled(net, factor))
    for _ in range(3):
        pairs = zip(step(plain, plain), step(run, model), strict=True)
        assert min(sqnr(a, b) for a, b in pairs) > usual - 6


@pytest.mark.parametrize("state_first", [True, False])
def test_state_that_is_loaded_with_the_weights_stays(state_first: bool) -> None:
    """Going back to a checkpoint gives the calls after it bitwise: none of them is cold."""
    model = chain()
    run = compiled(model)
    for _ in range(3):
        step(run, model)
    weights, state = copy.deepcopy(model.state_dict()), scaling_tensors(model)
    expected = step(run, model)
    loads = [lambda: load_scaling(model, state), lambda: model.load_state_dict(weights)]
    for load in loads if state_first else reversed(loads):
        load()
    with hooks.cold_calls() as cold:
        found = step(run, model)
    assert cold == [False] and all(map(torch.equal, found, expected))


def test_a_model_that_is_saved_whole_does_not_need_the_package() -> None:
    model = chain()
    step(compiled(model), model)
    content = pickle.dumps(model)
    assert b"fp8compile" not in content
    again = pickle.loads(content)
    again.load_state_dict(scaled(model, 2.0))
    assert torch.equal(again.inner[0].linear.weight, 2 * model.inner[0].linear.weight)


def test_a_copy_of_a_model_is_seen_too() -> None:
    model = copy.deepcopy(chain())
    step(compiled(model), model)
    other, plain = copy.deepcopy(model), chain()
    run = compiled(other)
    step(run, other)
    for net in (other, plain):
        net.load_state_dict(scaled(net, 1e-3))
    assert min(sqnr(a, b) for a, b in zip(step(plain, plain), step(run, other), strict=True)) > 20
