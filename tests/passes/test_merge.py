"""Matmuls of one input as one matmul (`passes.merge`): which are merged, and that they are as exact as apart.

(tests/equivalence has the training loops.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.dryrun import fake_gpu
from fp8compile.ir.fx_utils import Ranks
from tests.support import hooks
from tests.support.executed import executed
from tests.support.gpu_steps import unallocated
from tests.support.harness import ALL_FP8, grads_of, histories, noise, sqnr
from tests.support.models import Checkpointed, LlamaLayer, SwiGlu, make

pytestmark = pytest.mark.shares_graphs
needs_description = pytest.mark.skipif(fake_gpu.unavailable() is not None, reason=fake_gpu.unavailable() or "")
BF16 = torch.bfloat16


class Three(nn.Module):
    """Three layers of one tensor, and a fourth behind them."""

    def __init__(self, bias: bool = False, widths: tuple[int, int, int] = (256, 128, 128)) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(128)
        self.q, self.k, self.v = (nn.Linear(128, width, bias=bias) for width in widths)
        self.o = nn.Linear(128, 128)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.o(torch.sigmoid(q[..., :128]) * k[..., :128] + v[..., -128:])

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.mixed(self.q(h), self.k(h), self.v(h))


def run(model: nn.Module, merge: bool | str, recipe: str = "tensorwise", **options: Any) -> Callable[[Tensor], Tensor]:
    given = {"policy": ALL_FP8, "recipe": recipe, "merge_matmuls": merge, **options}
    return torch.compile(model, backend="fp8", options=given)


def trained(model: nn.Module, call: Callable[[Tensor], Tensor], steps: int = 3) -> list[dict[str, Tensor]]:
    """Outputs and gradients, step by step; the weights move."""
    found = []
    for step in range(steps):
        x = noise(48, 128, seed=step, dtype=next(model.parameters()).dtype).requires_grad_()
        with hooks.interpreted():
            y = call(x)
        y.backward(noise(*y.shape, seed=step + 100, dtype=y.dtype))
        found.append({"y": y.detach(), **grads_of(model, [x])})
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad if p.grad is not None else 0
                p.grad = None
    return found


def merged(model: nn.Module) -> set[str]:
    return {f"{x.gemm} of {' '.join(x.merged)}" for x in fp8compile.report(model).matmuls if x.merged}


ALL_THREE = {f"{gemm} of q k v" for gemm in ("fprop", "dgrad", "wgrad")}


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize(
    ("recipe", "bias", "dtype"), [("delayed", True, torch.float32), ("tensorwise", False, BF16)]
)
def test_as_exact_as_apart(recipe: str, bias: bool, dtype: torch.dtype) -> None:
    """Each output and each gradient is as near to high precision as without merging, and every layer keeps its own history."""
    results, states = [], []
    plain = make(lambda: Three(bias), dtype)
    results.append(trained(plain, plain))
    for merge in (False, True):
        model = make(lambda: Three(bias), dtype)
        results.append(trained(model, run(model, merge, recipe)))
        assert merged(model) == (ALL_THREE if merge else set())
        states.append(histories(model) if recipe == "delayed" else {})
    for reference, apart, together in zip(*results, strict=True):
        for name, expected in reference.items():
            assert sqnr(expected, together[name]) >= min(sqnr(expected, apart[name]), 60) - 1.5, name
    assert states[0].keys() == states[1].keys()
    for key, (amaxes, _) in states[0].items():
        torch.testing.assert_close(torch.tensor(states[1][key][0]), torch.tensor(amaxes), rtol=0.15, atol=0, msg=str(key))


def test_one_scale_covers_the_largest() -> None:
    """Of three layers that are merged one has weights that are four times as large."""
    x, ratios = noise(48, 128).requires_grad_(), []
    for merge in (False, True):
        model = make(Three)
        with torch.no_grad():
            model.k.weight *= 4.0
        call = run(model, merge, "delayed")
        with hooks.interpreted():
            for _ in range(2):
                call(x).sum().backward()
            ratios.append(sqnr(model(x), call(x)))
    apart, together = ratios
    assert together > apart - 3.0 > 15.0


def test_the_same_bits_where_scales_are_equal() -> None:
    """With equal amaxes there is no other arithmetic, except that three gradients of x are one sum, rounded once."""

    def build() -> nn.Module:
        model = make(Three)
        with torch.no_grad():
            for layer in (model.q, model.k, model.v):
                layer.weight[0, 0] = 1.0
        return model

    class Even(torch.autograd.Function):
        """The identity, with a gradient of a fixed amax."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return torch.cat([torch.full_like(gradient[:1], 8.0), gradient[1:].clamp(-4, 4)])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()

        def forward(self, x: Tensor) -> Tensor:
            inner = self.inner
            h = inner.norm(x)
            return inner.mixed(*(Even.apply(layer(h)) for layer in (inner.q, inner.k, inner.v)))

    apart, together = (trained(model, run(model, merge), 1)[0] for merge in (False, True) if (model := Model()))
    for name, expected in apart.items():
        if name.startswith("inner.") and "norm" not in name or name == "y":
            assert torch.equal(expected, together[name]), name
        else:  # behind the sum
            assert sqnr(expected, together[name]) > 40, name


class Returned(Three):
    def forward(self, x: Tensor) -> Any:
        h = self.norm(x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        return self.mixed(q, k, v) + 0 * q.sum(), k


class Unused(Three):
    """v takes no part in the step. Its gradient is no part of the sum, so the others are merged without it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.mixed(self.q(h), self.k(h), self.v(h).detach())


class Shared(Three):
    """One weight, used twice."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.mixed(self.q(h), self.k(h), self.k(h))


def frozen() -> Three:
    model = Three()
    model.k.weight.requires_grad_(False)
    return model


def one_bias() -> Three:
    model = Three()
    model.k = nn.Linear(128, 128)
    return model


BY_RULE = {"policy": {"rules": [{"module": "k", "margin": 1, "fp8": "on"}, *ALL_FP8["rules"]]}}
GROUPS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "checkpointed": (lambda: Checkpointed(Three()), {}, "q k v"),
    "returned": (Returned, {}, ""),
    "one frozen": (frozen, {}, "q v"),
    "one with a bias": (one_bias, {}, "q v"),
    "other rows": (lambda: Three(widths=(256, 136, 128)), {}, "q v"),
    "one unused": (Unused, {}, "q k"),
    "a shared weight": (Shared, {}, ""),
    "one with another margin": (Three, BY_RULE, "q v"),
    "scales of rows": (Three, {"recipe": "rowwise"}, ""),
    "scales of blocks": (Three, {"recipe": "blockwise"}, ""),
    "scales of short blocks": (Three, {"recipe": "mxfp8"}, ""),
    "switched off": (Three, {"merge": False}, ""),
    "no description of a device": (Three, {"merge": "auto"}, ""),
}


@pytest.mark.cases(test=2, slow=2)
@pytest.mark.parametrize("name", GROUPS)
def test_what_is_merged(name: str) -> None:
    build, options, group = GROUPS[name]
    model = make(build)
    with hooks.traced():
        torch._dynamo.reset()
        y = run(model, **{"merge": True, **options})(noise(48, 128).requires_grad_())
        (sum(part.float().sum() for part in y) if isinstance(y, tuple) else y.sum()).backward()
    found = {x.replace("inner.0.", "") for x in merged(model)}
    torch._dynamo.reset()
    assert found == ({f"{gemm} of {group}" for gemm in ("fprop", "dgrad", "wgrad")} if group else set())


@pytest.mark.slow
def test_gradients_serve_optimizers() -> None:
    """They are contiguous slices of one tensor. Accumulation, clipping and foreach optimizers work on each of them."""
    models = make(Three), make(Three)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True) for model in models]
    call = run(models[1], True)
    for step in range(2):
        for model, do, optimizer in zip(models, (models[0], call), optimizers, strict=True):
            for micro in (0, 1):
                with hooks.interpreted():
                    do(noise(48, 128, seed=2 * step + micro)).square().mean().backward()
                if step == micro == 0 and model is models[1]:
                    grads = [layer.weight.grad for layer in (model.q, model.k, model.v)]
                    assert all(grad.is_contiguous() for grad in grads)
                    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert sqnr(a, b) > 40, name


def test_what_depends_on_each_other_stays_apart() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    one = graph.call_function(torch.neg, (x,))
    two = graph.call_function(torch.neg, (x,))
    behind = graph.call_function(torch.neg, (graph.call_function(torch.abs, (one,)),))
    ranks = Ranks(graph)

    def apart(*nodes: torch.fx.Node) -> bool:
        return not ranks.reach([x for node in nodes for x in node.all_input_nodes], set(nodes))

    assert apart(one, two) and apart(two, behind)
    assert not apart(two, one, behind) and not apart(one, next(iter(one.users)))


# -- for a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.cases(slow=1)
@needs_description
@pytest.mark.parametrize(
    ("build", "recipe", "choice", "sizes", "matmuls"),
    [
        (SwiGlu, "delayed", 0, {0, 2}, 6),
        (lambda: LlamaLayer(128, 2, 2, 256), "tensorwise", 1, {0, 2, 3}, 12),
    ],
    ids=["an MLP with a gate", "a layer"],
)
def test_the_plan_of_a_gpu(
    build: Callable[[], nn.Module], recipe: str, choice: int, sizes: set[int], matmuls: int
) -> None:
    """Executed on a CPU: 6 FP8 matmuls instead of 9, or 12 instead of 21, and what the interpreted graph computes."""

    def steps(model: nn.Module, counted: Any = None) -> tuple[list[dict[str, Tensor]], list[int]]:
        torch._dynamo.reset()
        call = torch.compile(model, backend="fp8", options={"policy": ALL_FP8, "recipe": recipe, "merge_matmuls": True})
        results, runs = [], []
        for step in range(2):
            x = noise(1, 64, 128, seed=step, dtype=BF16).requires_grad_()
            before = counted.scaled if counted else 0
            y = call(x)
            y.backward(noise(*y.shape, seed=9, dtype=BF16))
            runs.append(counted.scaled - before if counted else 0)
            results.append({"y": y.detach(), **grads_of(model, [x])})
            model.zero_grad()
        return results, runs

    model, other = (make(build, BF16) for _ in range(2))
    with executed(choice) as plan:
        found, runs = steps(model, plan)
        assert {len(x.merged) for x in fp8compile.report(model).matmuls} == sizes
    assert runs[-1] == matmuls
    with hooks.interpreted():
        expected, _ = steps(other)
    torch._dynamo.reset()
    for step, (one, two) in enumerate(zip(expected, found, strict=True)):
        for name in one:
            assert sqnr(one[name], two[name]) > 25, f"step {step}: {name}"


def on_a_gpu(build: Callable[[], nn.Module]) -> tuple[fake_gpu.Step, fake_gpu.Step]:
    """A training step without merged matmuls, and with them."""
    found = []
    for merge in (False, True):
        torch._dynamo.reset()
        call = torch.compile(unallocated(build, BF16), backend="fp8", options={"policy": ALL_FP8, "merge_matmuls": merge})
        x = torch.empty((1, 2048, 1024), dtype=BF16, requires_grad=True)
        found.append(fake_gpu.trace(lambda call=call, x=x: call(x).sum().backward()))
    return found[0], found[1]


@pytest.mark.weekly
@needs_description
def test_copies_are_written_where_they_belong() -> None:
    """No kernel puts copies side by side, and less is kept than apart."""
    apart, together = on_a_gpu(lambda: LlamaLayer(1024, 8, 8, 2048))
    assert sum(x.matmul is not None for x in together.kernels) == 12
    assert together.bytes_outside_matmuls <= apart.bytes_outside_matmuls
    assert together.kept_for_backward <= apart.kept_for_backward
    assert len(together.kernels) <= len(apart.kernels) - 8
    assert not any("cat" in line for graph in together.graphs for line in graph.code.splitlines() if "def triton" in line)


class NormalHeads(nn.Module):
    """Attention behind norms of q and k."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(1024, 1024, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(128), nn.RMSNorm(128)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 128)) for layer in (self.q, self.k, self.v))
        parts = (part.transpose(1, 2) for part in (self.q_norm(q), self.k_norm(k), v))
        return self.o(nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(-2))


@pytest.mark.weekly
@needs_description
def test_behind_norms_of_q_and_k_no_more_is_kept() -> None:
    """Backward reads q and k, and attention a copy of v: a buffer of all three would keep v twice."""
    apart, together = on_a_gpu(NormalHeads)
    assert together.kept_for_backward <= 1.001 * apart.kept_for_backward
