"""`fp8_all_gather` in other arrangements: whole models, meshes of two dimensions, other recipes, models that move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8compile
from fp8compile.distributed import fp8_all_gather
from fp8compile.errors import ShardingError
from tests.distributed.test_all_gather import Net, batch, counted, gathered
from tests.support.processes import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 4
BLOCKS = {f"blocks.{i}.{linear}.weight" for i in range(2) for linear in ("up", "down")}


def build() -> Net:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Net()


def sharded(gather: bool, whole: str = "", mesh: Any = None, recipe: str = "tensorwise", policy: Any = None) -> tuple[Net, Any]:
    """A model with sharded blocks, and what to call. `whole`: the root is compiled, "in place" or "wrapped", else the blocks.
    `mesh`: of two dimensions shards over the second; one with "tp" has tensor-parallel blocks."""
    model = build()
    how: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    if mesh is not None:
        how["mesh"] = mesh["dp"] if "tp" in mesh.mesh_dim_names else mesh
    options = {"backend": "fp8", "options": {"recipe": recipe, **({"policy": policy} if policy else {})}}
    for block in model.blocks:
        if mesh is not None and "tp" in mesh.mesh_dim_names:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if not whole:
            block.compile(**options)
        fully_shard(block, **how)
    fully_shard(model, **how)
    if gather:
        fp8_all_gather(model)
    if whole == "in place":
        model.compile(**options)
    return model, torch.compile(model, **options) if whole == "wrapped" else model


def train(model: nn.Module, run: Any, replica: int, between: Any = None) -> dict[str, Any]:
    """Steps of AdamW. Gradients of each, and the bytes that this rank puts into all-gathers in the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gradients = []
    for step in range(STEPS):
        if between is not None:
            between(step, model)
        with counted() as sent:
            run(batch(step, replica)).float().square().mean().backward()
        gradients.append({name: p.grad.full_tensor().clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return {"gradients": gradients, "sent": sum(sent), "report": gathered(model), "text": str(fp8compile.report(model))}


def same(plain: dict[str, Any], ours: dict[str, Any]) -> None:
    """To the bit."""
    for expected, got in zip(plain["gradients"], ours["gradients"], strict=True):
        assert expected.keys() == got.keys() and len(expected) == 12
        for name, gradient in expected.items():
            assert torch.equal(got[name], gradient), name


# --- what is compiled ---------------------------------------------------------------------------------


def _whole(rank: int) -> dict[str, Any]:
    return {whole: [train(*sharded(gather, whole), rank) for gather in (False, True)] for whole in ("in place", "wrapped")}


def test_a_model_that_is_compiled_as_a_whole(tmp_path: Any) -> None:
    """FSDP2's hooks cut it into graphs of blocks, which read the gathered FP8 values."""
    for found in on_ranks(2, tmp_path, _whole):
        for plain, ours in found.values():
            same(plain, ours)
            assert {name for name, (dtype, _) in ours["report"].items() if dtype == "e4m3"} == BLOCKS
            assert ours["sent"] == plain["sent"] - 2 * 2 * 128 * 256  # twice a step, half of 4 matrices, a byte less each


# --- meshes of two dimensions -------------------------------------------------------------------------


def _meshes(rank: int) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for key, names in (("hsdp", ("replicate", "shard")), ("tp", ("dp", "tp"))):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        replica = mesh.get_local_rank("dp") if key == "tp" else rank
        found[key] = [train(*sharded(gather, mesh=mesh), replica) for gather in (False, True)]
    off = {"rules": [{"module": "up", "fp8": "off"}]} if rank == 0 else None
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found["one differs"] = [train(*sharded(True, mesh=mesh, policy=off), rank)]
    return found


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, Any]]]]:
    return on_ranks(4, tmp_path_factory.mktemp("meshes"), _meshes)


def test_hybrid_sharding(meshes: list[dict[str, list[dict[str, Any]]]]) -> None:
    """Each group of two gathers in FP8 by its own amaxes, which are those of the other one."""
    for found in meshes:
        plain, ours = found["hsdp"]
        same(plain, ours)
        assert {name for name, (dtype, _) in ours["report"].items() if dtype == "e4m3"} == BLOCKS
        assert ours["sent"] == plain["sent"] - 2 * 2 * 128 * 256


def test_tensor_parallel_weights_stay_in_high_precision(meshes: list[dict[str, list[dict[str, Any]]]]) -> None:
    for found in meshes:
        plain, ours = found["tp"]
        same(plain, ours)
        assert ours["sent"] == plain["sent"]
        said = {name: ours["report"][name] for name in BLOCKS}
        assert said == dict.fromkeys(BLOCKS, ("bfloat16", "a tensor-parallel parameter"))
        assert "all-gather: 0 of 5 matrices in FP8" in ours["text"] and "a tensor-parallel parameter" in ours["text"]


def test_one_rank_of_a_mesh_that_decides_differently(meshes: list[dict[str, list[dict[str, Any]]]]) -> None:
    """Its group gathers that weight in high precision. The other group does not wait, nor do the ranks of its own."""
    for rank, found in enumerate(meshes):
        dtype, reason = found["one differs"][0]["report"]["blocks.0.up.weight"]
        assert (dtype == "e4m3") is (rank >= 2)
        assert reason.startswith("policy") if rank == 0 else reason == ("other ranks keep it" if rank == 1 else "")
        assert found["one differs"][0]["report"]["blocks.0.down.weight"] == ("e4m3", "")


# --- recipes, and models that move ----------------------------------------------------------------------


def _refused(rank: int) -> dict[str, str]:
    said = {}
    for recipe in ("mxfp8", "rowwise_with_gw_hp"):
        model, run = sharded(True, recipe=recipe)
        try:
            run(batch(0, rank))
        except ShardingError as error:
            said[recipe] = str(error)
    return said


def test_recipes_that_need_two_copies_are_refused(tmp_path: Any) -> None:
    """At the first call, on all ranks, by the name of a weight."""
    for said in on_ranks(2, tmp_path, _refused):
        for recipe in ("mxfp8", "rowwise_with_gw_hp"):
            assert f"up.weight cannot be gathered in FP8: recipe {recipe!r}" in said[recipe], said
            assert "blocks.0." in said[recipe] and "take recipe" in said[recipe]


def _moved(rank: int) -> dict[str, Any]:
    """`model.to` before `fp8_all_gather`; and behind it, before the first step and later."""
    found: dict[str, Any] = {"said": []}
    for gather in (False, True):
        model, run = sharded(False)
        model.to("cpu").to(torch.float64).to(torch.float32)
        if gather:
            fp8_all_gather(model)
        found["before", gather] = train(model, run, rank)

    def move(step: int, model: nn.Module) -> None:
        if step in (0, 2):
            try:
                model.to("cpu")
            except RuntimeError as error:
                found["said"].append(f"{step}: {error}: {error.__cause__}")

    found["behind"] = train(*sharded(True), rank, move)
    return found


def test_a_model_that_moves(tmp_path: Any) -> None:
    """Before `fp8_all_gather`, as any model. Behind it torch refuses, by the name of a parameter, and nothing has changed."""
    for found in on_ranks(2, tmp_path, _moved):
        for ours in (found["before", True], found["behind"]):
            same(found["before", False], ours)
            assert {name for name, (dtype, _) in ours["report"].items() if dtype == "e4m3"} == BLOCKS
        assert [line.partition(":")[0] for line in found["said"]] == ["0", "2"]
        assert all("Couldn't swap Linear.weight: Cannot swap t1" in line for line in found["said"])
