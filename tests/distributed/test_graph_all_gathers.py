"""All-gathers inside of a compiled graph carry FP8: what is computed, what is sent, and what the ranks agree on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile import compat
from fp8compile.runtime.calls import Calls
from fp8compile.runtime.state import slots_of
from tests.distributed.test_parallelism import Block, parallelize
from tests.support.processes import on_ranks, sent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 4


class Wrapper(nn.Module):
    """`parallelize` of the other test takes a model with blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])


def block(dtype: torch.dtype = torch.float32) -> Block:
    torch.manual_seed(0)
    return Block().to(dtype)


def batch(step: int, rank: int = 0) -> Tensor:
    scale = (1.0, 2.0, 0.5, 1.5)[step % 4]
    return scale * torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(10 * step + rank))


@contextlib.contextmanager
def skipping(names: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"FP8COMPILE_SKIP": names}):
        yield


def records_of(report: fp8compile.Report) -> list[tuple[str, int, int, str]]:
    return [(r.tensor, r.bytes, r.before, r.reason) for graph in report.graphs for r in graph.collectives]


def local(x: Any) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


# --- sequence parallel ------------------------------------------------------------------------------


def sequence_parallel(mesh: Any, dtype: torch.dtype = torch.float32) -> Block:
    model = Wrapper()
    model.blocks[0] = block(dtype)
    return parallelize(model, mesh, sequence=True).blocks[0]


def _train(model: nn.Module, mesh: Any, rank: int, checkpointed: bool = False, dtype: torch.dtype = torch.float32) -> list:
    """What each step computes."""
    found = []
    for step in range(STEPS):
        model.zero_grad()
        x = DTensor.from_local(batch(step).to(dtype).chunk(2, 1)[rank], mesh, [Shard(1)])
        y = local(checkpoint(model, x, use_reentrant=False) if checkpointed else model(x))
        (y.float() ** 2).sum().backward()
        found.append([y.detach().clone(), *(local(p.grad).clone() for p in model.parameters())])
    return found


SEQUENCE = [
    {"recipe": "delayed"},
    {"recipe": "tensorwise"},
    {"recipe": "delayed", "reduce_amax": True},
    {"recipe": "delayed", "amax_group": "tp"},
    {"recipe": "tensorwise", "amax_group": "tp"},
    {"recipe": "delayed", "checkpointed": True},
    {"recipe": "delayed", "dtype": "bfloat16"},
    {"recipe": "tensorwise", "dtype": "bfloat16", "checkpointed": True},
]


def _sequence(rank: int) -> list[dict[str, Any]]:
    """Each case with the pass and without."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    every = []
    for case in SEQUENCE:
        how = {"checkpointed": bool(case.get("checkpointed")), "dtype": getattr(torch, str(case.get("dtype", "float32")))}
        options = {key: value for key, value in case.items() if key not in how}
        found: dict[str, Any] = {}
        for name, skip in (("with", ""), ("without", "all_gathers")):
            torch._dynamo.reset()
            model = sequence_parallel(mesh, how["dtype"])
            model.compile(backend="fp8", options=options)
            with skipping(skip), sent(compat.ALL_GATHER) as bytes_sent:
                found[name] = _train(model, mesh, rank, **how)
            found[f"sent {name}"] = bytes_sent
            found[f"state {name}"] = fp8compile.scaling_state(model)
            found[f"records {name}"] = records_of(fp8compile.report(model))
        every.append(found)
    return every


@pytest.fixture(scope="module")
def sequence(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return on_ranks(2, tmp_path_factory.mktemp("sequence"), _sequence)


@pytest.mark.parametrize("case", SEQUENCE, ids=lambda case: " ".join(map(str, case.values())))
def test_sequence_parallel_to_the_bit(sequence: list[list[dict[str, Any]]], case: dict[str, Any]) -> None:
    """Outputs, gradients and states with FP8 on the wire are those without. A rank sends a byte an element: of the input of the
    column-parallel linears in forward, and of the gradient of the row-parallel one in backward."""
    for results in sequence:
        found = results[SEQUENCE.index(case)]
        for step, (ours, theirs) in enumerate(zip(found["with"], found["without"], strict=True)):
            assert all(map(torch.equal, ours, theirs)), step
        assert found["state with"].keys() == found["state without"].keys()
        assert all(torch.equal(row, found["state without"][key]) for key, row in found["state with"].items())
        size = torch.finfo(getattr(torch, case.get("dtype", "float32"))).bits // 8
        part = 2 * 8 * 128
        assert {n for _, n in found["sent without"]} == {part * size}
        assert {n for _, n in found["sent with"]} == {part}
        assert len(found["sent with"]) == len(found["sent without"]) >= 2 * STEPS
        names = ["mlp.gate (input)", "mlp.down (gradient)"]
        assert found["records with"] == [(name, part, part * size, "") for name in names]
        assert found["records without"] == []


# --- what ranks agree on ------------------------------------------------------------------------------


def _one_rank_is_different(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Overflows and a bad batch on rank 1 alone. Step 4: in its part of a gathered tensor. 7: in its shard of a weight, so its
    next call is cold, and rank 0's is not. 10: NaN."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = sequence_parallel(mesh)
    model.compile(backend="fp8", options={"recipe": "delayed", **options})
    outputs, states, cold = [], [], []
    stock = Calls.forward

    def forward(self: Calls, call: Any) -> Any:
        how = stock(self, call)
        cold.append(how is not None and how.cold)
        return how

    changed = {4: model.norm.weight, 7: model.mlp.gate.weight}
    with mock.patch.object(Calls, "forward", forward):
        for step in range(13):
            model.zero_grad()
            x = batch(step)
            if step in changed and rank == 1:
                local(changed[step].data).mul_(100.0)
            if step == 10:  # the tokens of rank 1
                x[:, 8:] = float("nan")
            y = local(model(DTensor.from_local(x.chunk(2, 1)[rank], mesh, [Shard(1)])))
            y.square().sum().backward()
            outputs.append([y.detach().clone(), *(local(p.grad).clone() for p in model.mlp.parameters())])
            states.append({".".join(map(str, key)): [*slot.history(), slot.scale()] for key, slot in slots_of(model).items()})
    return {"outputs": outputs, "states": states, "cold": cold}


FUSED = {"_micro_pipeline_tp": True}  # Inductor would fuse collectives, on NCCL


@pytest.mark.parametrize(("options", "both", "alone"), [({}, [0, 5, 6], [8, 9]), (FUSED, [0], [])], ids=["", "fused"])
def test_one_rank_alone_is_cold(tmp_path: Path, options: dict[str, Any], both: list[int], alone: list[int]) -> None:
    """Amaxes and scales of gathered tensors are the same on all ranks at each step, and nothing hangs. Where Inductor may fuse
    collectives, no rank is cold alone."""
    ranks = on_ranks(2, tmp_path, _one_rank_is_different, options)
    cold = [found["cold"] for found in ranks]
    assert [step for step in range(13) if cold[0][step] and cold[1][step]] == both
    assert [step for step in range(13) if cold[0][step] != cold[1][step]] == alone
    for step in range(13):
        one, two = (found["states"][step] for found in ranks)
        for key in ("mlp.gate.weight.input.0", "mlp.down.weight.gradient.0"):
            assert one[key] == two[key], (step, key)
    finite = [all(bool(x.isfinite().all()) for found in ranks for x in found["outputs"][step]) for step in range(13)]
    assert finite == [step != 10 for step in range(13)]


# --- weights that the model gathers itself ------------------------------------------------------------


class Gathered(nn.Module):
    """torchtitan's "simple FSDP": a parametrization that gathers a weight in the graph."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Any) -> Tensor:
        return x.to(self.dtype).redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def simple_fsdp(mesh: Any, dtype: torch.dtype, dim: int = 0) -> Block:
    model = block()
    for module in list(model.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            where = [Shard(dim if p.dim() > 1 else 0)]
            module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, where)))
            parametrize.register_parametrization(module, name, Gathered(dtype), unsafe=True)
    return model


SIMPLE = [("delayed", "float32", 0), ("tensorwise", "bfloat16", 0), ("delayed", "bfloat16", 1)]


def _simple(rank: int) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    every = []
    for recipe, name, dim in SIMPLE:
        dtype, found = getattr(torch, name), {}
        for how, skip in (("with", ""), ("without", "all_gathers")):
            torch._dynamo.reset()
            model = simple_fsdp(mesh, dtype, dim)
            model.compile(backend="fp8", options={"recipe": recipe})
            steps = []
            with skipping(skip), sent(compat.ALL_GATHER) as bytes_sent:
                for step in range(STEPS):
                    model.zero_grad()
                    y = model(batch(step, rank).to(dtype))
                    (y.float() ** 2).sum().backward()
                    steps.append([y.detach().clone(), *(local(p.grad).clone() for p in model.parameters())])
            report = fp8compile.report(model)
            found |= {how: steps, f"sent {how}": bytes_sent, f"matmuls {how}": [(r.fqn, r.decision) for r in report.matmuls]}
            found[f"records {how}"] = records_of(report)
            found[f"state {how}"] = fp8compile.scaling_state(model)
        every.append(found)
    return every


@pytest.mark.parametrize("ranks", [2, 3])
def test_simple_fsdp(tmp_path: Path, ranks: int) -> None:
    """Weights that the model gathers are weights, and are gathered in FP8, also from uneven shards (3 ranks)."""
    for results in on_ranks(ranks, tmp_path, _simple):
        for case, found in zip(SIMPLE, results, strict=True):
            matmuls = found["matmuls with"]
            assert sorted(matmuls) == sorted([(f"mlp.{x}", "fp8") for x in ("gate", "up", "down")] * 3)
            for ours, theirs in zip(found["with"], found["without"], strict=True):
                assert all(map(torch.equal, ours, theirs)), case
            assert all(torch.equal(row, found["state without"][key]) for key, row in found["state with"].items())
            assert [r[0] for r in found["records with"]] == [f"mlp.{x} (weight)" for x in ("gate", "up", "down")]
            assert not any(reason for *_, reason in found["records with"])
            as_fp8 = [n for dtype, n in found["sent with"] if dtype == torch.uint8]
            assert len(as_fp8) == 3 * STEPS and len(found["sent with"]) == len(found["sent without"]) == 4 * STEPS
