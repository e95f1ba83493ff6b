"""Matmuls of one input as one matmul (`passes.merge`): which are merged, and that they compute what they computed apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile.dryrun import fake_gpu
from fp8compile.ir.fx_utils import Ranks
from tests.support.executed import executed
from tests.support.gpu_steps import unallocated
from tests.support.harness import ALL_FP8, grads_of, histories, interpreted, noise, sqnr
from tests.support.models import LlamaLayer, make

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
    torch._dynamo.reset()
    given = {"policy": ALL_FP8, "recipe": recipe, "merge_matmuls": merge, **options}
    with interpreted():
        return torch.compile(model, backend="fp8", options=given)


def trained(model: nn.Module, call: Callable[[Tensor], Tensor], steps: int = 3, rows: int = 48) -> list[dict[str, Tensor]]:
    """Outputs and gradients, step by step; the weights move."""
    found = []
    for step in range(steps):
        x = noise(rows, 128, seed=step, dtype=next(model.parameters()).dtype).requires_grad_()
        with interpreted():
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


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
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
    """A member of the group that takes no part in the step: a group of two is left."""

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


REFUSED: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "returned": (Returned, set()),
    "one frozen": (frozen, {"q v"}),
    "one with a bias": (one_bias, {"q v"}),
    "other rows": (lambda: Three(widths=(256, 136, 128)), {"q v"}),
    "a shared weight": (Shared, set()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_stays_apart(name: str) -> None:
    build, groups = REFUSED[name]
    model = make(build)
    call = run(model, True)
    x = noise(48, 128).requires_grad_()
    with interpreted():
        y = call(x)
        (sum(part.float().sum() for part in y) if isinstance(y, tuple) else y.sum()).backward()
    assert {x.split(" of ")[1] for x in merged(model)} == groups


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_scales_of_rows_and_blocks_stay_apart(recipe: str) -> None:
    model = make(Three)
    trained(model, run(model, True, recipe), 1)
    assert merged(model) == set()


def test_recipes_that_differ() -> None:
    rules = [{"module": "k", "margin": 1, "fp8": "on"}, *ALL_FP8["rules"]]
    model = make(Three)
    trained(model, run(model, True, policy={"rules": rules}), 1)
    assert merged(model) == {x.replace("q k v", "q v") for x in ALL_THREE}


def test_a_layer_that_takes_no_part() -> None:
    """Its gradient is no part of the sum, so the others are merged without it."""
    model = make(Unused)
    results = trained(model, run(model, True), 2)
    assert "v.weight" not in results[0] or not results[0]["v.weight"].any()
    assert merged(model) == {x.replace("q k v", "q k") for x in ALL_THREE}


def test_who_says_no_is_obeyed() -> None:
    model = make(Three)
    trained(model, run(model, False), 1)
    assert merged(model) == set()
    trained(model, run(model, "auto"), 1)  # no description of a device
    assert merged(model) == set()


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Three()

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_checkpointed_region(recipe: str) -> None:
    outer, inner = make(Region), make(Three)
    inner.load_state_dict(outer.inner.state_dict())

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)

    plain = Plain()
    one, two = [], []
    for model, found in ((outer, one), (plain, two)):
        found += trained(model, run(model, True, recipe))
        assert {x.replace("inner.", "") for x in merged(model)} == ALL_THREE
    for a, b in zip(one, two, strict=True):
        for name, expected in b.items():
            assert sqnr(expected, a[name]) > 40, name


def test_two_forwards_then_two_backwards_and_an_evaluation() -> None:
    """Against the same calls apart: as near to high precision."""
    results = []
    for merge in (None, False, True):
        model = make(Three)
        call = model if merge is None else run(model, merge, "delayed")
        with interpreted():
            trained(model, call, 1)
            first, second = (noise(48, 128, seed=i).requires_grad_() for i in (5, 6))
            one, two = call(first), call(second)
            model.eval()
            with torch.no_grad():
                quiet = call(first)
            model.train()
            two.sum().backward()
            one.square().sum().backward()
        results.append([one, two, quiet, first.grad, second.grad, *(p.grad for p in model.parameters())])
    for expected, apart, together in zip(*results, strict=True):
        assert sqnr(expected, together) >= min(sqnr(expected, apart), 60) - 1.5


def test_a_batch_with_nan_moves_no_history() -> None:
    model = make(Three)
    call = run(model, True, "delayed")
    trained(model, call, 2)
    before = copy.deepcopy(histories(model))
    bad = noise(48, 128)
    bad[3, 5] = float("nan")
    with interpreted():
        call(bad).sum().backward()
    assert histories(model) == before
    model.zero_grad()
    assert all(x.isfinite().all() for x in trained(model, call, 1)[0].values())


def test_dynamic_rows() -> None:
    results = []
    for merge in (None, False, True):
        torch._dynamo.reset()
        model = make(Three)
        options = {"policy": ALL_FP8, "recipe": "delayed", "merge_matmuls": merge}
        call = model if merge is None else torch.compile(model, backend="fp8", dynamic=True, options=options)
        results.append([trained(model, call, 1, rows)[0] for rows in (48, 7, 130, 1)])
    assert merged(model) == ALL_THREE
    for exact, apart, together in zip(*results, strict=True):
        for name, expected in exact.items():
            assert sqnr(expected, together[name]) >= min(sqnr(expected, apart[name]), 60) - 1.5, name


def test_gradients_serve_optimizers() -> None:
    """They are contiguous slices of one tensor. Accumulation, clipping and foreach optimizers work on each of them."""
    models = make(Three), make(Three)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True) for model in models]
    call = run(models[1], True)
    for step in range(3):
        for model, do, optimizer in zip(models, (models[0], call), optimizers, strict=True):
            for micro in (0, 1):
                with interpreted():
                    do(noise(48, 128, seed=2 * step + micro)).square().mean().backward()
                if step == micro == 0 and model is models[1]:
                    grads = [layer.weight.grad for layer in (model.q, model.k, model.v)]
                    assert all(grad.is_contiguous() for grad in grads)
                    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
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


@needs_description
@pytest.mark.parametrize(
    ("recipe", "choice"),
    [
        ("delayed", 0),
        ("tensorwise", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("delayed", 1), ("tensorwise", 0))),
    ],
)
def test_the_plan_of_a_gpu(recipe: str, choice: int) -> None:
    """Executed on a CPU: 12 FP8 matmuls instead of 21, and what the interpreted graph computes."""

    def build() -> nn.Module:
        return make(lambda: LlamaLayer(128, 2, 2, 256), BF16)

    with executed(choice) as plan:
        model = build()
        call = torch.compile(model, backend="fp8", options={"policy": ALL_FP8, "recipe": recipe, "merge_matmuls": True})
        results, runs = [], []
        for step in range(3):
            x = noise(1, 64, 128, seed=step, dtype=BF16).requires_grad_()
            before = plan.scaled
            y = call(x)
            y.backward(noise(*y.shape, seed=9, dtype=BF16))
            runs.append(plan.scaled - before)
            results.append({"y": y.detach(), **grads_of(model, [x])})
            model.zero_grad()
        assert {len(x.merged) for x in fp8compile.report(model).matmuls} == {0, 2, 3}
    assert runs[-1] == 12
    other = build()
    with interpreted():
        call = torch.compile(other, backend="fp8", options={"policy": ALL_FP8, "recipe": recipe, "merge_matmuls": True})
        for step, found in enumerate(results):
            x = noise(1, 64, 128, seed=step, dtype=BF16).requires_grad_()
            y = call(x)
            y.backward(noise(*y.shape, seed=9, dtype=BF16))
            for name, expected in {"y": y.detach(), **grads_of(other, [x])}.items():
                assert sqnr(expected, found[name]) > 25, f"step {step}: {name}"
            other.zero_grad()


@needs_description
def test_copies_are_written_where_they_belong() -> None:
    """An MLP with a gate: no kernel puts copies side by side, and less is kept than apart."""
    found = {}
    for merge in (False, True):
        torch._dynamo.reset()
        model = unallocated(lambda: LlamaLayer(1024, 8, 8, 2048), BF16)
        call = torch.compile(model, backend="fp8", options={"policy": ALL_FP8, "merge_matmuls": merge})
        x = torch.empty((1, 2048, 1024), dtype=BF16, requires_grad=True)
        found[merge] = fake_gpu.trace(lambda call=call, x=x: call(x).sum().backward())
    apart, together = found[False], found[True]
    assert sum(x.matmul is not None for x in together.kernels) == 12
    assert together.bytes_outside_matmuls <= apart.bytes_outside_matmuls
    assert together.kept_for_backward <= apart.kept_for_backward
    assert len(together.kernels) <= len(apart.kernels) - 8
    assert not any("cat" in line for graph in together.graphs for line in graph.code.splitlines() if "def triton" in line)


@needs_description
def test_behind_norms_of_q_and_k_no_more_is_kept() -> None:
    """Backward reads q and k, and attention a copy of v: a buffer of all three would keep v twice."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(1024, 1024, bias=False) for _ in range(4))
            self.q_norm, self.k_norm = nn.RMSNorm(128), nn.RMSNorm(128)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (layer(x).unflatten(-1, (-1, 128)) for layer in (self.q, self.k, self.v))
            parts = (part.transpose(1, 2) for part in (self.q_norm(q), self.k_norm(k), v))
            return self.o(nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(-2))

    kept = {}
    for merge in (False, True):
        torch._dynamo.reset()
        call = torch.compile(unallocated(Attention, BF16), backend="fp8", options={"policy": ALL_FP8, "merge_matmuls": merge})
        x = torch.empty((1, 2048, 1024), dtype=BF16, requires_grad=True)
        kept[merge] = fake_gpu.trace(lambda call=call, x=x: call(x).sum().backward()).kept_for_backward
    assert kept[True] <= 1.001 * kept[False]
