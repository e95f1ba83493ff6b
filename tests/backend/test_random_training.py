"""Random models and protocols on numbers for which FP8 is exact; planted errors show that the comparison
finds errors.

`FUZZ_CASES=500 make weekly` runs more cases, the same ones each time.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fp8compile.ir import ops
from tests.support import fuzz_training, hooks
from tests.support.fuzz_models import Model
from tests.support.fuzz_training import Case

pytestmark = pytest.mark.shares_graphs  # by the planted errors

SLOW, WEEKLY = pytest.mark.slow, pytest.mark.weekly
MANY = int(os.environ.get("FUZZ_CASES", "40"))
CASES = [pytest.param(0, 2, marks=SLOW), pytest.param(2, MANY, marks=WEEKLY)]


@pytest.mark.parametrize(("first", "count"), CASES)
def test_exact_as_in_high_precision(first: int, count: int) -> None:
    seen, failed = fuzz_training.run(count, first)
    assert not failed, "\n\n".join(failed)
    assert seen["models"] == count and seen["models in FP8"] >= 0.9 * count, seen
    assert seen["gemms in FP8"] >= 10 * count, seen


def small(kind: str = "mlp", recipe: str = "delayed", protocols: tuple[str, ...] = ("plain",)) -> Case:
    """A case of one block, with weights and matmuls written in the simplest way."""
    rng = random.Random(0)
    with mock.patch.multiple("tests.support.fuzz_models", STORED=("plain",), SPELLED=("linear",)):
        model = Model(rng, kinds=(kind,))
    model.breaks = model.two = model.tied = False
    model.blocks[0].residual, model.blocks[0].checkpoint = False, ""
    shapes = [(48, model.width)] * len(protocols)
    return Case(0, rng, recipe, "whole", {}, None, torch.float32, False, model, shapes, list(protocols))


@pytest.fixture
def fuzzing() -> Iterator[None]:
    with fuzz_training.fuzzing():
        yield


def wrong(case: Case) -> str:
    """The error that the fuzzer reports for a case."""
    return fuzz_training.wrong(case, Counter())


# (call, operator, arguments) -> the result of a gemm
PLANTS = {
    "nothing": lambda call, target, args: call(target, args, {}),
    "a scale": lambda call, target, args: call(target, (*args[:2], args[2] * 1.01, *args[3:]), {}),
    "an operand": lambda call, target, args: call(target, (args[0], args[1].flip(0), *args[2:]), {}),
    "a bias": lambda call, target, args: call(target, args, {}) + args[2].reshape(-1)[0],
    "no product": lambda call, target, args: torch.zeros_like(call(target, args, {})),
    "twice": lambda call, target, args: call(target, args, {}) * 2,
}


@pytest.mark.feature("delayed")
@pytest.mark.cases(test=35, slow=1)
@pytest.mark.usefixtures("fuzzing")
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_error_is_seen(plant: str, number: int) -> None:
    """An error in any one of the six gemms of a step is seen."""
    gemms = Counter[str]()

    def see(call: Any, target: Any, args: tuple, kwargs: dict) -> Any:
        if target not in (ops.scaled_mm, ops.block_mm):
            return call(target, args, kwargs)
        gemms["all"] += 1
        return PLANTS[plant](call, target, args) if gemms["all"] % 6 == number else call(target, args, kwargs)

    with hooks.through(see):
        assert ("dB" in wrong(small())) == (plant != "nothing")
    assert gemms["all"] == 6


@pytest.mark.slow
@pytest.mark.usefixtures("fuzzing")
def test_errors_of_the_state_are_seen() -> None:
    """In a warm call, a scale is read from the next slot; a history moves twice."""
    from fp8compile.features.delayed import slot_ops

    case = small(protocols=("plain", "plain", "plain"))
    case.model.blocks[0].each[1].before *= 64  # otherwise all scales are equal
    case.model.blocks[0].each[1].factor /= 64
    assert not wrong(case)

    def next_slot(call: Any, target: Any, args: tuple, kwargs: dict) -> Any:
        args = (args[0].roll(1, 0), *args[1:]) if target == slot_ops.delayed_scale else args
        return call(target, args, kwargs)

    with hooks.through(next_slot):
        assert "dB" in wrong(case)
    with hooks.moving_twice():
        assert "in 1 calls, moved" in wrong(small())
