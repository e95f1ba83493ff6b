"""Experts on several ranks: transformers' form, in which each rank computes its experts for all tokens, and
torchtitan's, in which an all-to-all takes tokens to their experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

import fp8compile
from tests.support.harness import ALL_FP8, sqnr
from tests.support.models import Experts
from tests.support.processes import on_ranks
from tests.support.stepped import stepped

pytestmark = pytest.mark.slow

BF16, COUNT, TOP, WIDTH, TOKENS = torch.bfloat16, 8, 2, 128, 96
CASES = [("masked", "delayed"), ("moved", "rowwise"), ("moved, compiled whole", "delayed")]


class Layer(nn.Module):
    """Routing by the first features of a token. `rank` of `ranks` has its part of the experts."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole, mine = Experts(WIDTH, WIDTH, COUNT), COUNT // ranks
        self.experts, self.rank, self.ranks = Experts(WIDTH, WIDTH, mine), rank, ranks
        with torch.no_grad():
            for p, q in zip(self.experts.parameters(), whole.parameters(), strict=True):
                p.copy_(q[rank * mine : (rank + 1) * mine])

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = x[:, :COUNT].float().softmax(-1).topk(TOP)
        return weights, chosen


class Masked(Layer):
    """Tokens of other ranks' experts are sorted after those of this rank's, as transformers does; the sum of
    all ranks' results is the layer's."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        mine = COUNT // self.ranks
        local = chosen - self.rank * mine
        elsewhere = (local < 0) | (local >= mine)
        expert, order = local.masked_fill(elsewhere, mine).reshape(-1).sort()
        ends = torch.histc(expert.float(), mine, 0, mine - 1).cumsum(0).to(torch.int32)
        outside = (expert >= mine).unsqueeze(-1)
        made = self.experts(x[order // TOP].masked_fill(outside, 0.0), ends).masked_fill(outside, 0.0)
        made = made * weights.masked_fill(elsewhere, 0.0).reshape(-1)[order].unsqueeze(-1).to(made.dtype)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return made[back].view(-1, TOP, WIDTH).sum(1)


class Moved(Layer):
    """An all-to-all takes each row to its expert's rank and another brings the result back, as torchtitan
    does. How many rows come is data."""

    def sorted(self, rows: Tensor, by_expert: Tensor) -> Tensor:
        return rows[by_expert]

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        mine = COUNT // self.ranks
        expert, order = chosen.reshape(-1).sort()
        sizes = torch.histc(expert.float(), COUNT, 0, COUNT - 1).to(torch.int64)
        theirs = funcol.all_to_all_single(sizes, None, None, dist.group.WORLD)
        sent = sizes.view(self.ranks, mine).sum(1).tolist()
        got = theirs.view(self.ranks, mine).sum(1).tolist()
        rows = funcol.all_to_all_single_autograd(x[order // TOP], got, sent, dist.group.WORLD)
        # rows come by rank, then by expert: sorted by expert here
        local = torch.arange(mine).repeat(self.ranks).repeat_interleave(theirs, output_size=rows.shape[0])
        by_expert = local.argsort(stable=True)
        ends = theirs.view(self.ranks, mine).sum(0).cumsum(0).to(torch.int32)
        made = self.experts(self.sorted(rows, by_expert), ends)
        home = torch.empty_like(by_expert)
        home[by_expert] = torch.arange(by_expert.shape[0])
        made = funcol.all_to_all_single_autograd(made[home], sent, got, dist.group.WORLD)
        made = made * weights.reshape(-1)[order].unsqueeze(-1).to(made.dtype)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return made[back].view(-1, TOP, WIDTH).sum(1)


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).to(BF16)


def steps(layer: Layer, call: Any, rank: int) -> list[dict[str, Tensor]]:
    found = []
    for number in range(3):
        dy = batch(number + 7, rank)
        found.append(stepped(call, layer, [batch(number, rank)], lambda _, dy=dy: dy))
        assert all(p.grad is not None for p in layer.parameters())
    return found


def trained(rank: int, kind: str, recipe: str) -> dict[str, Any]:
    layer = (Masked if kind == "masked" else Moved)(rank, 2).to(BF16)
    options = {"recipe": recipe, "policy": ALL_FP8}
    if kind == "moved":  # torchtitan compiles the experts apart from the all-to-all
        layer.experts.compile(backend="fp8", options=options, dynamic=True)
        call = layer
    else:
        call = torch.compile(layer, backend="fp8", options=options)
    found = steps(layer, call, 0 if kind == "masked" else rank)
    return {"steps": found, "decisions": {r.decision for r in fp8compile.report(layer).matmuls if r.groups}}


def as_one_computes(ranks: list[list[dict[str, Tensor]]], masked: bool = False) -> None:
    """Outputs and gradients of two ranks, each with half of the experts, against all experts in high
    precision. `masked`: both have the same tokens, and their results are added up."""
    whole = Masked().to(BF16)
    exact = [steps(whole, whole, rank) for rank in ((0,) if masked else (0, 1))]
    for number, got in enumerate(zip(*ranks, strict=True)):
        for name in ("output 0", "input 0"):
            found = [got[0][name].float() + got[1][name].float()] if masked else [one[name] for one in got]
            for run, one in zip(exact, found, strict=True):
                assert sqnr(run[number][name], one) > 20, (number, name)
        for name in ("experts.gate_up_proj", "experts.down_proj"):
            expected = torch.stack([run[number][name].float() for run in exact]).sum(0)
            assert sqnr(expected, torch.cat([one[name] for one in got])) > 20, (number, name)


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(("kind", "recipe"), CASES)
def test_ranks_compute_what_one_computes(kind: str, recipe: str) -> None:
    results = on_ranks(2, trained, kind, recipe)
    assert all(result["decisions"] == {"fp8"} for result in results)
    as_one_computes([result["steps"] for result in results], masked=kind == "masked")
