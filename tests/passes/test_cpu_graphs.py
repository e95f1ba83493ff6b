"""What Inductor gets for a CPU: a call for each cast, amax and matmul, and no loop to write C++ of."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from tests.support import hooks

pytestmark = pytest.mark.compat
PAIRS = {"quantize_both": 3, "scaled_mm": 6, "quantize": 6}  # of two layers


@pytest.mark.parametrize(
    ("recipe", "calls"),
    [
        ("delayed", {**PAIRS, "amax": 6}),
        ("tensorwise", {**PAIRS, "amax": 6}),
        ("rowwise", {**PAIRS, "block_mm": 6, "scaled_mm": 0, "amax_blocks": 12}),
        ("blockwise", {**PAIRS, "block_mm": 6, "scaled_mm": 0, "amax_blocks": 10}),
        ("mxfp8", {**PAIRS, "block_mm": 6, "scaled_mm": 0, "amax_blocks": 12}),
    ],
)
def test_operators_stay_calls(recipe: str, calls: dict[str, int]) -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    with hooks.lowered_for_a_cpu() as graphs:
        step = torch.compile(model, backend="fp8", options={"recipe": recipe})
        step(torch.randn(64, 256, requires_grad=True)).sum().backward()
    nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    ours = [node for node in nodes if "fp8compile" in str(node.target)]
    assert Counter(str(node.target).split(".")[1] for node in ours) == Counter(calls)
    values = [(node, node.meta.get("val")) for node in nodes if node not in ours]
    numbers = [(node, x) for node, x in values if isinstance(x, Tensor) and "getitem" not in str(node.target)]
    assert not [node for node, x in numbers if x.dtype.itemsize == 1 and x.dtype != torch.bool]
    assert not [node for node, x in numbers if node.target == torch.ops.aten.mm.default]
