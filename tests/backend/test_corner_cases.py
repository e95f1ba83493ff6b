"""User code that once gave wrong results silently. Tests compare with high precision or check the state."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp8compile
from tests.support.harness import assert_close, grads_of, noise, sqnr
from tests.support.hooks import slots_of
from tests.support.models import Heads, Mlp, make

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


@pytest.mark.slow
def test_saved_tensor_hooks_that_copy() -> None:
    """Activation offloading returns copies of saved tensors. State moves, cold calls are still recognised."""
    model, plain = make(Mlp), make(Mlp)
    run, x, w = torch.compile(model, backend="fp8"), noise(32, 128), noise(32, 128, seed=1)
    for step in range(18):
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            y = run(x)
        (y * 1e-8 * w).sum().backward()
        history = slots_of(model)["up.weight", "gradient", 0].history()
        assert sum(amax > 0 for amax in history) == min(step + 1, 16)
    (plain(x) * 1e-8 * w).sum().backward()
    assert_close(grads_of(plain), grads_of(model), 17.0, "gradients")


@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize(
    "options", [{"fp8_format": "e4m3"}, {"margin": 3}, {"fp8_format": "e4m3", "margin": 0}]
)
def test_compiled_again_with_another_range(options) -> None:
    """The second compilation has another FP8 maximum or margin, so it converts the first one's scales."""
    model, plain, x, w = make(Mlp), make(Mlp), noise(32, 128), noise(32, 128, seed=1)
    for step, given in enumerate([{}] * 3 + [options] * 2):
        run = torch.compile(model, backend="fp8", options=given)
        for side in (model, plain):
            side.zero_grad()
        (run(x) * w).sum().backward()
        (plain(x) * w).sum().backward()
        assert_close(grads_of(plain), grads_of(model), 17.0, f"step {step}")


class Buffers(nn.Module):
    def __init__(self, size: float) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)
        self.register_buffer("one", noise(128, 128, seed=1) / 11)
        self.register_buffer("two", noise(128, 128, seed=2) / 11 * size)

    def forward(self, x):
        return self.linear(x) @ self.one @ self.two


def test_buffers_as_weights() -> None:
    """Each buffer has its own slots, in each module that shares the compiled code."""
    modules = [Buffers(1.0), Buffers(1000.0)]
    x = noise(32, 128)
    for module in modules:
        module.compile(backend="fp8")
    for _ in range(3):
        for module in modules:
            y = module(x)
            y.sum().backward()
            assert sqnr(module.forward(x), y) > 18


def test_a_graph_without_inputs() -> None:
    torch.testing.assert_close(
        torch.compile(lambda: torch.ones(4, 4).tril() + 1, backend="fp8")(), torch.ones(4, 4).tril() + 1
    )


@pytest.mark.slow
def test_a_teacher_in_eval_mode() -> None:
    """Only the teacher is in high precision."""
    student, teacher = make(Mlp), make(Mlp).eval()
    teacher.requires_grad_(False)

    def step(x):
        return F.mse_loss(student(x), teacher(x) + 1)

    torch.compile(step, backend="fp8", options={"strict": True})(noise(32, 128)).backward()
    matmuls = fp8compile.report(student).matmuls
    assert sorted(r.reason for r in matmuls) == [""] * 5 + ["eval mode"] * 2
    assert slots_of(student) and not slots_of(teacher)


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_one_head_of_symbolic_sizes(recipe: str) -> None:
    """Inductor's patterns of attention must not take our view of the last bmm for theirs."""
    model, x = Heads(heads=1), noise(2, 48, 128)
    y = torch.compile(model, backend="fp8", dynamic=True, options={"recipe": recipe})(x)
    y.square().sum().backward()
    assert sqnr(model(x), y) > 20
    decided = {record.decision for record in fp8compile.report(model).matmuls if record.fqn == "o"}
    assert decided == {"fp8"}


@pytest.mark.slow
def test_features_that_are_expressions() -> None:
    """Where the number of heads is a symbol (under FSDP2, with dynamic=True), features are `heads * (128 //
    heads)`: 128."""
    model, x = Heads(heads=2), noise(2, 48, 128).requires_grad_()
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        y = torch.compile(model, backend="fp8", dynamic=True, options={"policy": {"extends": "none"}})(x)
    y.square().sum().backward()
    assert sqnr(model(x), y) > 20
    report = fp8compile.report(model)
    found = {(r.fqn, r.gemm): r.decision for r in report.matmuls if r.gemm != "matmul"}
    assert found == {(name, gemm): "fp8" for name in "qkvo" for gemm in ("fprop", "dgrad", "wgrad")}
    assert any({"n", "k"} & {*r.symbolic} for r in report.matmuls if r.gemm == "matmul")


def test_rows_counted_from_data() -> None:
    """Experts under fullgraph: the number of tokens of each expert is known only at run time."""
    experts = nn.ModuleList(nn.Linear(128, 128) for _ in range(2))

    def f(x, kind):
        out = torch.zeros_like(x)
        for i, expert in enumerate(experts):
            chosen = torch.nonzero(kind == i).squeeze(1)
            out = out.index_add(0, chosen, expert(x[chosen]))
        return out

    x, kind = noise(32, 128), torch.arange(32) % 2
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        y = torch.compile(f, backend="fp8", fullgraph=True)(x, kind)
    y.sum().backward()
    torch.testing.assert_close(y, f(x, kind))
    assert {r.reason for r in fp8compile.report(experts).matmuls} == {
        "rows that are counted from data (experts: grouped_mm needs no count)"
    }


def test_a_plain_attribute_is_no_weight() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.cache = nn.Linear(128, 128), noise(128, 128)

        def forward(self, x):
            return self.linear(x) @ self.cache

    model = Cache()
    torch.compile(model, backend="fp8")(noise(32, 128)).sum().backward()
    assert {r.fqn for r in fp8compile.report(model).matmuls if r.decision == "fp8"} == {"linear"}


def test_strict_takes_an_expert_without_tokens() -> None:
    expert = nn.Linear(128, 128)
    run = torch.compile(expert, backend="fp8", options={"strict": True})
    for tokens in (0, 32):
        y = run(noise(tokens, 128))
        y.sum().backward()
        assert y.shape == (tokens, 128) and bool(expert.weight.grad.any()) is (tokens > 0)
    assert [r.reason for r in fp8compile.report(expert).matmuls if r.gemm == "fprop"] == ["no rows", ""]


def test_a_range_that_eager_torch_does_not_have() -> None:
    """An identity of more than 256 rows (as in DoRA) becomes an arange of uint16; a cold call must run it."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(272, 128, bias=False)

        def forward(self, x):
            return self.linear(x) / self.linear(torch.eye(272)).norm(dim=0)

    model, x = Normed(), noise(32, 272)
    run = torch.compile(model, backend="fp8")
    assert all(sqnr(model.forward(x), run(x)) > 18 for _ in range(3))


def test_forward_is_replaced_after_compiling_in_place() -> None:
    """accelerate replaces `forward` for mixed precision: calls still run compiled code, with the new one."""
    model, plain = make(Mlp), make(Mlp)
    model.compile(backend="fp8")
    model.forward = types.MethodType(torch.autocast("cpu", torch.bfloat16)(Mlp.forward), model)
    y, z, w = model(noise(32, 128)), plain(noise(32, 128)), noise(32, 128, seed=1)
    (y.float() * w).sum().backward()
    (z * w).sum().backward()
    assert y.dtype == torch.bfloat16 and sqnr(z, y.float()) > 18
    assert_close(grads_of(plain), grads_of(model), 17.0, "gradients")
    assert fp8compile.report(model).fp8_flop_fraction == 1.0
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_a_copy_is_not_compiled() -> None:
    """torch does not copy or pickle the compiled code of `module.compile`; the copy can be compiled again."""
    model, x = Mlp(), noise(32, 128)
    model.compile(backend="fp8")
    model(x).sum().backward()
    average = copy.deepcopy(model)
    torch.testing.assert_close(average(x), average.forward(x), rtol=0, atol=0)
    assert not fp8compile.report(average).graphs
    average.compile(backend="fp8")
    assert sqnr(average.forward(x), average(x)) > 18 and fp8compile.report(average).fp8_flop_fraction == 1.0
