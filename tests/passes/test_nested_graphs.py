"""Operators of higher order: matmuls in their graphs stay in high precision, with a reason, and count."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.invoke_subgraph import NestedCompileRegionOptions
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import fp8compile
from tests.support.harness import grads_of, noise

pytestmark = pytest.mark.usefixtures("interpreted")


class Net(nn.Module):
    """A layer, and what `way` makes of another one; [rows, 128] -> the same."""

    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.way, self.first, self.second = way, nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.second, self.first(x))


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return x + torch.tanh(layer(x))


region = torch.compiler.nested_compile_region(plain)


def regions(layer: nn.Module, x: Tensor) -> Tensor:
    return region(layer, region(layer, x))


def branches(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: layer(y), lambda y: layer(y).sin(), (x,))


def loop(layer: nn.Module, x: Tensor) -> Tensor:
    start = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, torch.tanh(layer(y))), (start, x))[1]


def trained(way: Callable[[nn.Module, Tensor], Tensor]) -> fp8compile.Report:
    torch._dynamo.reset()
    model, x = Net(way), noise(32, 128)
    torch.compile(model, backend="fp8", options={"policy": {"extends": "none"}})(x).sum().backward()
    return fp8compile.report(model)


class Attention(nn.Module):
    """Heads of one token each, so that there are matmuls without a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(128, 256), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.query(x).chunk(2, 1)
        return x + self.out(torch.softmax(q @ k.t(), -1) @ x)


class Deep(nn.Module):
    """Blocks, each in a region; the last two are one. [rows, 128] -> the same."""

    def __init__(self, region: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(4))
        one = lambda block, x: block(x)  # noqa: E731
        self.one = torch.compiler.nested_compile_region(one) if region else one

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[3]):
            x = self.one(block, x)
        return x


def itself(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return model


def checkpointed(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(model, x, use_reentrant=False)


@pytest.mark.cases(test=2, slow=6)
@pytest.mark.parametrize("around", [itself, checkpointed])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise"])
def test_regions(recipe: str, around: Any) -> None:
    """A model with regions trains as one without, bitwise, and has the same report: share, names, rules."""
    found = []
    for region in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Deep(region), noise(32, 128).requires_grad_()
        policy = {"extends": "none", "rules": [{"blocks": "first 1", "fp8": "off"}]}
        run = torch.compile(around(model), backend="fp8", options={"recipe": recipe, "policy": policy})
        for _ in range(3):
            y = run(x)
            y.sum().backward()
        records = sorted((r.fqn, r.gemm, r.decision, r.reason) for r in fp8compile.report(model).matmuls)
        found.append(([y.detach(), x.grad, *grads_of(model).values()], records))
    (tensors, records), (others, same) = found
    assert records == same and any(decision == "fp8" for _, _, decision, _ in records)
    assert all(map(torch.equal, tensors, others))


def test_a_region_with_options_of_its_own_stays() -> None:
    options = NestedCompileRegionOptions(partitioner="default_partition")
    with torch._dynamo.config.patch(enable_invoke_subgraph_regional_compile=True):
        own = torch.compiler.nested_compile_region(plain, options=options)
        report = trained(lambda layer, x: own(layer, own(layer, x)))
    kept = [record for record in report.matmuls if record.decision != "fp8"]
    assert {record.reason for record in kept} == {"in a nested graph: invoke_subgraph"} and len(kept) == 6
    assert "fp8: 2 of 8 matmuls, 25.0% of matmul FLOPs; 6 kept: 6 in a nested graph" in str(report)


def test_branches() -> None:
    """Of both branches: nobody knows which one runs. (The backward of the sine computes its input again.)"""
    kept = [record for record in trained(branches).matmuls if record.decision != "fp8"]
    assert len(kept) >= 6 and {record.reason for record in kept} == {"in a nested graph: cond"}


def test_loops() -> None:
    """Of one iteration, since nobody knows how many there are."""
    model = Net(loop)
    with torch.no_grad():
        torch.compile(model, backend="fp8")(noise(32, 128))
    reasons = [record.reason.partition(":")[0] for record in fp8compile.report(model).matmuls]
    assert reasons == ["inference", "in a nested graph"]


@pytest.mark.slow
def test_a_scan_is_traced_as_by_inductor() -> None:
    """It copies Inductor's config, in which our passes are. (This one raises, with any backend.)"""

    def scanned(layer: nn.Module, x: Tensor) -> Tensor:
        carry, out = scan(lambda c, u: (torch.tanh(layer(c) + u), u.sin()), noise(8, 128), x.view(4, 8, 128))
        return carry.sum() + out.sum()

    said = []
    for backend in ("inductor", "fp8"):
        torch._dynamo.reset()
        try:
            torch.compile(copy.deepcopy(Net(scanned)), backend=backend)(noise(32, 128)).backward()
            said.append("")
        except Exception as error:
            said.append(str(error).partition("raised:")[2].partition("\n\n")[0])
    assert said[0] == said[1]
