"""Random models and protocols on numbers for which FP8 is exact; planted errors show that the comparison finds errors.

`FUZZ_CASES=500` runs more cases, the same ones each time.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

from fp8compile.ir import ops, state_page
from fp8compile.runtime.interpreter import Eager
from tests.support import fuzz_training
from tests.support.fuzz_models import Model
from tests.support.fuzz_protocols import Side
from tests.support.fuzz_training import Case

CASES = int(os.environ.get("FUZZ_CASES", "6"))


def test_exact_as_in_high_precision() -> None:
    seen, failed = fuzz_training.run(CASES)
    assert not failed, "\n\n".join(failed)
    assert seen["models"] == CASES and seen["models in FP8"] >= 0.9 * CASES, seen
    assert seen["FP8 operands"] >= 20 * CASES, seen


def small(kind: str = "mlp", recipe: str = "tensorwise", protocols: tuple[str, ...] = ("plain", "plain", "plain")) -> Case:
    """A case of one block, with weights and matmuls written in the simplest way."""
    rng = random.Random(0)
    with mock.patch.multiple("tests.support.fuzz_models", STORED=("plain",), SPELLED=("linear",)):
        model = Model(rng, kinds=(kind,))
    model.breaks = model.two = model.tied = False
    model.blocks[0].residual, model.blocks[0].checkpoint = False, ""
    shapes = [(48, model.width)] * len(protocols)
    return Case(0, rng, recipe, "whole", {}, None, torch.float32, False, model, shapes, list(protocols))


def wrong(case: Case) -> str:
    """The errors that the fuzzer reports for a case."""
    with mock.patch.object(Case, "of", lambda _: case):
        return "".join(fuzz_training.run(1)[1])


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_nothing_is_planted(recipe: str) -> None:
    assert not wrong(small(recipe=recipe))


MULTIPLY = (ops.scaled_mm, ops.block_mm)


PLANTS = ["a scale", "an operand", "a bias", "no product", "twice"]


@pytest.mark.parametrize("plant, number", [(plant, (i + j) % 6) for i, plant in enumerate(PLANTS) for j in (0, 3)])
def test_a_planted_error_is_seen(plant: str, number: int) -> None:
    """An error in any one of the six gemms of a step is seen."""
    calls = Counter[str]()
    call = Eager.call_function

    def planted(self: Eager, target: Any, args: tuple, kwargs: dict) -> Any:
        if target not in MULTIPLY:
            return call(self, target, args, kwargs)
        calls["all"] += 1
        if calls["all"] % 6 != number:
            return call(self, target, args, kwargs)
        calls["planted"] += 1
        a, b, a_inv, *others = args
        match plant:
            case "a scale":
                return call(self, target, (a, b, a_inv * 1.01, *others), kwargs)
            case "an operand":
                return call(self, target, (a, b.flip(0), a_inv, *others), kwargs)
            case "a bias":
                return call(self, target, args, kwargs) + a_inv.reshape(-1)[0]
            case "twice":
                return call(self, target, args, kwargs) * 2
        return torch.zeros_like(call(self, target, args, kwargs))

    with mock.patch.object(Eager, "call_function", planted):
        assert "dB" in wrong(small(recipe="delayed", protocols=("plain",)))
    assert calls["planted"] and calls["all"] == 6, calls


def test_a_scale_of_the_wrong_slot_is_seen() -> None:
    """In a warm call, a scale is read from the next slot."""
    case = small(recipe="delayed")
    case.model.blocks[0].each[1].before *= 64  # otherwise all scales are equal
    case.model.blocks[0].each[1].factor /= 64
    assert not wrong(case)
    snapshot = state_page.snapshot_of
    with mock.patch.object(state_page, "snapshot_of", lambda page: snapshot(page).roll(1, 0)):
        assert "dB" in wrong(case)


def test_a_history_that_moves_twice_is_seen() -> None:
    once = state_page.next_page

    def twice(page: torch.Tensor, snapshot: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        return once(once(page, snapshot, amax), snapshot, amax)

    with mock.patch.object(state_page, "next_page", twice):
        assert "in 1 calls, moved" in wrong(small(recipe="delayed", protocols=("plain",)))


def test_both_sides_draw_the_same_numbers() -> None:
    case = small()
    xs = []
    for fp8 in (False, True):
        side = Side(case, case.model, fp8)
        side.rng, side.shape = random.Random("0 0"), case.shapes[0]
        xs.append(side.x())
    assert torch.equal(*xs)
