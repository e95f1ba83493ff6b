"""Matmuls in gradient hooks exist only in the backward. They are not taken for gradients of weights, and are
not rewritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from tests.support import hooks
from tests.support.exact import EXACT, Model, Several, parameter, signs, ternary
from tests.support.fuzz_models import Product
from tests.support.harness import assert_close, sqnr
from tests.support.stepped import stepped

pytestmark = pytest.mark.usefixtures("interpreted")
HOOK = "matmul only in backward: no weight's gradient"
TRAINED = ["fprop fp8", "dgrad fp8", "wgrad fp8"]


def hooked(x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    x.register_hook(hook)
    return x


def projected(g: Tensor, q: Tensor) -> Tensor:
    return g - (g @ q) @ q.t()


def orthogonalized(g: Tensor) -> Tensor:
    """A Newton-Schulz step, as in Muon."""
    return 1.5 * g - 0.5 * (g @ g.t()) @ g


def of_output(m: nn.Module, x: Tensor) -> Tensor:
    return hooked(x @ m.w, lambda g: projected(g, m.q))


# each with two matmuls of its hook, those of a trained weight, and `MORE`
HOOKS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "of the output": of_output,
    "of the output and an activation": lambda m, x: hooked(F.relu(x @ m.w), lambda g: projected(g, m.q)),
    "of the input": lambda m, x: hooked(x * 1, lambda g: projected(g, m.q)) @ m.w,
    # into a small space and back, as some optimizers do
    "of the weight": lambda m, x: x @ hooked(m.w * 1, lambda g: (g @ m.q) @ m.q.t()),
    "of the weight, there and back": lambda m, x: x @ hooked(m.w.t(), orthogonalized).t(),
    "preconditioned": lambda m, x: x @ hooked(m.w * 1, lambda g: m.q @ g @ m.q),
    # one of the hook's matmuls looks like a dgrad
    "by the weight": lambda m, x: hooked(x @ m.w, lambda g: g - (g @ m.w.t()) @ m.w / 128),
    # one of them looks like a wgrad
    "by the input": lambda m, x: hooked(x @ m.w, lambda g: g - x @ (x.t() @ g) / 128),
    "in a checkpoint": lambda m, x: checkpoint(lambda x: of_output(m, x), x, use_reentrant=False),
    # matmuls of one input with two weights; only one has a hook
    "one of two": lambda m, x: of_output(m, x) + x @ m.v,
    # the hook's matrix is also the weight of a matmul
    "of a buffer that multiplies": lambda m, x: of_output(m, x) + x.flip(0) @ m.q,
}
MORE = {"one of two": TRAINED, "of a buffer that multiplies": ["fprop fp8", "dgrad fp8"]}


def build(function: Callable) -> nn.Module:
    return Model(
        function, w=parameter(128, 128), v=parameter(128, 128, seed=2), q=signs(128, 128, seed=3) / 16
    )


def test_hooks() -> None:
    """Gemms are identified by the tensors that they read: their sizes are all equal."""
    cases = dict(HOOKS)
    if torch.__version__ < "2.12":  # Dynamo of torch 2.11 puts an input that a hook reads after its first use
        del cases["by the weight"], cases["by the input"]
    model = Several(map(build, cases.values()))
    outputs = torch.compile(model, backend="fp8")(*(ternary(128, 128).requires_grad_() for _ in cases))
    sum(y.sum() for y in outputs).backward()
    matmuls = fp8compile.report(model).matmuls
    for i, name in enumerate(cases):
        found = sorted(f"{r.gemm} {r.decision}" for r in matmuls if r.parameter.startswith(f"{i}."))
        assert found == sorted([*TRAINED, *MORE.get(name, [])]), name
    others = [f"{r.gemm} {r.reason}" for r in matmuls if not r.parameter]
    assert others == [HOOK] * 2 * len(cases)


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_a_hook_is_exact(recipe: str) -> None:
    """The hook multiplies by a matrix and its inverse, with numbers between that FP8 does not have."""
    corner = torch.zeros(128, 128)
    corner[:64, 64:] = ternary(64, 64, seed=6) * 3  # its square is zero
    there, back = torch.eye(128) + corner, torch.eye(128) - corner

    def function(m: nn.Module, x: Tensor) -> Tensor:
        return hooked(x @ m.w, lambda g: (g @ m.there) @ m.back)

    x, seeds = ternary(32, 128), ternary(32, 128, seed=5)
    model = Model(function, w=parameter(128, 128), there=there, back=back)
    compiled = torch.compile(model, backend="fp8", options={"recipe": recipe})
    expected, got = (stepped(call, model, [x], lambda y: seeds)["w"] for call in (model, compiled))
    assert sqnr(expected, got) > EXACT and sqnr(expected, x.t() @ seeds) > EXACT


class Copying(Product):
    """Its backward multiplies by a copy of the weight."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return g @ w.t().contiguous().t().clone(), g.t() @ x


class Rounding(torch.autograd.Function):
    """Multiplies by a rounded weight; its backward rounds the weight again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.round().t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return g @ w.round(), g.t() @ x


class Norming(torch.autograd.Function):
    """A fused norm and matmul: its backward recomputes the matmul's input from saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (2 * x).relu() @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return (g @ w) * (x > 0) * 2, g.t() @ (2 * x).relu()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_custom_functions(recipe: str) -> None:
    """The weight is cast as a weight in the backward, too: 8 to 15 are exact in E4M3, but not in E5M2."""
    sizes = torch.randint(8, 16, (128, 128), generator=torch.Generator().manual_seed(0)).float()
    drawn, functions = sizes * signs(128, 128), (Copying, Rounding, Norming)
    model = Several(
        Model(lambda m, x, f=f: f.apply(x, m.w), w=nn.Parameter(drawn.clone())) for f in functions
    )
    options: dict[str, Any] = {"recipe": recipe}
    if recipe == "tensorwise":
        options["power_of_2_scale"] = True
    compiled = torch.compile(model, backend="fp8", options=options)
    given = [ternary(32, 128)] * 3, lambda y: ternary(32, 128, seed=5)
    expected, got = (stepped(call, model, *given) for call in (model, compiled))
    assert_close(expected, got, EXACT if recipe == "tensorwise" else 28, recipe)
    found = sorted(r.gemm for r in fp8compile.report(model).matmuls if r.decision == "fp8")
    assert found == sorted(["dgrad", "fprop", "wgrad"] * len(functions))


def test_a_product_of_two_weights() -> None:
    """Both are gradients of weights: `rowwise_with_gw_hp` and a rule for wgrads keep both unquantized."""

    def product(m: nn.Module, x: Tensor) -> Tensor:
        return F.linear(x, m.b @ m.a)

    rule = {"gemm": "wgrad", "fp8": "off", "name": "no wgrads"}
    cases = {"recipe": {"recipe": "rowwise_with_gw_hp"}, "no wgrads": {"policy": {"rules": [rule]}}, "": {}}
    for why, options in cases.items():
        model = Model(product, a=parameter(128, 128), b=parameter(128, 128, seed=2))
        with hooks.traced():
            torch.compile(model, backend="fp8", options=options)(ternary(32, 128)).sum().backward()
        weights = [r for r in fp8compile.report(model).matmuls if r.gemm != "matmul"]
        assert sorted(r.gemm for r in weights) == ["fprop", "wgrad", "wgrad"]
        reasons = [r.reason for r in weights if r.gemm == "wgrad"]
        assert all(reason.startswith(why) and bool(reason) == bool(why) for reason in reasons)


ADDED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "addmm": lambda m, x: torch.addmm(torch.mm(x, m.w), x, m.v),
    "addmm with factors": lambda m, x: torch.addmm(torch.mm(x, m.w), x, m.v, beta=2.0, alpha=0.5),
    "addmm of addmm": lambda m, x: torch.addmm(torch.addmm(x, x, m.w), x, m.v),
    "baddbmm": lambda m, x: torch.baddbmm(torch.mm(x, m.w)[None], x[None], m.v[None])[0],
    "a row": lambda m, x: torch.addmm((x @ m.w)[0], x, m.v),
    "chain": lambda m, x: torch.addmm(x @ m.w, x @ m.w @ m.v, m.v),
}


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("rowwise", marks=pytest.mark.slow)])
def test_what_is_added_to_a_product(recipe: str) -> None:
    """A matmul that adds another FP8 matmul's result, or whose operands are such, not exact in FP8."""

    def models() -> nn.Module:
        return Several(Model(f, w=parameter(128, 128), v=parameter(128, 128, seed=2)) for f in ADDED.values())

    plain, model = models(), models()
    compiled = torch.compile(model, backend="fp8", options={"recipe": recipe})
    given = [ternary(32, 128)] * len(ADDED), lambda y: ternary(32, 128, seed=5)
    expected, got = stepped(plain, plain, *given), stepped(compiled, model, *given)
    for i, name in enumerate(ADDED):
        floor = 20 if name in ("chain", "a row") else EXACT
        for key in (f"output {i}", f"input {i}", f"{i}.w", f"{i}.v"):
            assert sqnr(expected[key], got[key]) > floor, (name, key)
    assert fp8compile.report(model).fp8_flop_fraction == 1.0
