"""Context parallelism on two processes: each has half of the tokens, and attention reads the keys and values of all.

torch's `context_parallel` cuts the tokens and replaces attention. Its ring attention does not run on a CPU
(docs/distributed.md says why), but attention by plain matmuls does. The common other way is an all-gather of keys and values
inside of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
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
    """The gradients of each step on a part of the tokens. `around`: a context that may cut the tensors it is given."""
    found = []
    for step in range(STEPS):
        model.zero_grad()
        x = part(batch(step)).contiguous()
        with around(buffers=[x]):
            y = model(x)
            y.square().sum().div(2 * TOKENS * 128).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return found


def histories(model: nn.Module) -> dict[str, list[float]]:
    return {".".join(map(str, key)): slot.history()[:STEPS] for key, slot in slots_of(model).items()}


def _trained(rank: int, kind: str, recipe: str, options: dict[str, Any]) -> dict[str, Any]:
    """In high precision, by one device, and in parts; gradients of parts are added up. By `kind`, keys are "gathered" by the
    model, or by "torch": parts of the tokens from both ends on each rank, and another attention, run as matmuls."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    result: dict[str, Any] = {}
    for way in ("high precision", "one", "cp"):
        torch._dynamo.reset()
        model = build(GatheringAttention if kind == "gathered" else NonCausal)
        for block in model if way != "high precision" else ():
            how = {"recipe": recipe, **(options if way == "cp" else {})}
            block.compile(backend="fp8", fullgraph=kind == "gathered", options=how)
        parts, around = 1, lambda **_: nullcontext()
        if way == "cp" and kind == "gathered":
            parts = 2
            model[0].attention.ranks, model[0].attention.rank = 2, rank
        elif way == "cp":
            around = partial(context_parallel, mesh, buffer_seq_dims=[1])
        with sdpa_kernel(SDPBackend.MATH):
            steps = train(model, lambda x, parts=parts: x.chunk(parts, 1)[rank % parts], around)
        if way == "cp":
            for gradient in (gradient for step in steps for gradient in step.values()):
                dist.all_reduce(gradient)
        decisions = {(r.fqn, r.gemm, r.decision) for r in fp8compile.report(model).matmuls}
        result[way] = {"gradients": steps, "histories": histories(model), "decisions": decisions}
    high = result["high precision"]["gradients"]
    for way in ("one", "cp"):
        pairs = zip(high, result[way].pop("gradients"), strict=True)
        result[way]["ratios"] = [sqnr(expected[name], got[name]) for expected, got in pairs for name in expected]
    return result


@pytest.mark.parametrize(
    ("kind", "recipe", "options"),
    [
        ("torch", "delayed", {}),
        pytest.param("gathered", "delayed", {"reduce_amax": True}, marks=pytest.mark.weekly),
        pytest.param("gathered", "rowwise", {}, marks=pytest.mark.weekly),
    ],
)
def test_as_exact_as_one_device(kind: str, recipe: str, options: dict[str, Any]) -> None:
    """In dB to high precision. Ranks share the weights, and each has its tokens: they are replicas to the backend. With
    `reduce_amax`, amaxes are those of all tokens; those of the weights and of the first input are exactly the numbers of one
    device."""
    for result in on_ranks(2, _trained, kind, recipe, options):
        ours, one = result["cp"], result["one"]
        assert min(ours["ratios"]) > min(one["ratios"]) - 1.5
        assert median(ours["ratios"]) > max(20.0, median(one["ratios"]) - 1.0)
        fp8 = [{found for found in way["decisions"] if found[2] == "fp8"} for way in (ours, one)]
        assert fp8[0] == fp8[1] and len(fp8[0]) == 3 * 7
        assert ours["histories"].keys() == one["histories"].keys()
        assert bool(one["histories"]) is (recipe == "delayed")
        for key, history in one["histories"].items() if options else ():
            exact = ".weight.weight." in key or key.startswith("0.attention.q.weight.input")
            torch.testing.assert_close(ours["histories"][key], history, rtol=0.0 if exact else 0.3, atol=0.0, msg=key)
