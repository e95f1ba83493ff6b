"""Plausible user code that once gave wrong results silently. Each test compares with high precision or checks the state."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp8compile
from tests.support.harness import noise, sqnr
from tests.support.hooks import slots_of

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
def test_saved_tensor_hooks_that_copy() -> None:
    """Activation offloading returns copies of saved tensors. The state still moves, and cold calls are still recognised."""
    model, plain = mlp(), mlp()
    run, x, w = torch.compile(model, backend="fp8"), noise(32, 128), noise(32, 128, seed=1)
    for step in range(18):
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            y = run(x)
        (y * 1e-8 * w).sum().backward()
        history = slots_of(model)["0.weight", "gradient", 0].history()
        assert sum(amax > 0 for amax in history) == min(step + 1, 16)
    (plain(x) * 1e-8 * w).sum().backward()
    assert all(sqnr(a, b) > 17 for a, b in zip(grads(plain), grads(model), strict=True))


class HandWritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy @ w, dy.t() @ x


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(128, 256, bias=False), nn.Linear(256, 128, bias=False)

    def forward(self, x):
        return HandWritten.apply(F.gelu(self.first(x)), self.second.weight)


@pytest.mark.slow
def test_a_custom_autograd_function() -> None:
    """Autograd does not tag the nodes of such a function's backward; its dgrad and wgrad are recognised all the same."""
    model, plain = Mixed(), Mixed()
    run, x, w = torch.compile(model, backend="fp8"), noise(32, 128), noise(32, 128, seed=1)
    for _ in range(18):
        model.zero_grad()
        (run(x) * 1e-9 * w).sum().backward()
    (plain(x) * 1e-9 * w).sum().backward()
    assert all(sqnr(a, b) > 17 for a, b in zip(grads(plain), grads(model), strict=True))
    found = [(r.fqn.removesuffix(".weight"), r.gemm, r.decision) for r in fp8compile.report(model).matmuls]
    gemms = [("first", "fprop"), ("first", "wgrad"), ("second", "dgrad"), ("second", "fprop"), ("second", "wgrad")]
    assert sorted(found) == [(*gemm, "fp8") for gemm in gemms]


class Detached(nn.Module):
    """`frozen` has no autograd node, so its gemm carries the sequence number of the node before it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.frozen = nn.Linear(128, 128), nn.Linear(128, 48)

    def forward(self, x):
        h = self.up(x)
        return h.sum() + self.frozen(h.detach()).detach().sum()


def test_a_gemm_without_an_autograd_node() -> None:
    model = Detached()
    torch.compile(model, backend="fp8")(noise(32, 128).requires_grad_()).backward()
    found = [(r.fqn, r.gemm, r.decision) for r in fp8compile.report(model).matmuls]
    assert sorted(found) == [
        ("frozen", "fprop", "high_precision"),
        ("up", "dgrad", "fp8"),
        ("up", "fprop", "fp8"),
        ("up", "wgrad", "fp8"),
    ]


@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize("options", [{"fp8_format": "e4m3"}, {"margin": 3}, {"fp8_format": "e4m3", "margin": 0}])
def test_compiled_again_with_another_range(options) -> None:
    """The second compilation has another FP8 maximum or margin, so it converts the scales of the first: 57344 is not 448."""
    model, plain, x, w = mlp(), mlp(), noise(32, 128), noise(32, 128, seed=1)
    for step, given in enumerate([{}] * 3 + [options] * 2):
        run = torch.compile(model, backend="fp8", options=given)
        for side in (model, plain):
            side.zero_grad()
        (run(x) * w).sum().backward()
        (plain(x) * w).sum().backward()
        assert all(sqnr(a, b) > 17 for a, b in zip(grads(plain), grads(model), strict=True)), step


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
    torch.testing.assert_close(torch.compile(lambda: torch.ones(4, 4).tril() + 1, backend="fp8")(), torch.ones(4, 4).tril() + 1)


@pytest.mark.slow
def test_a_teacher_in_eval_mode() -> None:
    """Only the teacher is in high precision."""
    student, teacher = mlp(), mlp().eval()
    teacher.requires_grad_(False)

    def step(x):
        return F.mse_loss(student(x), teacher(x) + 1)

    torch.compile(step, backend="fp8", options={"strict": True})(noise(32, 128)).backward()
    matmuls = fp8compile.report(student).matmuls
    assert sorted(r.reason for r in matmuls) == [""] * 5 + ["eval mode"] * 2
    assert slots_of(student) and not slots_of(teacher)


class Heads(nn.Module):
    """Attention, written out. Of one head and with symbolic sizes, the input of `o` is a view of a bmm."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(128, 128, bias=False) for _ in "qkvo")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = (f(x).view(batch, time, self.heads, width // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(((q @ k.transpose(-2, -1) * 0.1).softmax(-1) @ v).transpose(1, 2).reshape(batch, time, width))


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_one_head_of_symbolic_sizes(recipe: str) -> None:
    """Inductor's patterns of attention must not take our view of the last bmm for theirs."""
    model, x = Heads(1), noise(2, 48, 128)
    y = torch.compile(model, backend="fp8", dynamic=True, options={"recipe": recipe})(x)
    y.square().sum().backward()
    assert sqnr(model(x), y) > 20
    decided = {record.decision for record in fp8compile.report(model).matmuls if record.fqn == "o"}
    assert decided == {"fp8"}


@pytest.mark.slow
def test_features_that_are_expressions() -> None:
    """Where the number of heads is a symbol (under FSDP2, with dynamic=True), features are `heads * (128 // heads)`: 128."""
    model, x = Heads(2), noise(2, 48, 128).requires_grad_()
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        y = torch.compile(model, backend="fp8", dynamic=True, options={"policy": {"extends": "none"}})(x)
    y.square().sum().backward()
    assert sqnr(model(x), y) > 20
    report = fp8compile.report(model)
    found = {(record.fqn, record.gemm): record.decision for record in report.matmuls if record.gemm != "matmul"}
    assert found == {(name, gemm): "fp8" for name in "qkvo" for gemm in ("fprop", "dgrad", "wgrad")}
    assert any("n" in record.symbolic or "k" in record.symbolic for record in report.matmuls if record.gemm == "matmul")


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


def test_strict_takes_a_fragment_for_what_it_is() -> None:
    """A graph that contains only an embedding, before a graph break, has no matmul to convert; `strict` accepts that."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.linear = nn.Embedding(16, 128), nn.Linear(128, 128)

        def forward(self, x):
            h = self.tokens(x)
            torch._dynamo.graph_break()
            return self.linear(h)

    model = Broken()
    torch.compile(model, backend="fp8", options={"strict": True})(torch.arange(16)).sum().backward()
    assert fp8compile.report(model).fp8_flop_fraction == 1.0


def test_strict_takes_an_expert_without_tokens() -> None:
    expert = nn.Linear(128, 128)
    run = torch.compile(expert, backend="fp8", options={"strict": True})
    for tokens in (0, 32):
        run(noise(tokens, 128)).sum().backward()
    assert [r.reason for r in fp8compile.report(expert).matmuls if r.gemm == "fprop"] == ["no rows", ""]


def test_a_range_that_eager_torch_does_not_have() -> None:
    """An identity of more than 256 rows (as in DoRA) is decomposed into an arange of uint16, and a cold call must run it."""

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


class Own(nn.Module):
    """A class with its own `forward`: torch 2.13 and older compile nothing in place for torch's own, such as Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        return self.layers(x)


def test_forward_is_replaced_after_compiling_in_place() -> None:
    """accelerate replaces `forward` for mixed precision: a call still runs compiled code, with the new forward."""
    model, plain = Own(), Own()
    model.compile(backend="fp8")
    model.forward = types.MethodType(torch.autocast("cpu", torch.bfloat16)(Own.forward), model)
    y, z, w = model(noise(32, 128)), plain(noise(32, 128)), noise(32, 128, seed=1)
    (y.float() * w).sum().backward()
    (z * w).sum().backward()
    assert y.dtype == torch.bfloat16 and sqnr(z, y.float()) > 18
    assert all(sqnr(a, b) > 17 for a, b in zip(grads(plain), grads(model), strict=True))
    assert fp8compile.report(model).fp8_flop_fraction == 1.0
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_a_copy_is_not_compiled() -> None:
    """torch does not copy or pickle the compiled code of `module.compile`; the copy can be compiled again."""
    model, x = Own(), noise(32, 128)
    model.compile(backend="fp8")
    model(x).sum().backward()
    average = copy.deepcopy(model)
    torch.testing.assert_close(average(x), average.forward(x), rtol=0, atol=0)
    assert not fp8compile.report(average).graphs
    average.compile(backend="fp8")
    assert sqnr(average.forward(x), average(x)) > 18 and fp8compile.report(average).fp8_flop_fraction == 1.0
