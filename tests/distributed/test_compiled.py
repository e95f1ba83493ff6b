"""Several processes whose graphs Inductor compiles: a case each of data, sharded and tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from fp8compile.distributed import fp8_all_gather
from tests.distributed.ranks import Way, build, gathered, train
from tests.support.harness import noise, scaling_tensors, sqnr
from tests.support.processes import on_ranks

pytestmark = pytest.mark.slow


def _trained(rank: int) -> dict[str, Any]:
    """DDP beside a replica; tensor and sequence parallel beside one device and high precision."""
    ways = {
        "ddp": Way("ddp"),
        "replica": Way("replica", compiled="around"),
        "high": Way("one", compiled="not"),
        "one": Way("one", {"recipe": "delayed"}),
        "sequence": Way("sequence", {"recipe": "delayed"}),
    }
    runs = {name: train("mlps" if i < 2 else "gated block", way, "fb") for i, (name, way) in enumerate(ways.items())}
    ours, theirs = runs["ddp"].seen, runs["replica"].seen
    found: dict[str, Any] = {"differs": [name for name, x in theirs.items() if not torch.equal(x, ours[name])]}
    found["ratios"] = {}
    for name in ("one", "sequence"):
        gradients = {key: x for key, x in runs["high"].seen.items() if key.split()[1:] in WEIGHTS}
        found["ratios"][name] = [sqnr(x, runs[name].seen[key]) for key, x in gradients.items()]
        found[name] = sorted(scaling_tensors(runs[name].model))
    return found


WEIGHTS = [["gradient", f"mlp.{name}.weight"] for name in ("gate", "up", "down")]


@pytest.mark.weekly
def test_ddp_is_its_replicas_and_tensor_parallel_as_exact_as_one_device() -> None:
    for found in on_ranks(2, _trained, inductor=True):
        assert found["differs"] == []
        one, ours = found["ratios"]["one"], found["ratios"]["sequence"]
        assert len(ours) == 3 and min(ours) > 18.0 and all(x >= y - 2.0 for x, y in zip(ours, one, strict=True)), (ours, one)
        assert found["one"] == found["sequence"] and len(found["one"]) == 8


def _gathering(rank: int) -> dict[str, Any]:
    """A block whose weights have one scale, and one whose weights have scales of blocks."""
    runs = []
    for gather in (False, True):
        torch._dynamo.reset()
        model: Any = build("square")
        for block, recipe in zip(model.blocks, ("tensorwise", "blockwise"), strict=True):
            block.compile(backend="fp8", fullgraph=True, options={"recipe": recipe})
            fully_shard(block)
        fully_shard(model)
        if gather:
            fp8_all_gather(model)
        steps = []
        for step in range(3):
            model(noise(32, 256, seed=10 * step + rank)).square().mean().backward()
            steps += [p.grad.full_tensor().clone() for p in model.parameters()]
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-0.1)
                p.grad = None
        runs.append(steps)
    fp8 = [name for name, (dtype, _) in gathered(model).items() if dtype == "e4m3"]
    return {"same": all(map(torch.equal, *runs)), "gathered": fp8}


@pytest.mark.weekly
def test_the_fp8_all_gather_changes_nothing() -> None:
    """To the bit."""
    for found in on_ranks(2, _gathering, inductor=True):
        assert found["same"] and len(found["gathered"]) == 4
