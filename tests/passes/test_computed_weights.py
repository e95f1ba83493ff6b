"""Weights that are computed from parameters in each call run in FP8, and all these parameters get the right
gradients.

All operands are 0 or plus or minus one number, which FP8 represents exactly: any difference to high precision
is an error.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import fp8compile
from tests.support import hooks
from tests.support.exact import EXACT, Model, Several, linear, parameter, signs, ternary
from tests.support.harness import assert_close
from tests.support.stepped import stepped

pytestmark = pytest.mark.usefixtures("interpreted")


class Softplus(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return F.softplus(w.abs()) * w.sign()


def softplus() -> nn.Module:
    made = linear()
    parametrize.register_parametrization(made, "weight", Softplus())
    return made


def pruned() -> nn.Module:
    made = linear()
    prune.custom_from_mask(made, "weight", ternary(256, 128, seed=9).abs())
    return made


def spectral() -> nn.Module:
    torch.manual_seed(0)
    return parametrizations.spectral_norm(linear())


def dora(m: nn.Module, x: Tensor) -> Tensor:
    """A direction and a magnitude for each row."""
    return F.linear(x, m.magnitude[:, None] * (m.v / m.v.norm(dim=1, keepdim=True).detach()))


def twice(m: nn.Module, x: Tensor) -> Tensor:
    """Two matmuls with one computed weight."""
    w = m.w * m.s
    return F.linear(x, w) + F.linear(x.flip(0), w)


def full(*shape: int, value: float) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, value))


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: parametrizations.weight_norm(linear(bias=True)),
    "weight_norm by hooks": lambda: nn.utils.weight_norm(linear()),
    "weight_norm, checkpointed": lambda: Model(
        lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=parametrizations.weight_norm(linear())
    ),
    "spectral_norm": spectral,
    "softplus": softplus,
    "pruned": pruned,
    "dora": lambda: Model(dora, v=parameter(256, 128), magnitude=full(256, value=2.0)),
    # one matmul with three parameters
    "fused": lambda: Model(
        lambda m, x: F.linear(x, torch.cat([m.q, m.k, m.v])),
        **{name: parameter(128, 128, seed=i) for i, name in enumerate("qkv")},
    ),
    "half": lambda: Model(lambda m, x: F.linear(x, m.w * 0.5), w=parameter(256, 128)),
    "stacked": lambda: Model(
        lambda m, x: torch.einsum("td,edf->etf", x, m.w).sum(0), w=parameter(4, 128, 64)
    ),
    # one scale for each input feature, and a mask in a buffer
    "by_input": lambda: Model(
        lambda m, x: x @ (m.w * m.mask * m.s).t(),
        w=parameter(256, 128),
        s=full(128, value=4.0),
        mask=ternary(256, 128, seed=4).abs(),
    ),
    "twice": lambda: Model(twice, w=parameter(256, 128), s=full(value=0.5)),
}


def train(build: Callable[[], nn.Module], *inputs: Tensor, steps: int = 3, **options: object) -> nn.Module:
    """A few steps in FP8 and in high precision: the same outputs and gradients. Returns the compiled one."""
    model, plain = build(), build()
    run = torch.compile(model, backend="fp8", options=options)
    for step in range(steps):
        given = inputs, lambda y: ternary(*y.shape, seed=7)
        assert_close(stepped(plain, plain, *given), stepped(run, model, *given), EXACT, f"step {step}")
    return model


def gemms(model: nn.Module, part: str = "") -> list[str]:
    """The gemms of the matmuls of a part, with the decisions."""
    matmuls = fp8compile.report(model).matmuls
    return sorted(f"{r.gemm} {r.reason or r.decision}" for r in matmuls if r.parameter.startswith(part))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("recipe", ["delayed", pytest.param("rowwise", marks=pytest.mark.slow)])
def test_exact(recipe: str) -> None:
    inputs = [ternary(32, 128, seed=i) for i in range(len(BUILDS))]
    model = train(lambda: Several(build() for build in BUILDS.values()), *inputs, recipe=recipe, strict=True)
    for i, name in enumerate(BUILDS):
        count = 2 if name == "twice" else 1
        assert gemms(model, f"{i}.") == sorted(count * ["fprop fp8", "dgrad fp8", "wgrad fp8"]), name
        if recipe == "delayed":
            roles = [role for parameter, role, _ in hooks.slots_of(model) if parameter.startswith(f"{i}.")]
            assert sorted(roles) == ["gradient", *count * ["input"]], name


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"])
def test_other_recipes(recipe: str) -> None:
    parts = [BUILDS[name] for name in ("weight_norm", "fused")]
    inputs = [ternary(32, 128, seed=i) for i in (1, 2)]
    model = train(lambda: Several(part() for part in parts), *inputs, steps=1, recipe=recipe)
    kept = "wgrad recipe rowwise_with_gw_hp keeps wgrad" if recipe == "rowwise_with_gw_hp" else "wgrad fp8"
    assert gemms(model) == sorted(2 * ["dgrad fp8", "fprop fp8", kept])


@pytest.mark.feature("delayed")
def test_the_largest_source_has_the_slots() -> None:
    def build() -> nn.Module:
        parts = {"scale": parameter(1, 128), "small": parameter(128, 128), "large": parameter(256, 128)}
        return Model(lambda m, x: F.linear(x, m.scale * torch.cat([m.small, m.large])), **parts)

    model = train(build, ternary(32, 128))
    assert {name for name, _, _ in hooks.slots_of(model)} == {"large"}


def test_what_is_computed_by_a_matrix_function_is_no_weight() -> None:
    model = parametrizations.orthogonal(nn.Linear(128, 128, bias=False))
    run = torch.compile(model, backend="fp8", options={"strict": True})
    with pytest.raises(Exception, match="no matmul of .* becomes FP8") as raised:
        run(ternary(32, 128)).sum().backward()
    assert "not a weight" in str(raised.value)
    torch._dynamo.reset()
    torch.compile(model, backend="fp8")(ternary(32, 128)).sum().backward()
    reason = "not a weight: computed from parametrizations.weight.original by linalg_matrix_exp"
    assert {r.reason for r in fp8compile.report(model).matmuls} == {reason}


def test_a_mask_of_buffers_is_no_weight() -> None:
    model = Model(lambda m, x: F.linear(x, m.w) @ (m.one * 2), w=parameter(128, 128), one=signs(128, 128))
    torch.compile(model, backend="fp8")(ternary(32, 128)).sum().backward()
    assert {r.fqn for r in fp8compile.report(model).matmuls if r.decision == "fp8"} == {"w"}


def scaled_by_input(m: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, m.w * x.abs().amax())


def of_tokens(m: nn.Module, x: Tensor) -> Tensor:
    return x @ F.embedding(x[0].long().abs(), m.w)


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize("function", [scaled_by_input, of_tokens])
def test_what_depends_on_an_input_is_no_weight(function: Callable) -> None:
    model = Model(function, w=parameter(128, 128))
    torch.compile(model, backend="fp8")(ternary(32, 128)).sum().backward()
    found = {r.gemm: r.reason for r in fp8compile.report(model).matmuls}
    assert found == {"matmul": "not a weight: neither operand is a parameter"}


def test_experts_in_an_einsum() -> None:
    """The first einsum is one matmul; the second has one weight for each batch entry."""
    model = Model(
        lambda m, x: torch.einsum("etf,efd->etd", torch.einsum("td,edf->etf", x, m.w1).relu(), m.w2).sum(0),
        w1=parameter(4, 128, 256),
        w2=parameter(4, 256, 128, seed=2),
    )
    torch.compile(model, backend="fp8")(ternary(32, 128).requires_grad_()).sum().backward()
    batched = "batched: one weight matrix per batch entry"
    found = sorted((r.fqn, r.gemm, r.reason) for r in fp8compile.report(model).matmuls)
    gemms = "dgrad", "fprop", "wgrad"
    assert found == [("w1", gemm, "") for gemm in gemms] + [("w2", gemm, batched) for gemm in gemms]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = nn.Sequential(linear(128, 256, bias=True), nn.ReLU(), linear(256, 128, bias=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.n(x)


def test_a_dict_of_plain_tensors() -> None:
    """The tensors are new in each call. Current amaxes scale them: a history would never become warm."""
    model, x = Two(), ternary(32, 128)

    def call(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, p, (x,))

    run = torch.compile(call, backend="fp8", options={"strict": True})
    twin = Two()
    torch.compile(twin, backend="fp8", options={"recipe": "tensorwise"})(x).sum().backward()
    expected = {name: w.grad for name, w in twin.named_parameters()}
    for _ in range(3):
        p = {name: w.detach().clone().requires_grad_() for name, w in model.named_parameters()}
        run(p, x).sum().backward()
        assert all(torch.equal(p[name].grad, gradient) for name, gradient in expected.items())
    graphs = [graph for graph in fp8compile.report().graphs if graph.name.startswith("function")]
    matmuls = [record for graph in graphs for record in graph.matmuls]
    names = {(r.fqn, r.decision, r.recipe) for r in matmuls}
    assert names == {(f"n.{i}", "fp8", "tensorwise") for i in (0, 2)}
    assert len(matmuls) == 5 and not hooks.slots_of(model)


@pytest.mark.slow
def test_what_is_computed_from_a_learned_input_is_an_activation() -> None:
    """Layers on latents that are parameters: the gradient of the latents is a weight's gradient."""
    model = Model(
        lambda m, x: m.two(m.latents * x.abs().amax().detach().clamp(1, 1)),
        latents=parameter(32, 128),
        two=Two(),
    )
    plain = Model(lambda m, x: m.two(m.latents), latents=parameter(32, 128), two=Two())
    for m, first in ((model, "dgrad fp8"), (plain, "wgrad fp8")):
        # otherwise the last matmul is an output head
        policy = {"rules": [{"where": "n >= 128 and k >= 128", "fp8": "on"}]}
        torch.compile(m, backend="fp8", options={"policy": policy})(ternary(32, 128)).sum().backward()
        assert gemms(m) == sorted([*2 * ["fprop fp8", "wgrad fp8"], "dgrad fp8", first])


def test_strict_says_that_plain_tensors_are_no_weights() -> None:
    """The backend cannot know which argument of a function is a weight; it knows that none is a parameter."""

    def product(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    run = torch.compile(product, backend="fp8", options={"strict": True})
    with pytest.raises(Exception, match="no matmul of function becomes FP8"):
        run(ternary(32, 128), signs(128, 128).requires_grad_())
    torch._dynamo.reset()
    # as two activations
    run(ternary(128, 128).requires_grad_(), signs(128, 128).requires_grad_()).sum().backward()
