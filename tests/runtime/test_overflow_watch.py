"""One watch for all graphs of a thread and device: what it learns in one look, and whom it tells."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from tests.support import hooks
from tests.support.harness import compiled, noise
from tests.support.models import Mlp, linear, make

pytestmark = [pytest.mark.shares_graphs, pytest.mark.compat]

GRAPHS = 3


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


def ready(made: list[nn.Module]) -> list[nn.Module]:
    """After some warm steps."""
    for _ in range(3):
        step(made)
    return made


@pytest.mark.usefixtures("interpreted")
def test_the_next_call_of_its_graph_is_cold() -> None:
    """The first graph of the step looks at the pages of all, and the call of another one is cold."""
    made = ready(layers())
    with hooks.cold_calls() as cold, hooks.looks() as looks:
        step(made, 1000.0)
        assert not any(cold)
        step(made, 1000.0)
        assert cold[GRAPHS:] == [False, True, False]
        step(made, 1000.0)
    assert cold[2 * GRAPHS :] == [False] * GRAPHS
    assert looks == [2 * GRAPHS] * 3, "one look a step, at the pages of forwards and backwards"


def test_one_copy_a_step_on_a_gpu() -> None:
    """For all graphs; none while a copy is on its way."""
    with hooks.on_a_gpu() as gpu, hooks.bodies(), hooks.looks() as looks, hooks.cold_calls() as cold:
        made = ready(layers())
        with hooks.refusing_waits(gpu):
            for _ in range(3):
                step(made)
            assert gpu.copied == 3 and looks[-3:] == [2 * GRAPHS] * 3
            step(made, 1000.0)
            gpu.arrives = False
            for _ in range(2):
                step(made, 1000.0)
            assert gpu.copied == 4 and not any(cold[GRAPHS:])
            gpu.arrives = True
        step(made, 1000.0)
    assert cold[-GRAPHS:] == [False, True, False]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_the_first_copies_are_in_step(on_a_gpu: bool) -> None:
    """Of a new model: the step after an overflow is cold, on a GPU whose copies have arrived by then, too."""
    with hooks.on_a_gpu() if on_a_gpu else contextlib.nullcontext(), hooks.cold_calls() as cold:
        run = compiled(make(Mlp), policy={"rules": [{"fp8": "on"}]})
        for factor in (1.0, 1.0, 1000.0, 1000.0, 1000.0):
            (run(factor * noise(16, 128)).sum() / factor).backward()
    assert cold == [True, False, False, True, False]


def test_a_forward_without_a_backward_on_a_gpu() -> None:
    """Then no backward is known to be the last one. The first call of the next step sends what has moved."""
    with hooks.on_a_gpu() as gpu, hooks.bodies(), hooks.cold_calls() as cold:
        made = ready(layers())
        made[0](noise(16, 128, seed=1).requires_grad_())
        with hooks.refusing_waits(gpu):
            step(made, 1000.0)
        step(made, 1000.0)
    assert cold[-GRAPHS:] == [False, True, False]


@pytest.mark.usefixtures("interpreted")
def test_what_was_found_is_forgotten_when_the_page_moves() -> None:
    """Another graph's call has seen a gradient overflow. A second backward, whose gradient fits, follows."""
    one, other = ready(layers("a b"))
    x = noise(16, 128, seed=1).requires_grad_()
    first, second = one(x), one(x)
    other(x)
    first.backward(torch.full_like(first, 1e9))
    with hooks.looks() as looks:
        other(x)
    assert looks == [3], "the forwards of both, and the backward with the overflow"
    second.backward(torch.full_like(second, 1e9))
    with hooks.cold_calls() as cold:
        one(x)
    assert cold == [False]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("factor", "grad", "named"),
    [(math.nan, math.inf, "b.weight (input)"), (1.0, math.inf, "c.weight (gradient)")],
)
def test_the_first_tensor_that_is_not_finite_is_named_once(
    factor: float, grad: float, named: str, caplog: Any
) -> None:
    made = ready(layers())
    for _ in range(2):
        step(made, factor, grad)
        step(made)
        step(made)
    (line,) = [text for record in caplog.records if "infinity or a NaN" in (text := record.getMessage())]
    assert named in line


@pytest.mark.usefixtures("interpreted")
def test_calls_of_one_model_on_two_threads() -> None:
    """A thread sees what its graphs have left on another, but not what other models may be writing there."""
    made, others = ready(layers()), ready(layers("d e"))
    with hooks.cold_calls() as cold, hooks.looks() as looks:
        step(others)
        step(made, 1000.0)
        looks.clear()
        thread = threading.Thread(target=step, args=(made, 1000.0))
        thread.start()
        thread.join()
    assert cold[-GRAPHS:] == [False, True, False]
    assert looks == [2, 3, 3], "its own pages, and the forward's of the call before"


@pytest.mark.usefixtures("interpreted")
def test_a_checkpoint_that_is_loaded_is_looked_at() -> None:
    """A state that was saved after an overflow, with no patience left."""
    model = linear(1.0)
    run = compiled(model)
    for _ in range(20):
        run(torch.ones(16, 128)).sum().backward()
    run(torch.full((16, 128), 100.0)).sum().backward()
    state = fp8compile.ScalingState(model).state_dict()
    run(torch.full((16, 128), 100.0)).sum().backward()
    run(torch.full((16, 128), 100.0)).sum().backward()
    fp8compile.ScalingState(model).load_state_dict(state)
    with hooks.cold_calls() as cold:
        run(torch.full((16, 128), 100.0)).sum().backward()
    assert cold == [True]
