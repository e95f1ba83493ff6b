"""`frozen="fp8"` on several processes: as without it under DDP; weights that FSDP2 or tensor parallelism shards stay as they
are, with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fp8compile
from fp8compile.ir.frozen import FrozenWeight
from tests.runtime.test_frozen import ALL_FP8, LoRA, Net, bases, batch, interpreted, same
from tests.support.harness import grads_of
from tests.support.processes import on_ranks


def _trained(rank: int, how: str, frozen: str) -> tuple[list[torch.Tensor], list[bool], dict[str, str]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    options = {"policy": ALL_FP8, "recipe": "tensorwise", "frozen": frozen}
    call: Any
    if how == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            block.compile(backend="fp8", options=options)
            fully_shard(block)
        call = fully_shard(model)
    elif how == "tp":
        mesh = init_device_mesh("cpu", (2,))
        plan = {
            "up.base": ColwiseParallel(output_layouts=Replicate()),
            "down.base": RowwiseParallel(input_layouts=Replicate()),
        }
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
        call = torch.compile(model, backend="fp8", options=options)
    else:
        for block in model.blocks if how == "cut" else ():
            block.up = LoRA(nn.Linear(128, 256), rank=1024)  # more than a bucket
        call = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend="fp8", options=options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    with interpreted():
        for step in range(3):
            out = call(batch(2 * step + (rank if how != "tp" else 0), dtype=torch.float32))
            out.square().mean().backward()
            grads = grads_of(model).values()
            found += [out.detach().clone(), *(x.to_local() if hasattr(x, "to_local") else x for x in grads)]
            optimizer.step()
            optimizer.zero_grad()
    kinds = [isinstance(p, FrozenWeight) for p in bases(model).values()]
    return found, kinds, {x.parameter: x.reason for graph in fp8compile.report(model).graphs for x in graph.frozen}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"),
    [("ddp", ""), ("cut", "DDP has cut the graph"), ("fsdp", "sharded by FSDP2"), ("tp", "of another type: DTensor")],
)
def test_the_training_is_the_one_without_it(how: str, reason: str, tmp_path: Any) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "with").mkdir()
    without = on_ranks(2, tmp_path / "without", _trained, how, "high_precision")
    given = on_ranks(2, tmp_path / "with", _trained, how, "fp8")
    for (one, _, nothing), (other, kinds, reasons) in zip(without, given, strict=True):
        assert same(one, other) and not nothing
        assert kinds == [not reason] * 4
        assert reasons and all(why.startswith(reason) and bool(why) == bool(reason) for why in reasons.values())
