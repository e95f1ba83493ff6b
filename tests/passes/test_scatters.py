"""The backward of the experts' permutation as a lookup: the same bits, and no scatter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

from fp8compile.ir.fx_utils import aten
from fp8compile.passes import pipeline
from fp8compile.passes.scatters import scatters
from tests.support.harness import ALL_FP8
from tests.support.models import Moe

BF16 = torch.bfloat16


class Sorted(nn.Module):
    """Sorts rows by a key, multiplies them in two groups, and brings them back by `back(order)`."""

    def __init__(self, back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.back = back
        self.weight = nn.Parameter(torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(0)).to(BF16))

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].sort()[1]
        offs = torch.tensor([20, 40], dtype=torch.int32, device=x.device)
        return torch._grouped_mm(x, self.weight, offs)[self.back(order)]


def inverse(order: Tensor) -> Tensor:
    made = torch.empty_like(order)
    made[order] = torch.arange(order.shape[0], device=order.device)
    return made


def twice(order: Tensor) -> Tensor:
    made = torch.empty_like(order)
    made[order] = torch.arange(order.shape[0], device=order.device) // 2
    return made


def train(model: nn.Module, monkeypatch: pytest.MonkeyPatch, skip: bool) -> tuple[dict[str, Tensor], list[int]]:
    """The gradients of a step, and how many scatters of matrices were left in each joint graph."""
    torch._dynamo.reset()
    left = []

    def counted(graph: Graph) -> int:
        found = 0 if skip else scatters(graph)
        nodes = graph.find_nodes(op="call_function", target=aten.index_put.default)
        left.append(sum(node.meta["val"].dim() == 2 for node in nodes))
        return found

    monkeypatch.setattr(pipeline, "scatters", counted)
    model.zero_grad()
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(1)).to(BF16).requires_grad_()
    options = {"recipe": "tensorwise", "policy": ALL_FP8}
    y = torch.compile(model, backend="fp8", options=options)(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(BF16))
    return {"dx": x.grad, **{name: p.grad.clone() for name, p in model.named_parameters()}}, left  # type: ignore[dict-item]


def test_a_layer_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Moe().to(BF16)
    expected, before = train(model, monkeypatch, True)
    got, left = train(model, monkeypatch, False)
    assert left == [before[0] - 1]  # the gather of tokens reads rows more than once: its backward stays a scatter
    for name, grad in expected.items():
        assert torch.equal(got[name], grad), name


BACK = [(inverse, 1), (twice, 0), (lambda order: order // 2, 0), (lambda order: order, 0)]


@pytest.mark.parametrize(("back", "replaced"), BACK)
def test_only_the_inverse_of_a_permutation_is_replaced(
    back: Callable[[Tensor], Tensor], replaced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Sorted(back)
    expected, before = train(model, monkeypatch, True)
    got, left = train(model, monkeypatch, False)
    assert left[0] == before[0] - replaced
    for name, grad in expected.items():
        assert torch.equal(got[name], grad), name
