"""Headroom of delayed scales: gradients that outgrow their history, the limit of an overflow, and tensors without headroom."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from fp8compile.config.recipe import Block
from fp8compile.devices.formats import E4M3, E5M2, FORMATS, Format
from fp8compile.ir import ops, state_page
from fp8compile.ir.scale import scale_of
from tests.support import hooks
from tests.support.harness import compiled, load_scaling, noise, scaling_tensors
from tests.support.models import Mlp, make

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


def cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


class Beside:
    """A model in high precision, and a compiled copy that takes over its weights at every step."""

    def __init__(self, plain: nn.Module, **options: Any) -> None:
        self.plain, self.model = plain, copy.deepcopy(plain)
        self.run = compiled(self.model, **options)

    def step(self, loss: Callable[[Callable[..., Any]], Tensor]) -> tuple[float, list[float]]:
        """The lowest cosine between a gradient and the exact one, and the ratios of their norms."""
        self.model.load_state_dict(self.plain.state_dict())
        for run, parameters in ((self.plain, self.plain), (self.run, self.model)):
            parameters.zero_grad()
            loss(run).backward()
        pairs = [(p.grad, q.grad) for p, q in zip(self.plain.parameters(), self.model.parameters(), strict=True)]
        assert all(a is not None and b is not None for a, b in pairs)
        return min(cosine(a, b) for a, b in pairs), [float(b.norm() / a.norm()) for a, b in pairs]


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
    """Adam changes every weight by its learning rate, however small the weight is, so gradients grow fast at first."""
    both = Beside(make(lambda: Residual(scale, head)))
    optimizer = torch.optim.AdamW(both.plain.parameters(), 1e-3)
    for step in range(6):
        x, y = noise(4, 65, 128, seed=step), torch.arange(4) + step
        lowest, lengths = both.step(lambda run, x=x, y=y: F.cross_entropy(run(x), y))
        assert lowest > 0.97 and min(lengths) > 0.9, f"step {step}: {lowest}, {lengths}"
        optimizer.step()


@pytest.mark.slow
def test_a_small_last_batch() -> None:
    """Under a mean loss a token's gradient grows as the batch shrinks."""
    both = Beside(make(lambda: nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))), dynamic=True)
    for batch in (32, 32, 5, 32, 1, 32):
        x = noise(batch, 128, seed=batch)
        lowest, lengths = both.step(lambda run, x=x: run(x).square().mean())
        assert lowest > 0.98 and 0.95 < min(lengths) <= max(lengths) < 1.05, f"{batch} rows: {lowest}, {lengths}"


# -- the limit of an overflow


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.torch_name)
@pytest.mark.parametrize("gradient", [False, True])
def test_limits(form: Format, gradient: bool) -> None:
    """An overflow exceeds both the range of the scale and the jump; the constants of a page give the FP8 maximum."""
    jump = 8.0 if gradient else 2.0
    for margin in range(33):
        reach, limit = form.max / 2.0**margin, state_page.limit_of(form.max, margin, gradient)
        assert limit == (jump * reach if 2.0**margin < jump else form.max)
        page = state_page.new_page(1, 1, torch.device("cpu"), [state_page.SlotSettings(reach, 1, 1, limit)])
        constants = page[0, [state_page.REACH, state_page.LIMIT]].tolist()
        assert state_page.fp8_max_of(*constants) == form.max, margin


def overflows(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "overflow" in record.getMessage()]


@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize(
    ("options", "fits", "covered"),
    [({}, 2000.0, 2048.0), ({"margin": (0, 0, 2)}, 7.5, 4.0), ({"margin": 0}, 7.5, 1.0)],
    ids=["default", "margin 2", "margin 0"],
)
def test_the_line_about_an_overflow(
    options: dict[str, Any], fits: float, covered: float, caplog: pytest.LogCaptureFixture
) -> None:
    """No line if a gradient grows within its headroom, or by less than a jump; one line if a gradient saturates."""
    model = make(lambda: nn.Linear(128, 128, bias=False))
    run = compiled(model, **options)
    x = noise(16, 128, seed=3)
    with caplog.at_level(logging.INFO, "fp8compile"), hooks.overflow_lines():
        for factor in (1.0, fits, fits / 10):
            run(x).backward(torch.full((16, 128), factor))
        assert not overflows(caplog)
        for factor in (1e4 * fits, 1.0):
            run(x).backward(torch.full((16, 128), factor))
    (line,) = overflows(caplog)
    assert f"weight (gradient): amax {1e4 * fits:.4g}, its scale covered {fits * covered:.4g}" in line


# -- tensors that need no headroom


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
def test_a_scale_of_its_own_amax_covers_a_tensor(form: Format, power_of_2: bool) -> None:
    """With a margin of 0, amax times scale exceeds the FP8 maximum by a rounding at most, for tensors and blocks."""
    for exponent in range(-120, 120, 7):
        x = noise(128, 128, seed=exponent + 120).double().mul(2.0**exponent).float()
        for block in (Block(0, 0), Block(1, 0), Block(1, 32), Block(1, 128), Block(128, 128)):
            amaxes = ops.amax(x) if block == (0, 0) else ops.amax_blocks(x, False, list(block))
            scales = scale_of(amaxes, form.max, 0, power_of_2)
            assert (amaxes.double() * scales.double()).max() <= form.max * (1 + 2**-23)


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise"])
def test_nothing_saturates_by_its_own_amax(recipe: str) -> None:
    """Nothing saturates in a first call with delayed scaling, nor in a later call with current scaling."""
    model = make(Mlp)
    options = {"current_scaling": (True, False, True)} if recipe == "delayed" else {}
    run = compiled(model, recipe, **options)
    fp8compile.stats(model, measure=True)
    for scale in (1.0, 1e4):
        out = run(noise(64, 128, scale=scale))
        out.backward(torch.full_like(out, scale))
        rows = [row for row in fp8compile.stats(model, measure=True) if row["recipe"] != "delayed" or scale == 1.0]
        assert len(rows) >= 4 and all(row["overflows%"] == 0.0 for row in rows)


# -- state from runs without headroom


@pytest.mark.slow
def test_a_state_with_another_margin_is_adapted() -> None:
    """A loaded scale changes by the difference of the margins, and the next gradient fits."""
    model = make(Mlp)
    compiled(model, margin=0)(noise(16, 128)).sum().backward()
    state, before = scaling_tensors(model), {key: slot.scale() for key, slot in hooks.slots_of(model).items()}
    other = make(Mlp)
    run = compiled(other)
    with pytest.raises(fp8compile.StateError, match="FP8 maximum / 2..margin 57344, here 28"):
        load_scaling(other, state, strict=True)
        run(noise(16, 128))
    load_scaling(other, state)
    used = run(noise(16, 128))
    for key, slot in hooks.slots_of(other).items():
        assert slot.scale() == before[key] / (2048.0 if key[1] == "gradient" else 1.0)
    (1000.0 * used.sum()).backward()
    exact = make(Mlp)
    (1000.0 * exact(noise(16, 128)).sum()).backward()
    assert cosine(other.up.weight.grad, exact.up.weight.grad) > 0.99
