"""A call with a jagged nested tensor trains in FP8: AOTAutograd unpacks it and its gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fp8compile
from tests.support.harness import assert_close, histories

pytestmark = pytest.mark.usefixtures("interpreted")


def jagged(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(count, 128, generator=generator) for count in (5, 9, 30 + seed)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "blockwise"])
def test_a_jagged_nested_tensor(recipe: str) -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    reference = copy.deepcopy(model)
    run = torch.compile(model, backend="fp8", options={"recipe": recipe})
    for step in range(3):
        gradients = []
        for net, forward in ((reference, reference), (model, run)):
            net.zero_grad()
            forward(jagged(step)).values().square().mean().backward()
            gradients.append({name: p.grad.clone() for name, p in net.named_parameters()})
        assert_close(*gradients, 18.0, f"step {step}")
    report = fp8compile.report(model)
    assert all(graph.name.endswith("training") and not graph.note for graph in report.graphs)
    gemms = sorted((r.fqn, r.gemm) for r in report.graphs[0].matmuls if r.decision == "fp8")
    assert gemms == [("0", "fprop"), ("0", "wgrad"), ("2", "dgrad"), ("2", "fprop"), ("2", "wgrad")]
    if recipe == "delayed":
        assert all(all(amax > 0 for amax in history[:3]) for history, _ in histories(model).values())
