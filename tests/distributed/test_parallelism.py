"""FSDP2, HSDP and tensor parallelism, in the spellings that trainers use, with all recipes, against replicas or high precision.

A *replica* is the same FP8 model on one rank, without parallelism. The gradients of the replicas are averaged by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fp8compile
from fp8compile.ir.inputs import plain
from fp8compile.runtime.state import slots_of
from tests.support.harness import sqnr
from tests.support.models import SwiGlu
from tests.support.processes import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 2


class Block(nn.Module):
    """A norm and a gated MLP with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(128), SwiGlu(128, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """Two blocks, a norm and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.out = nn.LayerNorm(128), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int, rank: int) -> Tensor:
    scale = (1.0, 3.0, 0.5)[step % 3]
    return scale * torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(10 * step + rank))


# --- data parallel: to the bit --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """How a model is sharded and compiled. `ranks`: a mesh of two dimensions shards over the second one."""

    compiled: str = "before"  # fully_shard; "after" it; "wrapped": by torch.compile(block); "whole": the root alone
    reshard: bool | int | None = None
    checkpoint: str = ""  # "inside" of what is compiled, or "outside"
    accumulate: int = 1  # forwards and backwards a step, gradients reduced in the last one
    ranks: tuple[int, ...] = (2,)
    recipe: str = "delayed"
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [self.recipe, self.compiled, "x".join(map(str, self.ranks))]
        parts += [f"checkpoint {self.checkpoint}"] if self.checkpoint else []
        parts += [f"accumulate {self.accumulate}"] if self.accumulate > 1 else []
        return ", ".join(parts + ([f"reshard {self.reshard}"] if self.reshard is not None else []))


ON_TWO = [
    Case(),
    Case("after", recipe="tensorwise"),
    Case("wrapped", recipe="rowwise"),
    Case("whole", recipe="blockwise"),
    Case("after", recipe="mxfp8"),
    Case(recipe="rowwise_with_gw_hp", reshard=True),
    Case(reshard=False, accumulate=2),
    Case("after", reshard=False, recipe="tensorwise", checkpoint="outside"),
    Case(checkpoint="inside"),
    Case("after", checkpoint="outside", accumulate=2),
    Case("wrapped", options={"recast_weights": True}),
    Case("after", accumulate=2, options={"cache_weights": True}),  # FSDP2 frees weights: they are cast in each call
]
ON_FOUR = [Case(ranks=(2, 2)), Case("after", ranks=(2, 2), recipe="blockwise", accumulate=2), Case(ranks=(4,), reshard=2)]


def shard(model: Net, case: Case) -> Net:
    """What a trainer does to a model: checkpointing, compiling and sharding, in the order of the case."""
    options = {"backend": "fp8", "options": {"recipe": case.recipe, **case.options}}
    names = ("replicate", "shard") if len(case.ranks) == 2 else None
    how = {"mesh": init_device_mesh("cpu", case.ranks, mesh_dim_names=names), "reshard_after_forward": case.reshard}
    for i, block in enumerate(model.blocks):
        if case.checkpoint == "inside":  # of what is compiled: parts of the block
            block.mlp = checkpoint_wrapper(block.mlp)
        inner = block
        if case.checkpoint == "outside":
            block = model.blocks[i] = checkpoint_wrapper(block)
        if case.compiled == "before":
            inner.compile(fullgraph=case.checkpoint != "inside", **options)
        fully_shard(block, **how)
        if case.compiled == "after":
            inner.compile(**options)
        if case.compiled == "wrapped":
            model.blocks[i] = torch.compile(block, **options)
    fully_shard(model, **how)
    if case.compiled == "whole":
        model.compile(**options)
    return model


def replica(case: Case) -> Net:
    model = build()
    for block in model.blocks:
        if case.checkpoint == "inside":
            block.mlp = checkpoint_wrapper(block.mlp)
        block.compile(backend="fp8", options={"recipe": case.recipe, **case.options})
    return model


def averaged(gradient: Tensor, ranks: tuple[int, ...]) -> Tensor:
    """The mean over all ranks, added up as HSDP does: inside of a shard group, then over the groups."""
    every = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(every, gradient)
    parts = torch.stack(every).view(*ranks, *gradient.shape)
    return parts.sum(len(ranks) - 1).sum(0) / len(every) if len(ranks) == 2 else parts.sum(0) / len(every)


def _data_parallel(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """The gradients of each step of each case that differ from those of the replicas, and what the report says."""
    found = []
    for case in cases:
        torch._dynamo.reset()
        sharded, twin = shard(build(), case), replica(case)
        wrong = []
        for step in range(STEPS):
            for last in [False] * (case.accumulate - 1) + [True]:
                sharded.set_requires_gradient_sync(last)
                for model in (sharded, twin):
                    model(batch(step + 5 * last, rank)).square().mean().backward()
            expected = {plain(name): averaged(p.grad, case.ranks) for name, p in twin.named_parameters()}
            for name, p in sharded.named_parameters():
                ratio = sqnr(expected[plain(name)], p.grad.full_tensor())
                if ratio < (120.0 if case.ranks == (4,) else float("inf")):  # the order of a sum over four is gloo's
                    wrong.append((step, plain(name), ratio))
            sharded.zero_grad()
            twin.zero_grad()
        reports = [fp8compile.report(model).matmuls for model in (sharded, twin)]
        decisions = [sorted({(plain(r.fqn), r.gemm, r.decision) for r in report}) for report in reports]
        states = [{key: row.tolist() for key, row in fp8compile.scaling_state(m).items()} for m in (sharded, twin)]
        found.append({"wrong": wrong, "decisions": decisions, "states": states})
    return found


def check(found: dict[str, Any]) -> None:
    assert not found["wrong"], found["wrong"][:5]
    ours, expected = found["decisions"]
    assert any(decision == "fp8" for *_, decision in expected)
    assert [row for row in ours if row[2] == "fp8"] == [row for row in expected if row[2] == "fp8"]
    assert found["states"][0] == found["states"][1]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return on_ranks(2, tmp_path_factory.mktemp("two"), _data_parallel, ON_TWO)


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return on_ranks(4, tmp_path_factory.mktemp("four"), _data_parallel, ON_FOUR)


@pytest.mark.parametrize("case", ON_TWO, ids=str)
def test_fsdp_is_its_replicas(on_two: list[list[dict[str, Any]]], case: Case) -> None:
    for results in on_two:
        check(results[ON_TWO.index(case)])


@pytest.mark.parametrize("case", ON_FOUR, ids=str)
def test_hsdp_is_its_replicas(on_four: list[list[dict[str, Any]]], case: Case) -> None:
    for results in on_four:
        check(results[ON_FOUR.index(case)])


# --- tensor parallel: as close to high precision as one device ------------------------------------------------------------


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in model.named_parameters()}


def parallelize(model: Net, mesh: Any, sequence: bool = False) -> Net:
    """Column and row parallel MLPs. `sequence`: between them, activations are sharded by tokens."""
    for block in model.blocks:
        plan: dict[str, Any] = {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        if sequence:
            split = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
            down = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
            plan |= {"norm": SequenceParallel(), "mlp": split, "mlp.down": down}
        parallelize_module(block, mesh, plan)
    return model


def _tensor_parallel(rank: int, recipes: list[str]) -> list[dict[str, Any]]:
    """Two steps with each recipe on one device and on two, and in high precision: SQNR of gradients, and the states."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = []
    for recipe in recipes:
        torch._dynamo.reset()
        models = {"tp": parallelize(build(), mesh), "one": build(), "high": build()}
        for name in ("tp", "one"):
            for block in models[name].blocks:
                block.compile(backend="fp8", options={"recipe": recipe})
        ratios: dict[str, list[float]] = {"tp": [], "one": []}
        for step in range(STEPS):
            for model in models.values():
                model.zero_grad()
                model(batch(step, 0)).square().mean().backward()
            expected = gradients(models["high"])
            for name, seen in ratios.items():
                seen += [sqnr(expected[key], gradient) for key, gradient in gradients(models[name]).items()]
        histories = [{key: slot.history() for key, slot in slots_of(models[name]).items()} for name in ratios]
        decisions = [sorted((r.fqn, r.gemm, r.decision) for r in fp8compile.report(models[name]).matmuls) for name in ratios]
        found.append({"ratios": ratios, "histories": histories, "decisions": decisions})
    return found


TP_RECIPES = ["delayed", "tensorwise", "rowwise", "blockwise"]


@pytest.fixture(scope="module")
def tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return on_ranks(2, tmp_path_factory.mktemp("tp"), _tensor_parallel, TP_RECIPES)


@pytest.mark.parametrize("recipe", TP_RECIPES)
def test_tensor_parallel_is_as_exact_as_one_device(tensor_parallel: list[list[dict[str, Any]]], recipe: str) -> None:
    """As close to high precision as one device, and the state moves as there: a weight's amax is the larger of its shards'."""
    results = [ranks[TP_RECIPES.index(recipe)] for ranks in tensor_parallel]
    for result in results:
        ratios, of_one = result["ratios"]["tp"], result["ratios"]["one"]
        assert median(ratios) > 20.0 and all(x > y - 2.0 for x, y in zip(ratios, of_one, strict=True))
        assert result["decisions"][0] == result["decisions"][1]
        ours, one = result["histories"]
        assert ours.keys() == one.keys() and bool(ours) is (recipe == "delayed")
        assert all(sum(amax > 0 for amax in history) == STEPS for history in ours.values())
    for key, history in results[0]["histories"][1].items():
        if key[1] == "weight":
            shards = [result["histories"][0][key] for result in results]
            assert [max(pair) for pair in zip(*shards, strict=True)] == history, key


def _sequence_parallel(rank: int) -> list[float]:
    """SQNR of the gradients of a block between activations that are sharded by tokens."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, plain_model = parallelize(build(), mesh, sequence=True).blocks[0], build().blocks[0]
    model.compile(backend="fp8")
    for step in range(STEPS):
        for block in (model, plain_model):
            block.zero_grad()
        y = plain_model(batch(step, 0))
        y.square().sum().backward()
        local = batch(step, 0).chunk(2, 1)[rank]
        out = model(DTensor.from_local(local, mesh, [Shard(1)]))
        out = out.to_local() if isinstance(out, DTensor) else out
        out.square().sum().backward()
    expected = gradients(plain_model)
    return [sqnr(expected[name], gradient) for name, gradient in gradients(model).items()]


def test_sequence_parallel(tmp_path: Any) -> None:
    for ratios in on_ranks(2, tmp_path, _sequence_parallel):
        assert min(ratios) > 20.0


def _fsdp_and_tensor_parallel(rank: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, plain_model = parallelize(build(), mesh["tp"]), build()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
        block.compile(backend="fp8")
    fully_shard(model, mesh=mesh["dp"])
    ratios = []
    for step in range(STEPS):
        model.zero_grad()
        plain_model.zero_grad()
        model(batch(step, mesh.get_local_rank("dp"))).square().mean().backward()
        for replica_rank in range(2):
            (plain_model(batch(step, replica_rank)).square().mean() / 2).backward()
        expected = gradients(plain_model)
        ratios += [sqnr(expected[name], gradient) for name, gradient in gradients(model).items()]
    return [*ratios, float(len(slots_of(model)))]


def test_fsdp_with_tensor_parallel(tmp_path: Any) -> None:
    for *ratios, slots in on_ranks(4, tmp_path, _fsdp_and_tensor_parallel):
        assert min(ratios) > 18.0 and slots > 10


def _mixed_precision(rank: int) -> list[float]:
    """FSDP2 gathers in bf16 and reduces in float32."""
    model, plain_model = build(), build()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        block.compile(backend="fp8")
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    for step in range(STEPS):
        model.zero_grad()
        plain_model.zero_grad()
        model(batch(step, rank)).float().square().mean().backward()
        plain_model(batch(step, rank)).square().mean().backward()
    expected = {name: averaged(p.grad, (2,)) for name, p in plain_model.named_parameters()}
    return [sqnr(expected[name], gradient) for name, gradient in gradients(model).items()]


def test_mixed_precision(tmp_path: Any) -> None:
    for ratios in on_ranks(2, tmp_path, _mixed_precision):
        assert min(ratios) > 18.0
