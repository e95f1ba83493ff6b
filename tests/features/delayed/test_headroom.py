"""Headroom of delayed scales: gradients that outgrow their history, and tensors without headroom."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.config.recipe import Block
from fp8compile.devices.formats import E4M3, E5M2, Format
from fp8compile.ir import ops
from fp8compile.ir.scale import scale_of
from tests.support import hooks
from tests.support.harness import compiled, cosine, noise
from tests.support.models import Mlp, make

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


class Residual(nn.Module):
    """x + scale * feed-forward, as in many vision transformers, then a mean over tokens and a head."""

    def __init__(self, scale: float, head: float) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(128), Mlp(128, 256)
        self.scale = nn.Parameter(torch.full((128,), scale))
        self.out, self.head = nn.LayerNorm(128), nn.Linear(128, 160)
        nn.init.trunc_normal_(self.head.weight, std=head, a=-2 * head, b=2 * head)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.out((x + self.scale * self.mlp(self.norm(x))).mean(1)))


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "head"), [(1.0, 2e-5), (1e-6, 0.02)], ids=["small head", "LayerScale"])
def test_gradients_that_grow_in_the_first_steps(scale: float, head: float) -> None:
    """Adam changes every weight by its learning rate, however small it is: gradients grow fast at first."""
    plain, model = (make(lambda: Residual(scale, head)) for _ in range(2))
    optimizer, run = torch.optim.AdamW(plain.parameters(), 1e-3), compiled(model)
    for step in range(6):
        x, y = noise(4, 65, 128, seed=step), torch.arange(4) + step
        model.load_state_dict(plain.state_dict())
        for call, parameters in ((plain, plain), (run, model)):
            parameters.zero_grad()
            F.cross_entropy(call(x), y).backward()
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert cosine(p.grad, q.grad) > 0.97, (step, name)
            assert q.grad.norm() > 0.9 * p.grad.norm(), (step, name)
        optimizer.step()


# -- the limit of an overflow


def overflows(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "overflow" in record.getMessage()]


@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize(
    ("options", "fits"),
    [({}, 2000.0), ({"margin": (0, 0, 2)}, 7.5), ({"margin": 0}, 7.5)],
    ids=["default", "margin 2", "margin 0"],
)
def test_the_line_about_an_overflow(
    options: dict[str, Any], fits: float, caplog: pytest.LogCaptureFixture
) -> None:
    """No line if a gradient grows within its headroom, or by less than a jump; one if it saturates."""
    model = make(lambda: nn.Linear(128, 128, bias=False))
    run = compiled(model, **options)
    x = noise(16, 128, seed=3)
    with caplog.at_level(logging.INFO, "fp8compile"), hooks.noticed_at_once():
        for factor in (1.0, fits, fits / 10, 1e4 * fits):
            run(x).backward(torch.full((16, 128), factor))
        assert not overflows(caplog)
        run(x)
    (line,) = overflows(caplog)
    assert line.endswith(": weight (gradient): 1 overflow")


# -- tensors that need no headroom


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
def test_a_scale_of_its_own_amax_covers_a_tensor(form: Format, power_of_2: bool) -> None:
    """With a margin of 0, amax times scale exceeds the FP8 maximum by a rounding at most; blocks, too."""
    for exponent in range(-120, 120, 7):
        x = noise(128, 128, seed=exponent + 120).double().mul(2.0**exponent).float()
        for block in (Block(0, 0), Block(1, 0), Block(1, 32), Block(1, 128), Block(128, 128)):
            amaxes = ops.amax(x) if block == (0, 0) else ops.amax_blocks(x, False, list(block))
            scales = scale_of(amaxes, form.max, 0, power_of_2)
            assert (amaxes.double() * scales.double()).max() <= form.max * (1 + 2**-23)
