"""Context parallelism on two processes: each has half of the tokens, and attention reads the keys and values of all.

torch's `context_parallel` cuts the tokens and replaces attention. Its ring attention does not run on a CPU
(docs/distributed.md says why), but attention by plain matmuls does. The common other way is an all-gather of keys and values
inside of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8compile
from tests.support.harness import sqnr
from tests.support.hooks import slots_of
from tests.support.models import Attention, Block
from tests.support.processes import on_ranks

pytestmark = pytest.mark.slow

STEPS, TOKENS = 2, 64


class GatheringAttention(Attention):
    """Queries of the own tokens against the gathered keys and values; [batch, time / ranks, width] -> the same."""

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


class NonCausal(Attention):
    """What torch's `context_parallel` replaces is this function, by its name."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def build(attention: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    block = Block(gated=True)
    block.attention = attention()
    return nn.Sequential(block)


def batch(step: int) -> Tensor:
    return (1 + step) * torch.randn(2, TOKENS, 128, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, part: Callable[[Tensor], Tensor], around: Callable[..., Any]) -> list[dict[str, Tensor]]:
    """The gradients of each step on a part of the tokens. `around`: a context, of the tensors that it may cut."""
    found = []
    for step in range(STEPS):
        model.zero_grad()
        x = part(batch(step)).contiguous()
        with around([x]):
            y = model(x)
            y.square().sum().div(2 * TOKENS * 128).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return found


def close(ours: list[float], one: list[float]) -> None:
    """In dB to high precision: as the gradients of one device."""
    assert min(ours) > min(one) - 1.5 and median(ours) > max(20.0, median(one) - 1.0)


def histories(model: nn.Module) -> dict[str, list[float]]:
    return {".".join(map(str, key)): slot.history()[:STEPS] for key, slot in slots_of(model).items()}


CASES: list[tuple[str, dict[str, Any]]]
CASES = [("delayed", {"reduce_amax": True}), ("rowwise", {})]


def reduce(steps: list[dict[str, Tensor]]) -> None:
    """Add up the gradients of each step over the ranks."""
    for step in steps:
        for gradient in step.values():
            dist.all_reduce(gradient)


def compared(result: dict[str, Any]) -> dict[str, Any]:
    """With the SQNR of each gradient of each step to high precision instead of the gradients."""
    high = result["high precision"]["gradients"]
    for way in ("one", "cp"):
        steps = zip(high, result[way].pop("gradients"), strict=True)
        result[way]["ratios"] = [sqnr(expected[name], got[name]) for expected, got in steps for name in expected]
    return result


def _gathering(rank: int) -> list[dict[str, Any]]:
    found = []
    for recipe, options in CASES:
        result: dict[str, Any] = {}
        for way in ("high precision", "one", "cp"):
            torch._dynamo.reset()
            model = build(GatheringAttention)
            for block in model if way != "high precision" else ():
                kept = options if way == "cp" else {}
                block.compile(backend="fp8", fullgraph=True, options={"recipe": recipe, **kept})
            for block in model if way == "cp" else ():
                block.attention.ranks, block.attention.rank = 2, rank
            grads = train(model, lambda x, way=way: x.chunk(2, 1)[rank] if way == "cp" else x, lambda _: nullcontext())
            if way == "cp":
                reduce(grads)
            result[way] = {"gradients": grads, "histories": histories(model)}
            if way != "high precision":
                result[way]["decisions"] = sorted((r.fqn, r.gemm, r.decision) for r in fp8compile.report(model).matmuls)
        found.append(compared(result))
    return found


@pytest.fixture(scope="module")
def gathering() -> list[list[dict[str, Any]]]:
    return on_ranks(2, _gathering)


@pytest.mark.weekly
@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: f"{CASES[i][0]} {CASES[i][1]}")
def test_gathered_keys_are_as_exact_as_one_device(gathering: list[list[dict[str, Any]]], case: int) -> None:
    """Ranks share the weights, and each has its tokens: they are replicas to the backend. With `reduce_amax`, amaxes are those
    of all tokens; those of the weights and of the first input are exactly the numbers of one device."""
    for results in gathering:
        result = results[case]
        ours, one = result["cp"], result["one"]
        close(ours["ratios"], one["ratios"])
        assert ours["decisions"] == one["decisions"] and ("attention.q", "fprop", "fp8") in one["decisions"]
        assert ours["histories"].keys() == one["histories"].keys()
        assert bool(one["histories"]) is (CASES[case][0] == "delayed")
        for key, history in one["histories"].items() if "reduce_amax" in CASES[case][1] else ():
            exact = ".weight.weight." in key or key.startswith("0.attention.q.weight.input")
            torch.testing.assert_close(ours["histories"][key], history, rtol=0.0 if exact else 0.3, atol=0.0, msg=key)


def _of_torch(rank: int) -> dict[str, Any]:
    """torch's `context_parallel`: parts of the tokens from both ends on each rank, and another attention, run as matmuls."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    result: dict[str, Any] = {}
    for way in ("high precision", "one", "cp"):
        torch._dynamo.reset()
        model = build(NonCausal)
        for block in model if way != "high precision" else ():
            block.compile(backend="fp8", options={"recipe": "delayed"})

        def around(buffers: list[Tensor], way: str = way) -> AbstractContextManager:
            return context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1]) if way == "cp" else nullcontext()

        with sdpa_kernel(SDPBackend.MATH):
            grads = train(model, lambda x: x.clone(), around)
        if way == "cp":
            reduce(grads)
        result[way] = {"gradients": grads, "histories": histories(model)}
        if way != "high precision":
            result[way]["decisions"] = sorted({(r.fqn, r.gemm, r.decision) for r in fp8compile.report(model).matmuls})
    return compared(result)


@pytest.mark.slow
def test_context_parallel_of_torch() -> None:
    for result in on_ranks(2, _of_torch):
        ours, one = result["cp"], result["one"]
        close(ours["ratios"], one["ratios"])
        fp8 = {row for row in ours["decisions"] if row[2] == "fp8"}
        assert len(fp8) == 3 * 7 and fp8 == {row for row in one["decisions"] if row[2] == "fp8"}
