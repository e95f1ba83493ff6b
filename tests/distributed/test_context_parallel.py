"""Context parallelism on two processes: each has half of the tokens, and attention reads the keys and values
of all.

torch's ring attention does not run on a CPU (docs/distributed.md says why). So this is the common other way:
an all-gather of keys and values inside of the model.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd

import fp8compile
from tests.support.harness import histories, noise, sqnr
from tests.support.models import Attention, Block
from tests.support.processes import on_ranks

pytestmark = pytest.mark.slow

STEPS, TOKENS = 2, 64


class GatheringAttention(Attention):
    """Queries of the own tokens against the gathered keys and values; [batch, time / ranks, width] -> the
    same."""

    ranks, rank = 1, 0

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (f(x).view(batch, time, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.ranks > 1:
            k, v = (all_gather_tensor_autograd(part.contiguous(), 2, dist.group.WORLD) for part in (k, v))
        positions = torch.arange(k.shape[2], device=x.device)
        seen = positions <= positions[self.rank * time : (self.rank + 1) * time, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o(y.transpose(1, 2).reshape(batch, time, width))


def gradients(model: nn.Module, parts: int, rank: int) -> list[Tensor]:
    """Of all steps, on a part of the tokens; those of parts are added up."""
    found = []
    for step in range(STEPS):
        model.zero_grad()
        y = model(noise(2, TOKENS, 128, seed=step, scale=1 + step).chunk(parts, 1)[rank % parts].contiguous())
        y.square().sum().div(2 * TOKENS * 128).backward()
        found += [p.grad.clone() for p in model.parameters()]
    for gradient in found if parts > 1 else ():
        dist.all_reduce(gradient)
    return found


def _trained(rank: int) -> dict[str, Any]:
    """In high precision, on one device, and in parts."""
    found: dict[str, Any] = {}
    exact: list[Tensor] = []
    for way in ("high precision", "one", "parts"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, parts = Block(gated=True), 2 if way == "parts" else 1
        model.attention = GatheringAttention()
        model.attention.ranks, model.attention.rank = parts, rank % parts
        if way != "high precision":
            model.compile(
                backend="fp8", fullgraph=True, options={"recipe": "delayed", "reduce_amax": parts > 1}
            )
        made = gradients(model, parts, rank)
        torch.optim.SGD(model.parameters()).step()  # the state moves, on all ranks
        exact = exact or made
        decisions = {(r.fqn, r.gemm) for r in fp8compile.report(model).matmuls if r.decision == "fp8"}
        moved = {".".join(map(str, key)): history[:STEPS] for key, (history, _) in histories(model).items()}
        found[way] = {"ratios": [*map(sqnr, exact, made)], "histories": moved, "decisions": decisions}
    return found


def test_as_exact_as_one_device() -> None:
    """In dB to high precision. Ranks share the weights, and each has its tokens: they are replicas to the
    backend. With `reduce_amax`, amaxes are those of all tokens; those of the weights and of the first input
    are exactly the numbers of one device."""
    for result in on_ranks(2, _trained):
        ours, one = result["parts"], result["one"]
        assert min(ours["ratios"]) > min(one["ratios"]) - 1.5
        assert median(ours["ratios"]) > max(20.0, median(one["ratios"]) - 1.0)
        assert ours["decisions"] == one["decisions"] and len(one["decisions"]) == 3 * 7
        assert ours["histories"].keys() == one["histories"].keys() != set()
        for key, history in one["histories"].items():
            exact = ".weight.weight." in key or key.startswith("attention.q.weight.input")
            torch.testing.assert_close(
                ours["histories"][key], history, rtol=0.0 if exact else 0.3, atol=0.0, msg=key
            )
