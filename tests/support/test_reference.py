"""The oracle against high precision: floors in dB on normal data, in which it and the package could be wrong
together.

What they do alike is compared in test_agreement.py. Others define the same casts, scales and histories
(torchao in test_torchao.py, TransformerEngine in test_te_update_rule.py), and the package is compared with
these: an error of the oracle shows as a difference.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.harness import grads_of, leaf, sqnr
from tests.support.models import make
from tests.support.reference import Reference
from tests.support.reference_settings import RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_is_close_to_high_precision_and_not_equal(recipe: str) -> None:
    model = make(lambda: nn.Linear(256, 256))
    reference = Reference(model, recipe)
    hybrid = reference.default.tensorwise
    assert reference.names == ["weight"]
    x = torch.randn(128, 256, requires_grad=True)
    x2, dy = leaf(x), torch.randn(128, 256)
    y, y2 = model(x), reference(x2)
    y.backward(dy)
    y2.backward(dy)
    assert 28.0 <= sqnr(y, y2) < 36.0
    grads = grads_of(reference.model)
    for expected, got in ((x.grad, x2.grad), (model.weight.grad, grads["weight"])):
        if recipe == "rowwise_with_gw_hp" and got is grads["weight"]:
            assert sqnr(expected, got) > 100.0
        else:
            assert (24.0 if hybrid else 28.0) <= sqnr(expected, got) < 36.0
    assert sqnr(model.bias.grad, grads["bias"]) > 100.0  # a sum over dy, which is not quantized


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
    a, b = leaf(x), leaf(x)
    y, z = model(a, offs), reference(b, offs)
    y.backward(dy)
    z.backward(dy)
    assert not z[303:].any() and not b.grad[303:].any()
    assert 28.0 <= sqnr(y[:303], z[:303]) < 40.0 and 24.0 <= sqnr(a.grad[:303], b.grad[:303]) < 40.0
    ratio = sqnr(model.weight.grad, grads_of(reference.model)["weight"])
    assert ratio > 40.0 if recipe == "rowwise_with_gw_hp" else 24.0 <= ratio < 40.0
    if recipe == "delayed":
        assert reference.slots["weight", "input", 0].history[0] == x[:303].abs().max().item()
