"""Inductor's plan for a described H200, executed on a CPU, against the eager FP8 reference: outputs,
gradients, state.

test_agreement.py interprets graphs. The tests here also cover the steps after the graph: the schedule, reused
buffers, the strides that Inductor chooses, Inductor's kernels around ours, the order of what raises amaxes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fp8compile import compat
from tests.backend import test_agreement
from tests.support.executed import Launched, executed, planning
from tests.support.harness import ALL_FP8, MOVING, Pair, gated_inputs, grads_of, like, noise, sqnr
from tests.support.models import Mlp, Rotary, Stack, make, relus

pytestmark = [planning, pytest.mark.compat]

FP32, BF16 = torch.float32, torch.bfloat16


class PostNorm(nn.Module):
    """Two consecutive norms, as at the end of OLMo 2: in their gradient, sums over rows depend on others."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.linear, self.inner, self.outer = nn.Linear(width, width), nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(self.linear(x)))


class Turned(nn.Module):
    """Mixes tokens: the operand is a transposed view, whose order Inductor would choose for the copy."""

    def __init__(self, tokens: int = 128) -> None:
        super().__init__()
        self.mix = Mlp(tokens)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.transpose(1, 2)).transpose(1, 2)


class Concatenated(nn.Module):
    """Two layers that read concatenations: Inductor makes these, and reduces their amaxes."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first, self.between = nn.Linear(2 * width, width, bias=False), nn.Linear(width, width)
        self.last = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.between(self.first(torch.cat((x, 0.25 * x.flip(-1)), -1)).relu()).relu()
        return self.last(torch.cat((y.flip(-1), x * y), -1))


BUILDS = {
    **test_agreement.BUILDS,
    "odd": lambda: Mlp(144, 1040),  # Inductor would pad these rows to a multiple of 128 bytes
    "post_norm": PostNorm,
    "rotary": Rotary,
}
DEEP = test_agreement.DEEP | {"post_norm", "rotary"}


def pair_of(model: nn.Module, recipe: str = "delayed", **options: object) -> Pair:
    """All matmuls in FP8, although so small a model gains nothing on an H200; gated inputs scaled as by the
    default policy."""
    gated = [name.removesuffix(".weight") for name in gated_inputs(model)] if recipe == "delayed" else []
    rules = [{"module": name, "current_scaling": [True, False, False], "fp8": "on"} for name in gated]
    return Pair(model, recipe, policy={"rules": [*rules, *ALL_FP8["rules"]]}, **options)


def steps(pair: Pair, shape: tuple[int, ...], count: int = 4) -> None:
    """The second has two forwards before two backwards."""
    for step, factor in enumerate(MOVING[:count]):
        x = noise(*shape, seed=step, scale=factor, dtype=pair.dtype)
        if step == 1:
            pair.zero_grad()
            pair.two_calls(x, 0.5 * x)
        else:
            pair.step(x, grad=like(x, step) / factor)
        pair.sgd(0.001 * factor)
    pair.finish()


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    ("name", "recipe", "dtype", "choice"),
    [
        ("checkpointed_relus", "delayed", BF16, 0),
        ("mlp", "mxfp8", FP32, 1),
        ("rotary", "delayed", BF16, 0),
        ("gated", "tensorwise", FP32, 0),
        ("twice", "rowwise_with_gw_hp", FP32, 0),
        ("checkpointed_blocks", "rowwise", FP32, 1),
        ("post_norm", "blockwise", BF16, 1),
        ("odd", "blockwise", BF16, 0),
        ("spelled", "tensorwise", FP32, 1),
    ],
)
def test_training_steps(name: str, recipe: str, dtype: torch.dtype, choice: int) -> None:
    with executed(choice) as plan:
        model = make(BUILDS[name], dtype)
        width = next(model.parameters()).shape[-1]
        shape = (48, width) if name == "spelled" else (2, 24, width)
        steps(pair_of(model, recipe, deep=name in DEEP), shape, 4 if recipe == "delayed" else 2)
    assert any(kernel.ours for kernel in plan.kernels)
    if (name, recipe) == ("rotary", "delayed"):  # our kernels turn the gradients of q and k back
        assert plan.launches("fp8_mul_slice_neg_cat") >= 2


@pytest.mark.slow
def test_one_launch_collects_what_inductor_reduces() -> None:
    """Amaxes that Inductor reduces join the state by one launch."""
    with executed() as plan:
        steps(pair_of(make(Concatenated), deep=True), (2, 24, 128))
    warm = plan.scaled // 9
    assert warm and plan.launches("fp8_raise") == warm


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_computed_weights(recipe: str) -> None:
    """The kernel that casts a computed weight also computes it, norms over rows included. FP8 holds the
    operands exactly."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        linear = nn.Linear(128, 256, bias=False)
        linear.weight.data = linear.weight.data.sign() / 8
        return nn.utils.parametrizations.weight_norm(linear)

    plain, model = build(), build()
    with executed() as plan:
        run = torch.compile(model, backend="fp8", options={"recipe": recipe, "policy": ALL_FP8})
        for step in range(3):
            both = []
            for module, call in ((plain, plain), (model, run)):
                module.zero_grad()
                x = noise(48, 128, seed=step).sign().requires_grad_()
                y = call(x)
                (y * noise(48, 256, seed=9).sign()).sum().backward()
                both.append([y.detach(), x.grad, *grads_of(module).values()])
            assert min(map(sqnr, *both)) > 80.0
            for module in (plain, model):
                with torch.no_grad():
                    module.parametrizations.weight.original0.mul_(1.5)
    assert plan.scaled == (2 if recipe == "delayed" else 3) * 3  # the first call of delayed scaling is cold
    assert any(kernel.ours for kernel in plan.kernels)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_casts_that_inductor_writes(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without generated kernels, operands still have the layout that tensor cores need."""
    monkeypatch.setattr(compat.triton, "reorders", lambda: True)
    with executed() as plan:
        pair = pair_of(make(Turned), recipe)
        for step in range(3):
            pair.step(noise(2, 128, 96, seed=step))
        pair.assert_fp8()
    assert not any("cast" in kernel.name for kernel in plan.kernels if kernel.ours)


@pytest.mark.slow
def test_float32_weights_under_autocast() -> None:
    with executed() as plan:
        pair = pair_of(make(lambda: Stack(*relus())), autocast=BF16, deep=True)
        for step, factor in enumerate((1.0, 1.5, 0.5)):
            pair.step(noise(2, 24, 128, seed=step, scale=factor))
        pair.finish()
    assert plan.scaled == 2 * 12  # the first call is cold


@pytest.mark.slow
def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is not run is seen; a pointer that is declared a multiple of 16 bytes must be one."""
    ran: list[str] = []
    run = Launched.run

    def all_but_the_first_cast(self: Launched, *args: object, **kwargs: object) -> None:
        left_out = "_cast_" in self.name and not any("_cast_" in name for name in ran)
        ran.append(self.name)
        if not left_out:
            run(self, *args, **kwargs)

    with executed() as plan:
        pair = pair_of(make(Mlp), "tensorwise")
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match="dB"):
            patch.setattr(Launched, "run", all_but_the_first_cast)
            pair.step(noise(48, 128))
        kernel = next(k for k in plan.kernels if k.ours and "x0" in k.signature)
        names = [name for name, kind in kernel.signature.items() if kind != "constexpr"]
        values = {name: torch.zeros(1 << 16) for name in names}
        values["x0"] = torch.zeros(1 << 16)[1:]
        with pytest.raises(AssertionError, match="x0 was declared a multiple of 16"):
            kernel.run(*values.values())


def test_a_graph_without_an_fp8_matmul() -> None:
    """On the CPU itself. It has inputs for its state and reads none; the Inductor of 2.11 compares their
    shapes with those that were traced."""
    run = torch.compile(Mlp(), backend="fp8", options={"policy": {"rules": [{"fp8": "off"}]}})
    for _ in range(2):
        run(noise(16, 128)).sum().backward()
