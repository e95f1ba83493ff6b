"""What the host does around the compiled code of a warm step: it reads nothing of the device, and inputs of
which CUDA graphs record the addresses stay where they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support import hooks
from tests.support.harness import ALL_FP8, noise
from tests.support.models import Mlp, Stack, make, relus

pytestmark = [pytest.mark.compat]


class Training:
    """Steps of two micro-batches."""

    def __init__(self, model: nn.Module, eager_checkpoint: bool = False, **options: Any):
        self.model, self.checkpointed = model, eager_checkpoint
        self.call = torch.compile(model, backend="fp8", options={"policy": ALL_FP8, **options})
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(self, number: int, factor: float = 1.0) -> None:
        for i in range(2):
            x = noise(32, 128, seed=2 * number + i, scale=factor).requires_grad_()
            y = checkpoint(self.call, x, use_reentrant=False) if self.checkpointed else self.call(x)
            y.square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


CASES: dict[str, dict[str, Any]] = {
    "delayed": {},
    "history of 1": {"amax_history_len": 1, "interval": 2},
    "saturating": {"on_overflow": "saturate"},
    "checkpointed": {"eager_checkpoint": True},
    "tensorwise": {"recipe": "tensorwise"},
    "blockwise": {"recipe": "blockwise"},
    "cached": {"recipe": "tensorwise", "cache_weights": True},
    "delayed, cached": {"cache_weights": True, "current_scaling": (False, True, False)},
}


@pytest.mark.cases(test=1, slow=3)
@pytest.mark.parametrize("case", CASES)
def test_a_warm_step_waits_for_nothing(case: str) -> None:
    with hooks.bodies() as halves:
        training = Training(make(lambda: Stack(*relus())), **CASES[case])
        for number in range(3):
            training.step(number)
        before = [len(half.addresses) for half in halves]
        with hooks.refusing_waits():
            for number in range(3, 5):
                training.step(number)
    calls = [len(half.addresses) - n for half, n in zip(halves, before, strict=True)]
    assert len(halves) >= 2 and max(calls) >= 4 and min(calls) >= 2, (
        "a body is a call of compiled code, or of the casts"
    )


def reads() -> dict[str, Callable[[torch.Tensor], Any]]:
    index = torch.zeros(3, dtype=torch.bool)
    return {
        "item": lambda x: x.sum().item(),
        "tolist": lambda x: x.tolist(),
        "cpu": lambda x: x.cpu(),
        "numpy": lambda x: x.detach().numpy(),
        "bool": lambda x: bool((x == 0).all()),
        "to": lambda x: x.to("cpu"),
        "nonzero": lambda x: torch.nonzero(x),
        "of the host": lambda x: x.add(torch.tensor([1.0])),
        "mask": lambda x: x[:3, 0][index],
    }


@pytest.mark.feature("delayed")
def test_a_read_is_found() -> None:
    """Each, planted in what runs before a forward, and after a backward."""
    with hooks.bodies():
        training = Training(make(Mlp))
        for number in range(2):
            training.step(number)
        for where, read in itertools.product(("decide", "begin_backward"), reads().values()):
            with hooks.planted(where, read), hooks.refusing_waits(), pytest.raises(hooks.Waited):
                training.step(2)


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("case", ["delayed", "checkpointed"])
def test_fixed_inputs_stay_where_they_are(case: str, recorded: bool) -> None:
    """Weights and amaxes, in all calls and recomputations; scales where CUDA graphs are recorded. (Else a
    backward has those that its forward has saved.)"""
    options = {"triton.cudagraphs": True} if recorded else {}
    with hooks.bodies() as halves, hooks.states_of_forwards() as states:
        training = Training(make(lambda: Stack(*relus())), **{**CASES[case], **options})
        for number in range(5):
            training.step(number)
    scales, amaxes = ({x.data_ptr() for x in found} for found in zip(*states, strict=True))
    assert len(amaxes) == 1 and (len(scales) == 1) is recorded
    for forward in (True, False):
        half = next(half for half in halves if half.backward != forward and len(half.addresses) >= 5)
        places = {name: {found[name] for found in half.addresses} for name in half.addresses[0]}
        assert len(places) >= (5 if forward else 1)
        moved = [found for found in places.values() if len(found) > 1]
        assert len(moved) <= (not forward and not recorded), (half.names, places)
        assert amaxes in places.values() and (not recorded or scales in places.values())


@pytest.mark.slow
def test_copies_of_weights_stay_between_casts() -> None:
    """For the micro-batches of a step. (With CUDA graphs there are no such copies.)"""
    with hooks.bodies(), hooks.copies_given() as found:
        training = Training(make(lambda: Stack(*relus())), **CASES["cached"])
        for number in range(3):
            training.step(number)
    assert found[0] and found[2] == found[3] and found[4] == found[5]
