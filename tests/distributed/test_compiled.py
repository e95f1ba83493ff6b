"""Several processes whose graphs Inductor compiles: a case each of data, sharded and tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import fp8compile
from fp8compile.distributed import fp8_all_gather
from tests.distributed.test_parallelism import Net, batch, build, gradients, parallelize
from tests.support.harness import sqnr
from tests.support.processes import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3


def differing(expected: list[dict[str, torch.Tensor]], got: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """What is not equal to the bit, in dB."""
    return {
        f"{step} {name}": sqnr(gradient, got[step][name])
        for step, named in enumerate(expected)
        for name, gradient in named.items()
        if not torch.equal(gradient, got[step][name])
    }


def _ddp(rank: int) -> dict[str, Any]:
    model, twin = build(), build()
    run = torch.compile(DistributedDataParallel(model), backend="fp8")
    alone = torch.compile(twin, backend="fp8")
    ours, expected = [], []
    for step in range(STEPS):
        model.zero_grad(), twin.zero_grad()
        for net in (run, alone):
            net(batch(step, rank)).square().mean().backward()
        ours.append({name: p.grad.clone() for name, p in model.named_parameters()})
        for p in twin.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2
        expected.append({name: p.grad.clone() for name, p in twin.named_parameters()})
    states = [fp8compile.scaling_state(net) for net in (model, twin)]
    return {"differs": differing(expected, ours), "states": states, "graphs": len(fp8compile.report(model).graphs)}


def test_ddp_is_its_replicas(tmp_path: Any) -> None:
    """To the bit, gradients and state."""
    for found in on_ranks(2, tmp_path, _ddp, inductor=True):
        assert found["differs"] == {}
        ours, expected = found["states"]
        assert ours.keys() == expected.keys() and len(ours) > 10
        assert all(torch.equal(ours[name], row) for name, row in expected.items())


def _fsdp(rank: int) -> dict[str, Any]:
    runs = []
    for gather in (False, True):
        torch._dynamo.reset()
        model: Net = build()
        for block in model.blocks:
            block.compile(backend="fp8", fullgraph=True, options={"recipe": "tensorwise"})
            fully_shard(block)
        fully_shard(model)
        if gather:
            fp8_all_gather(model)
        steps = []
        for step in range(STEPS):
            model(batch(step, rank)).square().mean().backward()
            steps.append({name: gradient.clone() for name, gradient in gradients(model).items()})
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-0.1)
                p.grad = None
        runs.append(steps)
    fp8 = [record.parameter for record in fp8compile.report(model).gathered if record.gathered == "fp8"]
    return {"differs": differing(*runs), "gathered": fp8}


def test_the_fp8_all_gather_changes_nothing(tmp_path: Any) -> None:
    """To the bit."""
    for found in on_ranks(2, tmp_path, _fsdp, inductor=True):
        assert found["differs"] == {}
        assert len(found["gathered"]) == 6


def _tensor_and_sequence_parallel(rank: int) -> dict[str, Any]:
    """A block between activations that are sharded by tokens, and one on one device: gradients to high precision."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found: dict[str, Any] = {}
    made: dict[str, list[torch.Tensor]] = {}
    for way in ("high", "one", "tp"):
        torch._dynamo.reset()  # otherwise Dynamo compiles the other number of tokens for any number of them
        net = (parallelize(build(), mesh, sequence=True) if way == "tp" else build()).blocks[0]
        if way != "high":
            net.compile(backend="fp8")
        made[way] = []
        for step in range(STEPS):
            net.zero_grad()
            x = batch(step, 0)
            y = net(DTensor.from_local(x.chunk(2, 1)[rank], mesh, [Shard(1)]) if way == "tp" else x)
            (y.to_local() if isinstance(y, DTensor) else y).square().sum().backward()
            made[way] += [gradient.clone() for gradient in gradients(net).values()]
        found[way] = [sqnr(*pair) for pair in zip(made["high"], made[way], strict=True)], [*fp8compile.scaling_state(net)]
    return found


def test_tensor_and_sequence_parallel(tmp_path: Any) -> None:
    """As close to high precision as one device."""
    for found in on_ranks(2, tmp_path, _tensor_and_sequence_parallel, inductor=True):
        (one, state), (ours, names) = found["one"], found["tp"]
        assert min(ours) > 18.0 and all(x > y - 2.0 for x, y in zip(ours, one, strict=True)), (ours, one)
        assert names == state and len(names) == 8
