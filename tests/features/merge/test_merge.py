"""Matmuls of one input as one matmul (`features.merge.merge`): which are merged, and that they are as exact
as apart.

(tests/equivalence has the training loops.)"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.dryrun import fake_gpu
from fp8compile.ir.fx_utils import Ranks
from tests.support import hooks
from tests.support.executed import planning
from tests.support.gpu_steps import unallocated
from tests.support.harness import ALL_FP8, histories, like, noise, sqnr
from tests.support.models import Checkpointed, LlamaLayer, NormalHeads, make
from tests.support.stepped import stepped

pytestmark = pytest.mark.shares_graphs
BF16 = torch.bfloat16


class Three(nn.Module):
    """Three layers of one tensor, and a fourth after them."""

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


def run(
    model: nn.Module, merge: bool | str, recipe: str = "tensorwise", **options: Any
) -> Callable[[Tensor], Tensor]:
    given = {"policy": ALL_FP8, "recipe": recipe, "merge_matmuls": merge, **options}
    return torch.compile(model, backend="fp8", options=given)


def trained(model: nn.Module, call: Callable[[Tensor], Tensor], steps: int = 3) -> list[dict[str, Tensor]]:
    """Outputs and gradients, step by step; the weights move."""
    found = []
    for step in range(steps):
        x = noise(48, 128, seed=step, dtype=next(model.parameters()).dtype)
        with hooks.interpreted():
            found.append(stepped(call, model, [x], functools.partial(like, seed=step)))
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is None or p.grad.is_contiguous()
                p -= 0.01 * p.grad if p.grad is not None else 0
    return found


def merged(model: nn.Module) -> set[str]:
    return {f"{x.gemm} of {' '.join(x.merged)}" for x in fp8compile.report(model).matmuls if x.merged}


ALL_THREE = {f"{gemm} of q k v" for gemm in ("fprop", "dgrad", "wgrad")}


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize(
    ("recipe", "bias", "dtype"), [("delayed", True, torch.float32), ("tensorwise", False, BF16)]
)
def test_as_exact_as_apart(recipe: str, bias: bool, dtype: torch.dtype) -> None:
    """Outputs and gradients are as near to high precision as apart, and every layer has its own history."""
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
        assert states[1][key][0] == pytest.approx(amaxes, rel=0.15, abs=0), key


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


class Returned(Three):
    def forward(self, x: Tensor) -> Any:
        h = self.norm(x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        return self.mixed(q, k, v) + 0 * q.sum(), k


class Unused(Three):
    """v takes no part in the step. Its gradient is not in the sum, so the others are merged."""

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


# -- for a GPU --


def on_a_gpu(build: Callable[[], nn.Module]) -> tuple[fake_gpu.Step, fake_gpu.Step]:
    """A training step without merged matmuls, and with them."""
    found = []
    for merge in (False, True):
        torch._dynamo.reset()
        call = run(unallocated(build, BF16), merge, "delayed")
        x = torch.empty((1, 2048, 1024), dtype=BF16, requires_grad=True)
        found.append(fake_gpu.trace(lambda call=call, x=x: call(x).sum().backward()))
    return found[0], found[1]


@pytest.mark.weekly
@planning
def test_copies_are_written_where_they_belong() -> None:
    """No kernel puts copies side by side, and less is kept than apart."""
    apart, together = on_a_gpu(lambda: LlamaLayer(1024, 8, 8, 2048))
    assert sum(x.matmul is not None for x in together.kernels) == 12
    assert together.bytes_outside_matmuls <= apart.bytes_outside_matmuls
    assert together.kept_for_backward <= apart.kept_for_backward
    assert len(together.kernels) <= len(apart.kernels) - 8
    lines = [line for graph in together.graphs for line in graph.code.splitlines()]
    assert not any("cat" in line for line in lines if "def triton" in line)


@pytest.mark.weekly
@planning
def test_behind_norms_of_q_and_k_no_more_is_kept() -> None:
    """Backward reads q and k, and attention a copy of v: a buffer of all three would keep v twice."""
    apart, together = on_a_gpu(lambda: NormalHeads(1024))
    assert together.kept_for_backward <= 1.001 * apart.kept_for_backward
