"""What the tests of torchao and of TransformerEngine state about FP8 training, asked of `backend="fp8"` in
our own words.

Each test names its source: torchao is pytorch/ao at 36027d82d (2026-08), TE is NVIDIA/TransformerEngine at
d0067d0da (2026-08). What we had already, and what has no counterpart here, is in the table of README.md
beside this file.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.harness import ALL_FP8, assert_close, assert_fp8, compiled, grads_of, leaf, noise, sqnr
from tests.support.models import make

pytestmark = [pytest.mark.usefixtures("interpreted")]

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def step(
    model: nn.Module, call: Callable[..., Tensor], x: Tensor, dy: Tensor | None = None
) -> dict[str, Tensor]:
    """Output and gradients of a step; `dy` None: of the sum of the output, whose gradient has no strides."""
    x = x if x.requires_grad else leaf(x)
    y = call(x)
    y.sum().backward() if dy is None else y.backward(dy)
    return {"y": y.detach(), "x": x.grad, **grads_of(model)}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert x.dtype == other[name].dtype and torch.equal(x, other[name]), (
            f"{name}: {sqnr(x, other[name]):.1f} dB"
        )


# -- floors --


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("encoding", ["ocp", "fnuz"])
def test_the_smallest_scales_of_float16(encoding: str) -> None:
    """Tensors whose scale is over the largest float16 are cast with it all the same: scales are float32.
    torchao: test/float8/test_base.py, test_small_amax_float16."""
    for peak in (448.0, 57344.0):
        amax = peak / 65504.0 / 4
        model = make(lambda: nn.Linear(128, 128, bias=False), F16)
        vanilla = copy.deepcopy(model)
        run = compiled(model, "tensorwise", policy=ALL_FP8, fp8_encoding=encoding)
        x = noise(16, 128)
        x = (x * (amax / x.abs().max())).to(F16)
        dy = noise(16, 128, seed=2, dtype=F16)
        assert_close(step(vanilla, vanilla, x, dy), step(model, run, x, dy), 20.0, f"{encoding} {peak}")


# -- dtypes --


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_model_that_is_cast_between_calls(dtype: torch.dtype) -> None:
    """After `model.to(dtype)`, results are those of a model that always had this dtype. TE:
    tests/pytorch/test_sanity.py, test_model_multiple_cast."""
    model = make(lambda: nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128)))
    run, x = compiled(model, "tensorwise", policy=ALL_FP8), noise(16, 128)
    assert run(x).dtype == F32
    model.to(dtype)
    fresh = copy.deepcopy(model)
    expected = step(fresh, compiled(fresh, "tensorwise", policy=ALL_FP8), x.to(dtype))
    equal(expected, step(model, run, x.to(dtype)))


# -- other recipes --


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("other", ["mxfp8", "blockwise", "rowwise"])
def test_another_recipe_in_the_middle(other: str) -> None:
    """After steps of `delayed`, a recipe without state computes what it does for a fresh model; back again,
    `delayed` goes on from its histories. TE: tests/pytorch/test_recipe.py, test_dynamic_recipe_update and
    test_quantizer_update."""
    models = [make(lambda: nn.Linear(128, 128), BF16) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    changed, steady = (compiled(model, "delayed", policy=ALL_FP8) for model in models)

    def both(
        seed: int, call: Callable[..., Tensor], expected: Callable[..., Tensor], twin: nn.Module
    ) -> None:
        x, dy = noise(32, 128, seed=seed, dtype=BF16), noise(32, 128, seed=9 + seed, dtype=BF16)
        for model in (*models, twin):
            model.zero_grad()
        equal(step(twin, expected, x, dy), step(models[0], call, x, dy))

    for seed in range(2):
        both(seed, changed, steady, models[1])
    fresh = copy.deepcopy(models[1])
    both(5, compiled(models[0], other, policy=ALL_FP8), compiled(fresh, other, policy=ALL_FP8), fresh)
    for seed in range(2, 4):
        both(seed, changed, steady, models[1])


# -- recomputation --


class Dropped(nn.Module):
    """Linears with dropout, of which a checkpoint has all or a part. `cast`: under an autocast of its own."""

    def __init__(self, how: str, cast: bool) -> None:
        super().__init__()
        self.how, self.cast = how, cast
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def tail(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16, enabled=self.cast):
            return F.dropout(self.down(F.gelu(x)), 0.1)

    def whole(self, x: Tensor) -> Tensor:
        return self.tail(F.dropout(self.up(x), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "whole":
            return checkpoint(self.whole, x, use_reentrant=False)
        if self.how == "part":
            return checkpoint(self.tail, F.dropout(self.up(x), 0.1), use_reentrant=False)
        return self.whole(x)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("recipe", "cast"), [("delayed", False), ("delayed", True), ("mxfp8", True)])
def test_dropout_in_checkpoints(recipe: str, cast: bool) -> None:
    """A recomputation draws the same masks and has the same scales, also under an autocast that the
    checkpointed function opens: the gradients have the bits of a training without checkpoints. TE:
    tests/pytorch/test_numerics.py, test_gpt_full_activation_recompute,
    test_gpt_selective_activation_recompute and ..._with_inner_autocast."""
    found: list[list[dict[str, Tensor]]] = []
    state = make(lambda: Dropped("", cast)).state_dict()
    for how in ("", "whole", "part", "around"):
        model = Dropped(how, cast)
        model.load_state_dict(state)
        run = compiled(model, recipe, policy=ALL_FP8, fallback_random=True)
        call = functools.partial(checkpoint, run, use_reentrant=False) if how == "around" else run
        torch.manual_seed(3)
        found.append([])
        dy = noise(32, 128, seed=7, dtype=BF16 if cast else F32)
        for seed in range(3):
            model.zero_grad()
            found[-1].append(step(model, call, noise(32, 128, seed=seed), dy))
        assert_fp8(model)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            equal(a, b)
