"""Grouped matmuls: experts against an eager FP8 reference in plain torch, and against high precision."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import fp8compile
from fp8compile.runtime.state import slots_of
from tests.support.grouped_reference import GroupedReference
from tests.support.harness import ALL_FP8, sqnr
from tests.support.models import Experts, Moe
from tests.support.reference_settings import RECIPES

BF16 = torch.bfloat16
SIZES = [0, 1, 15, 16, 17, 257]
TOKENS = 320  # 14 of them belong to no expert


def ends(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def run(model, call, x: Tensor, offs: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Output and gradients of a step; rows of no expert are left out."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = call(x, offs)
    y.backward(dy)
    inside = slice(0, int(offs[-1]))
    return {"y": y.detach()[inside], "dx": x.grad[inside], **{name: p.grad.clone() for name, p in model.named_parameters()}}  # type: ignore[index]


def made(turned: bool = False, count: int = len(SIZES)) -> Experts:
    torch.manual_seed(0)
    return Experts(128, 128, count, turned).to(BF16)


def batch(step: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(tokens, 128, generator=generator).to(BF16) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("turned", [False, True], ids=["[E, out, in]", "[E, in, out]"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_ten_steps_of_changing_routes(recipe: str, turned: bool) -> None:
    model, plain, exact = made(turned), made(turned), made(turned)
    step = torch.compile(model, backend="fp8", options={"recipe": recipe, "policy": ALL_FP8})
    reference = GroupedReference(recipe)
    draw = random.Random(0)
    for number in range(10):
        sizes = draw.sample(SIZES, len(SIZES))
        x, dy = batch(number)
        got = run(model, step, x, ends(sizes), dy)
        with reference.step():
            expected = run(plain, plain, x, ends(sizes), dy)
        high = run(exact, exact, x, ends(sizes), dy)
        for name in expected:
            assert sqnr(expected[name], got[name]) > 30, f"step {number}: {name}"
            assert sqnr(high[name], got[name]) > 20, f"step {number}: {name}"  # behind two or three matmuls in FP8
        empty = sizes.index(0)
        assert not got["down_proj"][empty].any() and not got["gate_up_proj"][empty].any()
    assert all(record.decision == "fp8" for record in fp8compile.report(model).matmuls)
