"""Small and large gradients, infinities, NaN and zeros, and the cast at the edges of its formats.

test_reference.py has the oracle's floors in dB on normal data, and test_agreement.py shows that the package
computes what the oracle does.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fp8compile.ir import ops
from fp8compile.ir.scale import inverse_of, scale_of
from tests.support.harness import assert_close, compiled, histories, leaf, noise
from tests.support.models import make
from tests.support.reference_casts import FLT_MAX, FNUZ, FORMATS, cast
from tests.support.reference_settings import RECIPES as EVERY
from tests.support.stepped import stepped

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]

RECIPES = ("delayed", "tensorwise")  # one scale a tensor, E5M2 for gradients; others of EVERY: many, E4M3
E4M3, E5M2 = FORMATS["hybrid"]
ROWS = 16


def linear() -> nn.Linear:
    return make(lambda: nn.Linear(128, 128))  # type: ignore[return-value]


@pytest.mark.parametrize("recipe", EVERY)
def test_first_step_of_small_and_large_gradients(recipe: str) -> None:
    """Scale 1 would lose E5M2 gradients under 7.6e-6; a cold slot uses the scale of the current amax."""
    for scale in (1e-12, 1e-7, 1e4):
        model = linear()
        x, dy = noise(ROWS, 128) / scale, noise(ROWS, 128, seed=1) * scale
        calls = model, compiled(model, recipe, dynamic=False)
        sides = [stepped(call, model, [x], lambda y, dy=dy: dy) for call in calls]
        assert_close(*sides, 24.0, f"scale {scale}")


# These tests see the cast through a linear whose weight is 1.75 times the identity. 448 = 1.75 * 2**8 and
# 57344 = 1.75 * 2**15, so with an amax of 1.75 * 2**n every scale is a power of two, no product rounds, and
# output and input gradient are FP8 values.


def identity() -> nn.Linear:
    linear = nn.Linear(128, 128, bias=False)
    with torch.no_grad():
        linear.weight.copy_(1.75 * torch.eye(128))
    return linear


def edges(dtype: torch.dtype, fp8_max: float) -> Tensor:
    """[16, 128] of float32, up to fp8_max: every value, every tie, and both sides of every tie."""
    values = torch.arange(256).to(torch.uint8).view(dtype).double()
    values = values[values.isfinite()].unique()
    ties = (values[1:] + values[:-1]) / 2
    step = (values[1:] - values[:-1]) / 4096
    x = torch.cat([values, ties, ties - step, ties + step]).float()
    assert x.max().item() == fp8_max and x.numel() <= 2048
    return torch.cat([x, torch.zeros(2048 - x.numel())]).view(16, 128)


def through(run, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """-> the FP8 values of x and dy, scaled back."""
    x = leaf(x)
    y = run(x)
    y.backward(dy)
    return y.detach() / 1.75, x.grad / 1.75


@pytest.mark.parametrize("recipe", RECIPES)
def test_cast_of_every_value_tie_and_subnormal(recipe: str) -> None:
    """Equal bit by bit in any order of summation, as each sum has only one product that is not 0."""
    x, dy = edges(*E4M3), edges(*E5M2)
    run = compiled(identity(), recipe, dynamic=False, margin=0)  # scales of 1, for gradients, too
    for _ in range(2):  # delayed: cold, then with the scale of the first call, which is the same
        got, got_grad = through(run, x, dy)
        torch.testing.assert_close(got, cast(x, 1.0, *E4M3).float(), rtol=0, atol=0)
        torch.testing.assert_close(got_grad, cast(dy, 1.0, *E5M2).float(), rtol=0, atol=0)


@pytest.mark.feature("delayed")
def test_values_over_the_scale_saturate() -> None:
    run = compiled(identity(), dynamic=False, margin=0)
    one = torch.full((16, 128), 1.75)
    through(run, one, one)
    x = one.clone()
    x[:, 0], x[:, 1], x[:, 2], x[:, 3], x[:, 4] = 1.9, -2.0, 1e30, -FLT_MAX, 1.0
    got, got_grad = through(run, x, x)
    for values in (got, got_grad):
        assert values[0, :6].tolist() == [1.75, -1.75, 1.75, -1.75, 1.0, 1.75]


@pytest.mark.parametrize("recipe", EVERY)
def test_infinity_and_nan_show(recipe: str) -> None:
    """As in bf16: rows with one are not finite. All others are unchanged (delayed), or at least finite."""
    for bad in (math.inf, -math.inf, math.nan):
        model = linear()
        run = compiled(model, recipe, dynamic=False)
        x, dy = noise(ROWS, 128), noise(ROWS, 128, seed=1)
        stepped(run, model, [x], lambda y, dy=dy: dy)
        x[3, 5] = dy[7, 9] = bad
        got = stepped(run, model, [x], lambda y, dy=dy: dy)
        for name, rows, columns in (("output 0", [3], []), ("input 0", [7], []), ("weight", [9], [5])):
            rest = torch.ones_like(got[name], dtype=torch.bool)
            rest[rows], rest[:, columns] = False, False
            assert got[name][rest].isfinite().all() and not got[name][~rest].isfinite().any(), (bad, name)


@pytest.mark.parametrize("recipe", EVERY)
def test_zeros_and_the_smallest_numbers(recipe: str) -> None:
    """An amax of 0 gives scale 1, not 448 / 0; 1e-45 gives the largest scale, FLT_MAX, not infinity."""
    model = linear()
    run = compiled(model, recipe, dynamic=False)
    for value in (0.0, 1e-45, 1e-38, 0.0):
        x = torch.full((ROWS, 128), value)
        got = stepped(run, model, [x], lambda y, dy=x: dy)
        torch.testing.assert_close(got["output 0"], model.bias.expand(ROWS, -1), rtol=1e-6, atol=1e-6)
        assert got["input 0"].isfinite().all() and got["weight"].isfinite().all()
    for _, scale in histories(model).values():
        assert 0.0 < scale <= FLT_MAX


# fnuz, AMD's encodings on MI300: no infinities, no negative zero (its code is NaN), exponents one lower.


@pytest.mark.parametrize(("dtype", "fp8_max"), FNUZ, ids=["e4m3", "e5m2"])
def test_fnuz_cast(dtype: torch.dtype, fp8_max: float) -> None:
    """Both layouts have torch's bytes of each value, of ties and their sides, saturated; edges by hand."""
    codes = torch.arange(256).to(torch.uint8)
    values = codes.view(dtype).float()
    assert values[0x7F] == fp8_max and values.isnan().tolist() == [code == 0x80 for code in range(256)]

    def bytes_of(x: Tensor) -> Tensor:
        row, one = x.reshape(1, -1), torch.ones(1)
        made = ops.quantize(row, one, dtype, fp8_max, False).view(torch.uint8)
        across = ops.quantize(row.t(), one, dtype, fp8_max, True).view(torch.uint8)[:, : x.numel()]
        assert torch.equal(made, across)
        assert torch.equal(made, cast(row, 1.0, dtype, fp8_max).view(torch.uint8))
        return made[0]

    assert torch.equal(bytes_of(values), codes)
    low, high = values[:0x7F], values[1:0x80]
    middle, step = (low + high) / 2, (high - low) / 1024
    lower = torch.arange(0x7F)
    even = lower + lower % 2  # the even byte of two neighbours
    for x, expected in ((middle, even), (middle - step, lower), (middle + step, lower + 1)):
        assert torch.equal(bytes_of(x).long(), expected)
        # zero has no sign: 0x80 is NaN
        assert torch.equal(bytes_of(-x).long(), torch.where(expected > 0, expected + 0x80, 0))
    edges = torch.tensor([0.0, -0.0, -1e-30, 1.01 * fp8_max, -3e38, math.inf, -math.inf, math.nan])
    assert bytes_of(edges).tolist() == [0x00, 0x00, 0x00, 0x7F, 0xFF, 0x80, 0x80, 0x80]


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("margin", [0, 8, 64])
def test_scales_and_inverses_are_finite_and_positive(power_of_2, margin):
    largest, least = torch.finfo(torch.float32).max, torch.finfo(torch.float32).smallest_normal
    amaxes = torch.tensor([1e-45, least, 1e-30, 1.0, 1e30, largest])
    for fp8_max in (240.0, 448.0, 57344.0):
        scale = scale_of(amaxes, fp8_max, margin, power_of_2)
        inverse = inverse_of(scale)
        assert (scale >= least).all() and scale.isfinite().all() and (inverse > 0).all()
        assert inverse.isfinite().all()
