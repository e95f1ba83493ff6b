"""The backward of the experts' permutation as a lookup: the same bits, and no scatter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support import hooks
from tests.support.harness import ALL_FP8, like, noise
from tests.support.models import Moe
from tests.support.stepped import stepped

pytestmark = pytest.mark.usefixtures("interpreted")
BF16 = torch.bfloat16


class Sorted(nn.Module):
    """Sorts rows by a key, multiplies them in two groups, and brings them back by `back(order)`."""

    def __init__(self, back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.back = back
        self.weight = nn.Parameter(noise(2, 128, 128, dtype=BF16))

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].sort()[1]
        offs = torch.tensor([20, 40], dtype=torch.int32, device=x.device)
        return torch._grouped_mm(x, self.weight, offs)[self.back(order)]


def inverse(order: Tensor, copies: int = 1) -> Tensor:
    made, numbers = torch.empty_like(order), torch.arange(order.shape[0], device=order.device)
    made[order] = numbers if copies == 1 else numbers // copies
    return made


def train(model: nn.Module) -> tuple[dict[str, Tensor], int]:
    """The output and gradients of a step, and how many scatters of matrices are in the joint graph."""
    torch._dynamo.reset()
    run = torch.compile(model, backend="fp8", options={"recipe": "tensorwise", "policy": ALL_FP8})
    with hooks.joint_graphs() as graphs:
        made = stepped(run, model, [noise(40, 128, seed=1, dtype=BF16)], lambda y: like(y, 2))
    assert all(p.grad is not None for p in model.parameters())
    (graph,) = graphs
    nodes = graph.find_nodes(op="call_function", target=torch.ops.aten.index_put.default)
    left = sum(node.meta["val"].dim() == 2 for node in nodes)
    return made, left


# of a layer of experts: the gather of tokens reads rows more than once, so its backward stays a scatter
CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a layer of experts": (Moe, 1),
    "the inverse": (lambda: Sorted(inverse), 1),
    "each row twice": (lambda: Sorted(lambda order: inverse(order, 2)), 0),
    "the permutation itself": (lambda: Sorted(lambda order: order), 0),
}


@pytest.mark.cases(test=2, slow=2)
@pytest.mark.parametrize("name", CASES)
def test_only_the_inverse_of_a_permutation_is_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, replaced = CASES[name]
    torch.manual_seed(0)
    model = build().to(BF16)
    got, left = train(model)
    monkeypatch.setenv("FP8COMPILE_SKIP", "scatters")
    expected, before = train(model)
    assert left == before - replaced
    for key, grad in expected.items():
        assert torch.equal(got[key], grad), key
