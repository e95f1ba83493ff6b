"""Every way to write a matmul: the matmul is found once, with its name and the expected decision, and its results are right.

Each test trains one step of a small model in high precision and with the backend, compares outputs and gradients loosely
(test_agreement.py tests the exact numerics), and checks the whole report of that step.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile import logs
from fp8compile.errors import StrictError
from fp8compile.ir.records import MatmulRecord
from fp8compile.reporting.report import Report
from tests.support.harness import noise, sqnr
from tests.support.models import Mlp

pytestmark = pytest.mark.usefixtures("interpreted")

TRAINED = ("fprop", "dgrad", "wgrad")
FROZEN = ("fprop", "dgrad")
FLOOR = 17.0  # dB, of outputs and gradients against high precision; FP8 noise through two layers stays above it, errors do not


def one_step(model: nn.Module, *inputs: torch.Tensor, floor: float = FLOOR, autocast: bool = False, **options: Any) -> Report:
    """A training step of `model` and of a copy in high precision agree; -> the report of the compiled one."""
    vanilla = copy.deepcopy(model)
    compiled = torch.compile(model, backend="fp8", options=options)
    results = []
    for run, module in ((vanilla, vanilla), (compiled, model)):
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in inputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = run(*leaves)
        weights = noise(*out.shape, seed=7)
        ((out.real if out.is_complex() else out).float() * weights).sum().backward()
        found = {"output": out, **{f"input {i}": x.grad for i, x in enumerate(leaves)}}
        found |= {name: p.grad for name, p in module.named_parameters()}
        results.append({k: torch.view_as_real(v) if v.is_complex() else v for k, v in found.items() if v is not None})
    expected, got = results
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name].dtype == expected[name].dtype, name
        assert sqnr(expected[name], got[name]) >= floor, f"{name}: {sqnr(expected[name], got[name]):.1f} dB"
    return fp8compile.report(model)


def decisions(report: Report) -> dict[str, dict[str, list[str]]]:
    """{fqn: {gemm: ["fp8" or the reason of each record]}}"""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for r in report.matmuls:
        assert isinstance(r, MatmulRecord) and r.decision in ("fp8", "high_precision")
        assert (r.decision == "fp8") == (r.reason == "") == (r.recipe != ""), r
        found[r.fqn][r.gemm].append(r.reason or "fp8")
    return {fqn: dict(gemms) for fqn, gemms in found.items()}


def check(report: Report, expected: dict[str, Any]) -> None:
    """`expected`: {fqn: decision}, for all three gemms, or {fqn: (gemms, decision)}; a decision is "fp8" or the beginning of
    the reason. The report must list each of these once, and no others.

    Matmuls without a weight ("matmul") are ignored, unless their name is in `expected`.
    """
    found = {fqn: gemms for fqn, gemms in decisions(report).items() if set(gemms) != {"matmul"} or fqn in expected}
    assert found.keys() == expected.keys(), str(report)
    for fqn, wanted in expected.items():
        gemms, decision = (TRAINED, wanted) if isinstance(wanted, str) else wanted
        assert Counter({gemm: len(records) for gemm, records in found[fqn].items()}) == Counter(gemms), f"{fqn}\n{report}"
        for records in found[fqn].values():
            assert all(record.startswith(decision) for record in records), f"{fqn}: {records}"


def weight(*shape: int, seed: int = 1) -> nn.Parameter:
    return nn.Parameter(noise(*shape, seed=seed, scale=shape[-1] ** -0.5))


class Root(nn.Module):
    """`function(self, x)` with a parameter `w` and a bias `b`."""

    def __init__(self, function: Any, *shape: int, bias: int = 256) -> None:
        super().__init__()
        self.w, self.b, self.function = weight(*shape), nn.Parameter(noise(bias, seed=2)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


X = (8, 32, 128)  # batch, tokens, features


# -- one weight, many spellings ------------------------------------------------------------------------------------------

SPELLINGS = {
    "F.linear": (lambda m, x: F.linear(x, m.w, m.b), (256, 128)),
    "F.linear without bias": (lambda m, x: F.linear(x, m.w) + m.b, (256, 128)),
    "@": (lambda m, x: x @ m.w + m.b, (128, 256)),
    "@ transposed": (lambda m, x: x @ m.w.t() + m.b, (256, 128)),
    "@ from the left": (lambda m, x: (m.w @ x.flatten(0, 1).t()).t() + m.b, (256, 128)),
    "torch.matmul": (lambda m, x: torch.matmul(x, m.w) + m.b, (128, 256)),
    "torch.mm": (lambda m, x: torch.mm(x.flatten(0, 1), m.w) + m.b, (128, 256)),
    "addmm": (lambda m, x: torch.addmm(m.b, x.flatten(0, 1), m.w), (128, 256)),
    "addmm with factors": (lambda m, x: torch.addmm(m.b, x.flatten(0, 1), m.w, beta=0.5, alpha=2.0), (128, 256)),
    "einsum": (lambda m, x: torch.einsum("btk,nk->btn", x, m.w) + m.b, (256, 128)),
    "einsum, in x out": (lambda m, x: torch.einsum("btk,kn->btn", x, m.w) + m.b, (128, 256)),
    "einsum, heads": (lambda m, x: torch.einsum("btk,khd->bthd", x, m.w).flatten(-2) + m.b, (128, 4, 64)),
    "bmm of one": (lambda m, x: torch.bmm(x.flatten(0, 1)[None], m.w[None])[0] + m.b, (128, 256)),
    "baddbmm of one": (lambda m, x: torch.baddbmm(m.b[None, None], x.flatten(0, 1)[None], m.w[None])[0], (128, 256)),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_one_weight(spelling):
    function, shape = SPELLINGS[spelling]
    report = one_step(Root(function, *shape), noise(*X))
    check(report, {"w": "fp8"})
    sizes = {r.gemm: (r.m, r.n, r.k) for r in report.matmuls}
    # autograd chooses which side is m, but not the contracted dimension: features, features, and 256 tokens
    assert sizes["fprop"] == (256, 256, 128)
    assert sorted(sizes["dgrad"][:2]) == [128, 256] and sizes["dgrad"][2] == 256
    assert sorted(sizes["wgrad"][:2]) == [128, 256] and sizes["wgrad"][2] == 256


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias, recipe):
    model = nn.Sequential(nn.Linear(128, 256, bias=bias), nn.GELU(), nn.Linear(256, 128, bias=bias))
    report = one_step(model, noise(*X), recipe=recipe)
    check(report, {"0": "fp8", "2": "fp8"})
    assert {r.recipe for r in report.matmuls} == {recipe}


def test_functional_linear_inside_a_submodule():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Root(lambda m, x: F.linear(x, m.w), 256, 128)

        def forward(self, x):
            return self.block(x)

    check(one_step(Model(), noise(*X)), {"block.w": "fp8"})


def test_a_compiled_function_names_its_arguments():
    w, x = weight(256, 128), noise(*X).requires_grad_()
    compiled = torch.compile(lambda x, w: torch.tanh(x @ w.t()), backend="fp8")
    compiled(x, w).sum().backward()
    assert sqnr(torch.tanh(x @ w.t()), compiled(x, w)) > FLOOR
    check(fp8compile.report(), {"w": "fp8"})


def test_conv1d_of_gpt2():
    """Hugging Face's Conv1D: addmm with an [in, out] weight."""

    class Conv1D(nn.Module):
        def __init__(self, out: int, into: int) -> None:
            super().__init__()
            self.weight, self.bias = weight(into, out), nn.Parameter(noise(out, seed=2))

        def forward(self, x):
            return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)

    check(one_step(nn.Sequential(Conv1D(256, 128), nn.GELU(), Conv1D(128, 256)), noise(*X)), {"0": "fp8", "2": "fp8"})


# -- modules that use their weights in other ways -----------------------------------------------------------------------


class Wrapped(nn.Module):
    """nn.MultiheadAttention as self-attention, or as cross-attention to a memory."""

    def __init__(self, cross: bool = False, weights: bool = False) -> None:
        super().__init__()
        self.attn, self.cross, self.weights = nn.MultiheadAttention(256, 4, batch_first=True), cross, weights

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        keys = memory if self.cross else x
        return self.attn(x, keys, keys, need_weights=self.weights)[0]


def test_multihead_attention():
    report = one_step(Wrapped(), noise(2, 32, 256))
    check(report, {"attn.in_proj_weight": "fp8", "attn.out_proj": "fp8"})
    assert [(r.fqn, r.reason) for r in report.opaque][0][0] == "attn"
    assert any("attention" in f"{r.op} {r.reason}" for r in report.opaque)


def test_multihead_attention_with_its_weights():
    """The scores, and their matmul with v, are matmuls without a weight."""
    report = one_step(Wrapped(weights=True), noise(2, 32, 256))
    check(report, {"attn.in_proj_weight": "fp8", "attn.out_proj": "fp8", "attn": (["matmul"] * 6, "not a weight")})
    assert not report.opaque


def test_multihead_cross_attention():
    """q uses one part of in_proj_weight, k and v the other: two fprops of one parameter."""
    report = one_step(Wrapped(cross=True), noise(2, 32, 256), noise(2, 48, 256, seed=3))
    check(report, {"attn.in_proj_weight": (TRAINED * 2, "fp8"), "attn.out_proj": "fp8"})


class Tied(nn.Module):
    """An embedding whose weight is also that of the output projection."""

    def __init__(self, module: bool) -> None:
        super().__init__()
        self.embed, self.mlp = nn.Embedding(512, 128), nn.Linear(128, 128)
        if module:
            self.project = nn.Linear(128, 512, bias=False)
            self.project.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.mlp(self.embed(tokens))
        return self.project(h) if hasattr(self, "project") else F.linear(h, self.embed.weight)


@pytest.mark.parametrize("module", [True, False])
def test_tied_embedding(module):
    report = one_step(Tied(module), torch.arange(64).view(2, 32))
    (head,) = {r.fqn for r in report.matmuls} - {"mlp"}
    assert head in ("embed", "project")
    check(report, {"mlp": "fp8", head: "output head"})


def test_head_before_cross_entropy():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.to_words = nn.Linear(128, 128), nn.Linear(128, 512, bias=False)

        def forward(self, x):
            logits = self.to_words(torch.tanh(self.body(x)))
            return F.cross_entropy(logits.float().flatten(0, 1), torch.arange(256) % 512)

    check(one_step(Model(), noise(*X)), {"body": "fp8", "to_words": "output head"})


@pytest.mark.parametrize("name", ["lm_head", "head", "embed_out", "unembed", "score", "classifier", "output_projection"])
def test_head_by_its_name(name):
    model = nn.Sequential()
    model.add_module("body", nn.Linear(128, 128))
    model.add_module(name, nn.Linear(128, 256))
    check(one_step(model, noise(*X)), {"body": "fp8", name: "output head"})


class Lora(nn.Module):
    """A frozen linear and a pair of rank 16."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(128, 256).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(128, 16, bias=False), nn.Linear(16, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * self.lora_B(self.lora_A(x))


def test_lora():
    check(
        one_step(nn.Sequential(Lora()), noise(*X)),
        {"0.base": (FROZEN, "fp8"), "0.lora_A": "under 128 wide", "0.lora_B": "under 128 wide"},
    )


def test_checkpointed_mlp():
    """A matmul that the backward recomputes is listed once in the report, under its own name."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return x

    check(one_step(Model(), noise(*X)), {f"blocks.{i}.{j}": "fp8" for i in (0, 1) for j in (0, 2)})


class Attention(nn.Module):
    """q, k, v, o around scaled_dot_product_attention, or around its two products written out."""

    def __init__(self, written_out: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(128, 128, bias=False) for _ in range(4))
        self.written_out = written_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (2, 64)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.written_out:
            y = torch.softmax(q @ k.transpose(-1, -2) / 8.0, -1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("written_out", [True, False])
def test_attention(written_out):
    report = one_step(nn.Sequential(Attention(written_out)), noise(*X))
    expected: dict[str, Any] = {f"0.{name}": "fp8" for name in "qkvo"}
    if written_out:
        expected["0"] = (["matmul"] * 6, "not a weight")
        assert {r.batch for r in report.matmuls if r.gemm == "matmul"} == {16}
    check(report, expected)
    assert bool(report.opaque) != written_out


def test_convolution_and_attention_are_listed():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 128, 8, 8)
            self.attention = Attention(written_out=False)

        def forward(self, x):
            x = self.patches(x).flatten(2).transpose(1, 2)
            return x + self.attention(x)  # otherwise it would be the model's output head

    report = one_step(Model(), noise(2, 3, 32, 32))
    check(report, {f"attention.{name}": "fp8" for name in "qkvo"})
    listed = {(r.fqn, "conv" if "conv" in r.op else "attention" if "attention" in r.op else r.op) for r in report.opaque}
    assert listed == {("patches", "conv"), ("attention", "attention")}
    assert all(r.reason for r in report.opaque)


class Moe(nn.Module):
    """A router and a loop over dense experts; each token is the sum of its best two."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(128, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probabilities, chosen = self.gate(x).softmax(-1).topk(2, -1)
        weights = torch.zeros(*x.shape[:-1], 4).scatter(-1, chosen, probabilities)
        return sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


def test_router_and_experts():
    expected = {f"0.experts.{i}.{j}": "fp8" for i in range(4) for j in (0, 2)}
    check(one_step(nn.Sequential(Moe()), noise(*X)), expected | {"0.gate": "router gate"})


def test_wide_router():
    """A router is recognised by the operators that read its output, not by its size."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.choose, self.values = nn.Linear(128, 256), nn.Linear(128, 256)

        def forward(self, x):
            return self.choose(x).softmax(-1) * self.values(x)

    check(one_step(Model(), noise(*X)), {"choose": "router gate", "values": "fp8"})


def test_batched_experts():
    model = Root(lambda m, x: torch.bmm(x, m.w), 8, 128, 256)
    check(one_step(model, noise(*X)), {"w": "batched"})


class Gram(nn.Module):
    """A matmul of two activations; a linear reads one of them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)

    def forward(self, x):
        h = self.up(x)
        return self.out(h).sum() + (h @ h.t()).square().sum()


class DenseAttention(nn.Module):
    """Attention over one sequence without a batch: its values are the tensor that q and k read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.q, self.k = (nn.Linear(128, 128, bias=False) for _ in range(3))

    def forward(self, x):
        h = self.up(x)
        return (self.q(h) @ self.k(h).t() / 11).softmax(-1) @ h


class Computed(nn.Module):
    """A computed weight, beside a linear that reads the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.utils.parametrizations.weight_norm(nn.Linear(128, 128, bias=False)), nn.Linear(128, 128, bias=False)

    def forward(self, x):
        return self.q(x) * self.k(x)


class Detached(nn.Module):
    """A frozen linear, which has no autograd node, behind a matmul that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen = (nn.Linear(128, 128, bias=False) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        a, b = self.a(x).t(), self.b(x)
        return torch.mm(a, b) * torch.mm(x, self.frozen.weight).sum()


ROOT = {"fprop": 1, "wgrad": 1}


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (Gram, {"up": (ROOT, "fp8"), "out": "fp8", "": ({"matmul": 3}, "not a weight")}),
        (DenseAttention, {"up": (ROOT, "fp8"), "q": "fp8", "k": "fp8", "": ({"matmul": 6}, "not a weight")}),
        (Computed, {"k": (ROOT, "fp8"), "q": (ROOT, "fp8")}),
        (
            Detached,
            {"a": (ROOT, "fp8"), "b": (ROOT, "fp8"), "frozen": ({"fprop": 1}, "fp8"), "": ({"matmul": 3}, "not a weight")},
        ),
    ],
)
def test_gradients_of_products_are_no_ones_wgrad(build, expected):
    """All tensors are 128 x 128: neither the sizes nor the operands of these matmuls distinguish them from a linear's gemms."""
    model = build()
    torch.compile(model, backend="fp8")(noise(128, 128)).sum().backward()
    check(fp8compile.report(model), expected)


def test_views_and_indices_of_a_stack_of_weights():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fused, self.stack = weight(256, 128), weight(3, 128, 128)
            self.parts = nn.ModuleDict({"it's": nn.Linear(128, 128)})

        def forward(self, x):
            x = self.parts["it's"](x)
            x = x @ self.fused.view(2, 128, 128)[1] + x @ self.fused.unflatten(0, (2, 128)).unbind(0)[0]
            return x @ self.stack[0] + x @ self.stack[torch.tensor([1, 2])].sum(0)

    twice = ({"fprop": 2, "dgrad": 2, "wgrad": 2}, "fp8")
    report = one_step(Model(), noise(32, 128))
    check(report, {"parts.it's": "fp8", "fused": twice, "stack": "fp8"})
    assert {record.parameter for record in report.matmuls if record.fqn == "parts.it's"} == {"parts.it's.weight"}


def test_one_weight_used_twice():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(128, 128)

        def forward(self, x):
            return self.shared(torch.tanh(self.shared(x)))

    check(one_step(Model(), noise(*X)), {"shared": (TRAINED * 2, "fp8")})


def test_no_dgrad_for_data_and_no_wgrad_when_frozen():
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128).requires_grad_(False), nn.Linear(128, 128))
    compiled = torch.compile(model, backend="fp8")
    compiled(noise(*X)).sum().backward()
    check(fp8compile.report(model), {"0": (("fprop", "wgrad"), "fp8"), "1": (FROZEN, "fp8"), "2": "fp8"})


def test_narrow_and_odd_sizes():
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 200), nn.Linear(200, 168), nn.Linear(168, 144))
    wide = nn.Sequential(nn.Linear(144, 160), nn.Linear(160, 136))
    expected = {"0": "under 128 wide", "1": "under 128 wide", "2": "not a multiple of 16", "3": "not a multiple of 16"}
    check(one_step(nn.Sequential(*model, *wide), noise(*X)), expected | {"4": "fp8", "5": "not a multiple of 16"})


@pytest.mark.parametrize("rows", [1, 7, 17])
def test_any_number_of_rows(rows):
    check(one_step(nn.Sequential(nn.Linear(128, 128)), noise(rows, 128)), {"0": "fp8"})


def test_no_rows():
    model = nn.Sequential(nn.Linear(128, 128))
    out = torch.compile(model, backend="fp8", dynamic=False)(torch.empty(0, 128, requires_grad=True))
    out.sum().backward()
    assert out.shape == (0, 128) and model[0].weight.grad is not None and not model[0].weight.grad.any()
    for records in decisions(fp8compile.report(model)).values():
        assert all(record.startswith("no rows") for gemm in records.values() for record in gemm)


# -- dtypes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_model(dtype):
    check(one_step(Mlp().to(dtype), noise(*X, dtype=dtype)), {"up": "fp8", "down": "fp8"})


def test_autocast():
    model = Mlp()
    report = one_step(model, noise(*X), autocast=True)
    check(report, {"up": "fp8", "down": "fp8"})
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_matmul_into_another_dtype_is_left_alone():
    """`torch.mm(.., out_dtype=..)`, which exists only on CUDA, without gradients: its last argument is no operand."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(256, 256, dtype=torch.bfloat16, device="meta"), requires_grad=False)

        def forward(self, x):
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)

    x = torch.empty(64, 256, dtype=torch.bfloat16, device="meta")
    (record,) = fp8compile.explain(Wide(), x, options={"policy": fp8compile.Policy(eval="fp8")}).matmuls
    assert (record.op, record.reason) == ("mm.dtype", "the overload mm.dtype is not rewritten")


def test_float64_is_left_alone():
    check(one_step(Mlp().double(), noise(*X).double(), floor=100.0), {"up": "dtype", "down": "dtype"})


def test_complex_is_left_alone():
    model = nn.Sequential(nn.Linear(128, 128, dtype=torch.complex64))
    x = torch.complex(noise(32, 128), noise(32, 128, seed=5))
    for records in decisions(one_step(model, x, floor=80.0)).values():
        assert all(record.startswith("dtype") for gemm in records.values() for record in gemm)


def test_a_float64_part_does_not_touch_the_rest():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(128, 128), nn.Linear(128, 128).double()

        def forward(self, x):
            return self.high(self.low(x).double())

    check(one_step(Model(), noise(*X)), {"low": "fp8", "high": "dtype"})


class SparseBuffer(nn.Module):
    """A linear and a fixed sparse matrix."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout, self.linear = layout, nn.Linear(128, 128)
        dense = noise(128, 128) * (noise(128, 128, seed=9) > 1)
        self.register_buffer("matrix", dense.to_sparse_csr() if layout == "csr" else dense.to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.matrix, self.linear(x).t()).t()

    def __deepcopy__(self, memo: dict) -> SparseBuffer:  # torch cannot copy a CSR tensor
        twin = SparseBuffer(self.layout)
        twin.linear.load_state_dict(self.linear.state_dict())
        return twin


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_sparse_tensors_are_left_alone(layout):
    """Dynamo runs a frame with a sparse tensor in eager mode: there may be nothing to report, but the step is right."""
    model = SparseBuffer(layout)
    report = one_step(model, noise(32, 128))
    assert not [r for r in report.matmuls if r.decision == "fp8" and r.fqn != "linear"], str(report)


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_are_left_alone():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(128, 128)
            self.register_buffer("levels", torch.quantize_per_tensor(noise(128, 128) * 0.1, 0.01, 0, torch.qint8))

        def forward(self, x):
            return F.linear(self.linear(x), self.levels.dequantize())

    report = one_step(Model(), noise(32, 128))
    assert not [r for r in report.matmuls if r.decision == "fp8" and r.fqn != "linear"], str(report)


def test_a_graph_break_in_between():
    """Dynamo compiles the parts around code that it cannot trace; each matmul is in the report once."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(128, 128), nn.Linear(128, 128)

        def forward(self, x):
            x = torch.tanh(self.before(x))
            torch._dynamo.graph_break()
            return self.after(x)

    check(one_step(Model(), noise(*X)), {"before": "fp8", "after": "fp8"})


# -- nothing to do -----------------------------------------------------------------------------------------------------------


def warned(caplog: pytest.LogCaptureFixture, caught: list[warnings.WarningMessage]) -> list[str]:
    """The messages at warning level, from `logging` or `warnings`."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("fp8compile")] + [
        str(w.message) for w in caught
    ]


def test_a_model_without_an_eligible_matmul_warns_and_trains(caplog):
    fp8_logger = logging.getLogger("fp8compile")
    fp8_logger.addHandler(caplog.handler)  # whether or not it propagates
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = one_step(nn.Sequential(nn.Linear(64, 64)), noise(32, 64), floor=100.0)
    finally:
        fp8_logger.removeHandler(caplog.handler)
    assert any("matmul" in message for message in warned(caplog, caught)), caplog.text
    check(report, {"0": "under 128 wide"})


def test_a_model_without_an_eligible_matmul_is_an_error_in_strict_mode():
    compiled = torch.compile(nn.Linear(64, 64), backend="fp8", options={"strict": True})
    with pytest.raises(Exception, match="(?i)matmul") as raised:
        compiled(noise(32, 64)).sum().backward()
    assert isinstance(raised.value, StrictError) or isinstance(getattr(raised.value, "inner_exception", None), StrictError)


def test_strict_mode_takes_a_model_with_eligible_matmuls():
    check(one_step(Mlp(), noise(*X), strict=True), {"up": "fp8", "down": "fp8"})


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(64, 128, 3, padding=1)

    def forward(self, x):
        return self.conv(x).transpose(1, 2)


class Broken(Convolutions):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


class Stem(nn.Module):
    """Convolutions in their own graph: before a graph break, or in a module that contains one."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken
        self.stem, self.up = Broken() if broken else Convolutions(), nn.Linear(128, 128)

    def forward(self, x):
        x = self.stem(x)
        if not self.broken:
            torch._dynamo.graph_break()
        return self.up(x)


def test_a_part_without_matmuls_is_as_it_should_be(caplog):
    """Only a whole model without FP8 matmuls warns, or is an error with `strict`."""
    x = noise(4, 64, 32)
    with caplog.at_level(logging.WARNING, logger="fp8compile"):
        for broken in (False, True):
            torch._dynamo.reset()
            model = Stem(broken)
            torch.compile(model, backend="fp8", options={"strict": True})(x).sum().backward()
            assert not caplog.records and len(fp8compile.report(model).graphs) == 2
        for compile_it in (lambda m: torch.compile(m, backend="fp8"), lambda m: m.compile(backend="fp8") or m):
            torch._dynamo.reset()
            logs.forget()
            compile_it(Convolutions())(x).sum().backward()
            assert "no matmul of Convolutions becomes FP8" in caplog.text
            caplog.clear()
    with pytest.raises(Exception, match="no matmul of Convolutions"):
        torch.compile(Convolutions(), backend="fp8", options={"strict": True})(x)


def test_a_graph_without_any_matmul_trains():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(128))

        def forward(self, x):
            return torch.tanh(x * self.scale)

    assert one_step(Model(), noise(*X), floor=100.0).matmuls == []
