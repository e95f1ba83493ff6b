"""Tests of the oracle: against high precision, and against autograd without FP8.

What the oracle and the package do alike is tested where they are compared, mostly in test_agreement.py: here
are the things in which both could be wrong together. torchao (test_torchao.py) and TransformerEngine's rule
(test_te_update_rule.py) are others' definitions of the same casts and scales.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.support.harness import sqnr
from tests.support.models import Block, Mlp, Spelled, Twice, make
from tests.support.reference import Reference
from tests.support.reference_casts import (
    FLT_MAX,
    FORMATS,
    amax_of,
    block_amaxes,
    cast,
    elements,
    inverse,
    quantize,
    scale_of,
)
from tests.support.reference_settings import RECIPES

E4M3, E5M2 = FORMATS["hybrid"]


@pytest.mark.parametrize(("dtype", "fp8_max"), [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_cast_saturates_and_propagates(dtype: torch.dtype, fp8_max: float) -> None:
    x = torch.tensor([1.01 * fp8_max, -1e30, 3e38, math.inf, -math.inf, math.nan, 0.0])
    y = cast(x, 4.0, dtype, fp8_max).float()  # 3e38 * 4 overflows float32: still a finite x
    assert y[:3].tolist() == [fp8_max, -fp8_max, fp8_max]
    assert y[3:6].isnan().all()
    assert y[6] == 0.0


def test_scale() -> None:
    assert scale_of(2.0, 448.0) == 224.0
    assert scale_of(2.0, 448.0, margin=3) == 28.0
    assert scale_of(3.0, 448.0) == torch.tensor(448.0 / 3.0, dtype=torch.float64).float().item()
    assert scale_of(1e-45, 448.0) == FLT_MAX
    assert [scale_of(amax, 448.0) for amax in (0.0, math.inf, math.nan)] == [1.0] * 3
    assert inverse(FLT_MAX) > 0.0
    assert amax_of(torch.tensor([1.0, -3.0])) == 3.0
    assert amax_of(torch.empty(0, 3)) == 0.0
    assert math.isnan(amax_of(torch.tensor([1.0, math.nan])))


@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 32), (1, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (130, 129), (256, 128)], ids=str)
def test_blocks(shape: tuple[int, int], block: tuple[int, int]) -> None:
    """Checks each element: its scale comes from the amax of the elements in its block."""
    x = torch.randn(shape)
    x[0, 0] = 0.0
    amaxes = block_amaxes(x, block)
    height, width = (each or whole for each, whole in zip(block, shape, strict=True))
    assert amaxes.shape == (-(-shape[0] // height), -(-shape[1] // width))
    spread = elements(amaxes, x, block)
    for i, j in ((0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 3)):
        top, left = i // height * height, j // width * width
        assert spread[i, j] == x[top : top + height, left : left + width].abs().max()
    made = quantize(x, E4M3, block)
    assert made.scale_inv.shape == amaxes.shape
    assert sqnr(x, made.exact()) > 28.0 or x.numel() == 1
    x[-1, -1] = math.nan
    assert block_amaxes(x, block)[-1, -1].isnan()


@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_is_close_to_high_precision_and_not_equal(recipe: str) -> None:
    model = make(lambda: nn.Linear(256, 256))
    reference = Reference(model, recipe)
    hybrid = reference.default.tensorwise
    assert reference.names == ["weight"]
    x = torch.randn(128, 256, requires_grad=True)
    x2, dy = x.detach().clone().requires_grad_(), torch.randn(128, 256)
    y, y2 = model(x), reference(x2)
    y.backward(dy)
    y2.backward(dy)
    assert 28.0 <= sqnr(y, y2) < 36.0
    grads = reference.grads()
    for expected, got in ((x.grad, x2.grad), (model.weight.grad, grads["weight"])):
        if recipe == "rowwise_with_gw_hp" and got is grads["weight"]:
            assert sqnr(expected, got) > 100.0
        else:
            assert (24.0 if hybrid else 28.0) <= sqnr(expected, got) < 36.0
    assert sqnr(model.bias.grad, grads["bias"]) > 100.0  # a sum over dy, which is not quantized


@pytest.mark.parametrize(
    ("build", "dtype"),
    [(Mlp, torch.bfloat16), (Block, torch.float32), (Spelled, torch.float32), (Twice, torch.bfloat16)],
)
def test_gradients_without_quantization_are_autograds(build, dtype: torch.dtype) -> None:
    """With all three matmuls overridden the reference is the model: shapes, orientations and dtypes fit."""
    model = make(build, dtype)
    reference = Reference(model, override_linear_precision=(True, True, True))
    x = torch.randn(*((2, 32) if build is not Spelled else (64,)), 128, dtype=dtype)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = model(a), reference(b)
    y.backward(x)
    z.backward(x)
    # float32 sums in another order; bf16 rounds an activation once more or once less
    floor = 100.0 if dtype == torch.float32 else 35.0
    assert sqnr(y, z) >= floor and sqnr(a.grad, b.grad) >= floor
    grads = reference.grads()
    assert grads.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert grads[name].dtype == parameter.dtype
        assert sqnr(parameter.grad, grads[name]) >= floor, name
    assert not reference.slots or all(slot.calls == 0 for slot in reference.slots.values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stack_of_weights_is_near_high_precision(recipe: str) -> None:
    """A grouped matmul, with an empty group, groups of any size, and rows of no group."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 128, 256).bfloat16())

        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            return torch._grouped_mm(x, self.weight, offs)

    model, offs = make(One, torch.bfloat16), torch.tensor([100, 100, 137, 303], dtype=torch.int32)
    reference = Reference(model, recipe)
    x, dy = torch.randn(320, 128).bfloat16(), torch.randn(320, 256).bfloat16()
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = model(a, offs), reference(b, offs)
    y.backward(dy)
    z.backward(dy)
    assert not z[303:].any() and not b.grad[303:].any()
    assert 28.0 <= sqnr(y[:303], z[:303]) < 40.0 and 24.0 <= sqnr(a.grad[:303], b.grad[:303]) < 40.0
    ratio = sqnr(model.weight.grad, reference.grads()["weight"])
    assert ratio > 40.0 if recipe == "rowwise_with_gw_hp" else 24.0 <= ratio < 40.0
    if recipe == "delayed":
        assert reference.slots["weight", "input", 0].history[0] == x[:303].abs().max().item()


def ones(value: float) -> Tensor:
    return torch.full((16, 128), value)


def run(reference: Reference, x: Tensor, grad: float = 1.0) -> Tensor:
    y = reference(x)
    y.backward(torch.full_like(y, grad))
    return y.detach()


def test_delayed_history_and_scale() -> None:
    reference = Reference(nn.Linear(128, 128, bias=False), amax_history_len=3)
    for value in (1.0, 4.0, 2.0, 0.5):
        run(reference, ones(value), 2 * value)
    slot = reference.slots
    assert slot["weight", "input", 0].history == [0.5, 2.0, 4.0]
    assert slot["weight", "input", 0].scale == 112.0
    assert slot["weight", "gradient", 0].history == [1.0, 4.0, 8.0]
    assert slot["weight", "gradient", 0].scale == 57344.0 / 2**11 / 8
    run(reference, ones(0.25))
    assert reference.slots["weight", "input", 0].scale == 224.0


def test_an_overflow_moves_the_scale_at_once() -> None:
    linear = nn.Linear(128, 128, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(128))
    current, saturate = (Reference(linear, on_overflow=how, interval=4) for how in ("current", "saturate"))
    # 3.5 is exactly twice what the scale of 1.75 covers: no overflow yet. 14 is one
    for value, seen, saturated in (
        (1.75, 1.75, 1.75),
        (3.5, 1.75, 1.75),
        (14.0, 1.75, 1.75),
        (28.0, 14.0, 1.75),
        (28.0, 28.0, 1.75),
        (28.0, 28.0, 28.0),
    ):
        for reference, expected in ((current, seen), (saturate, saturated)):
            torch.testing.assert_close(run(reference, ones(value)), ones(expected), rtol=1e-6, atol=0.0)
    for slot in (reference.slots["weight", "input", 0] for reference in (current, saturate)):
        assert slot.history[:6] == [28.0, 28.0, 28.0, 14.0, 3.5, 1.75] and slot.scale == 16.0
        assert not slot.cold
