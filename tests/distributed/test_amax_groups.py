"""Over which ranks amaxes are reduced: `reduce_amax` for replicas, `amax_group` for the shards of a tensor."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8compile
from fp8compile.compat import collectives
from fp8compile.errors import Fp8CompileError, OptionError
from fp8compile.runtime import calls
from fp8compile.runtime.state import slots_of
from tests.support.gpu_steps import compile_mlp
from tests.support.harness import sqnr
from tests.support.models import Branches, ResidualMlp, SwiGlu
from tests.support.processes import on_ranks

STEPS = 4


def batch(step: int, rank: int) -> Tensor:
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(10 * step + rank))
    return x * (1 + step / 2) * (1 + rank)


def histories(model: nn.Module) -> dict[str, list[float]]:
    return {".".join(map(str, key)): slot.history()[:STEPS] for key, slot in slots_of(model).items()}


def error_of(model: Any, x: Tensor) -> str:
    try:
        model(x).square().mean().backward()
    except (OptionError, Fp8CompileError) as error:
        return str(error)
    except Exception as error:  # Dynamo's, around it
        return f"{error} {error.__cause__}"
    return ""


# --- replicas -------------------------------------------------------------------------------------


def _on_four(rank: int) -> dict[str, Any]:
    """2 x 2 ranks: over which of them the input's amax, 1 + rank, is reduced."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found: dict[str, Any] = {}

    def run(key: str, shard: bool, **options: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = ResidualMlp()
        model.compile(backend="fp8", options=options)
        if shard:
            fully_shard(model, mesh=mesh["dp"])
        found[key] = error_of(model, torch.full((16, 128), 1.0 + rank))
        if not found[key]:
            found[key] = slots_of(model)["up.weight", "input", 0].history()[0]

    run("own", False)
    run("mesh and name", False, reduce_amax=(mesh, "dp"))
    run("mesh", False, reduce_amax=mesh["tp"])
    run("name", True, reduce_amax="dp")
    run("outer name", True, reduce_amax="tp")
    run("both", True, reduce_amax="dp", amax_group="tp")
    run("covered", True, reduce_amax=True, amax_group="tp")
    run("no mesh", False, reduce_amax="dp")
    run("unknown", True, reduce_amax="dpp")
    run("current", True, recipe="tensorwise", amax_group="pp")
    try:
        fp8compile.Recipe(reduce_amax=mesh)
    except OptionError as error:
        found["no dimension"] = str(error)
    return found


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(4, tmp_path_factory.mktemp("groups"), _on_four)


@pytest.mark.slow
def test_dimensions_of_a_mesh(four: list[dict[str, Any]]) -> None:
    """As a pair, as a mesh of one dimension, and by name where the parameters live on the mesh, or on a part of it."""
    assert [found["own"] for found in four] == [1.0, 2.0, 3.0, 4.0]
    for key in ("mesh and name", "name"):
        assert [found[key] for found in four] == [3.0, 4.0, 3.0, 4.0]
    for key in ("mesh", "outer name"):
        assert [found[key] for found in four] == [2.0, 2.0, 4.0, 4.0]
    for key in ("both", "covered"):
        assert [found[key] for found in four] == [4.0] * 4


@pytest.mark.slow
def test_names_of_nothing_are_errors(four: list[dict[str, Any]]) -> None:
    for found in four:
        assert "'reduce_amax' must be the name of a process group" in found["no mesh"]
        assert "the parameters are on no DeviceMesh: pass (mesh, dimension)" in found["no mesh"]
        assert "the mesh of the parameters has 'dp', 'tp'" in found["unknown"] and "Did you mean 'dp'" in found["unknown"]
        assert "'amax_group' must be the name of a process group" in found["current"]
        assert "'reduce_amax' must be" in found["no dimension"]


# --- shards ---------------------------------------------------------------------------------------

RECIPES: tuple[tuple[str, type[nn.Module], dict[str, Any]], ...] = (
    ("delayed", ResidualMlp, {}),
    ("tensorwise", ResidualMlp, {"recipe": "tensorwise"}),
    ("gated", SwiGlu, {}),  # the default policy scales the input of its down projection by the current amax
)
STYLES = {"up": ColwiseParallel, "gate": ColwiseParallel, "down": RowwiseParallel}


def whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def train(model: nn.Module) -> dict[str, Any]:
    grads = []
    for step in range(STEPS):
        model.zero_grad()
        model(batch(step, 0)).square().mean().backward()
        grads.append({name: whole(p.grad) for name, p in model.named_parameters()})
    return {"histories": histories(model), "gradients": grads}


def _shards(rank: int) -> dict[str, Any]:
    """Each recipe on one device, on two without the option, and with it; and without FP8."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found: dict[str, Any] = {}
    for name, kind, options in RECIPES:
        for way in ("high precision", "one", "own", "group"):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = kind()
            if way in ("own", "group"):
                model = parallelize_module(model, mesh, {x: STYLES[x]() for x, _ in model.named_children()})
            more = {"amax_group": "tp"} if way == "group" else {}
            if way != "high precision":
                model.compile(backend="fp8", options={**options, **more})
            found[name, way] = train(model)
    return found


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, tmp_path_factory.mktemp("shards"), _shards)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delayed", "gated"])
def test_histories_of_shards_are_those_of_one_device(shards: list[dict[str, Any]], name: str) -> None:
    """Of inputs and weights of the first layer to the bit; behind a first layer in FP8, products may be rounded elsewhere."""
    (one, own, group), (_, _, other) = ([found[name, way]["histories"] for way in ("one", "own", "group")] for found in shards)
    assert one.keys() == group.keys() == other.keys() and len(one) >= 6
    assert group == other  # and not so without
    for key, history in one.items():
        if key.startswith(("up", "gate")) and "gradient" not in key or "weight.weight" in key:
            assert group[key] == history, key
        torch.testing.assert_close(torch.tensor(group[key]), torch.tensor(history), rtol=0.1, atol=0, msg=key)
    assert any(own[key] != history for key, history in one.items() if "weight.weight" in key)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _, _ in RECIPES])
def test_gradients_of_shards(shards: list[dict[str, Any]], name: str) -> None:
    """As exact as on one device. With current scaling they are the same but for the order of sums."""
    for found in shards:
        exact, one, group = (found[name, way]["gradients"] for way in ("high precision", "one", "group"))
        for step in range(STEPS):
            for key, gradient in exact[step].items():
                assert sqnr(gradient, group[step][key]) > sqnr(gradient, one[step][key]) - 1.0, (step, key)
                assert name != "tensorwise" or sqnr(one[step][key], group[step][key]) > 45.0, (step, key)


def test_recipes_with_finer_scales_refuse_a_group() -> None:
    for recipe in ("rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"):
        with pytest.raises(OptionError, match=f"'amax_group' must be False with recipe '{recipe}'"):
            fp8compile.Recipe(recipe, amax_group="tp")


# --- faults ---------------------------------------------------------------------------------------


def _faults(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    rules = [{"gemm": "wgrad", "module": "0", "fp8": "off"}] if rank == 1 else []
    run = torch.compile(model, backend="fp8", options={"reduce_amax": True, "policy": {"rules": rules, "extends": "none"}})
    found["decisions"] = error_of(run, batch(0, 0))
    torch._dynamo.reset()
    run = torch.compile(model, backend="fp8", options={"reduce_amax": True})
    for step in range(3):  # one rank has a bad batch in the second step
        x = batch(step, rank)
        if step == 1 and rank == 1:
            x[0, 0] = float("nan")
        run(x).square().mean().backward()
        found[f"step {step}"] = histories(model)
    return found


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, tmp_path_factory.mktemp("faults"), _faults)


@pytest.mark.slow
def test_a_bad_batch_on_one_rank_leaves_no_trace_on_any(faults: list[dict[str, Any]]) -> None:
    first, second = faults
    for step in range(3):
        assert first[f"step {step}"] == second[f"step {step}"]
    assert first["step 1"] == first["step 0"] != first["step 2"]


@pytest.mark.slow
def test_a_rank_that_decides_differently_is_named(faults: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(faults):
        fp8, kept = "0 wgrad fp8 delayed", "0 wgrad high_precision"
        theirs, own = (kept, fp8) if rank == 0 else (fp8, kept)
        assert f"ranks [{1 - rank}]" in found["decisions"]
        assert f"rank {1 - rank} has {theirs}, this one {own}." in found["decisions"]


def _alone(rank: int) -> dict[str, Any]:
    """In the third step one rank goes another way through the model: it compiles a graph with other slots."""
    limit = datetime.timedelta(seconds=24)
    group = dist.new_group(timeout=limit)
    model = Branches()
    run = torch.compile(model, backend="fp8", options={"reduce_amax": group})
    found: dict[str, Any] = {"errors": [], "seconds": []}
    with mock.patch.object(collectives, "PATIENCE", 3.0), mock.patch.object(calls.logger, "warning") as warning:
        for step in range(2):
            found["errors"].append(error_of(run, batch(step, rank)))
        before = histories(model)
        for _ in range(2):  # who catches the error and calls again gets it again
            if rank == 1:
                began = time.monotonic()
                found["errors"].append(error_of(lambda x: run(x, second=True), batch(2, rank)))
                found["seconds"].append(time.monotonic() - began)
    found["moved"] = {key: history for key, history in histories(model).items() if any(history)} != before
    found["said"] = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    return found


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_rank_that_compiles_other_slots_alone(tmp_path: Path) -> None:
    """It cannot know whether the others come: it says for whom it waits, and gives up before they do."""
    first, second = on_ranks(2, tmp_path, _alone)
    assert first["errors"] == ["", ""] and not first["moved"]
    *before, once, again = second["errors"]
    assert before == ["", ""] and not second["moved"]
    for text in (once, again):
        assert "rank 1 has compiled a graph that ranks [0] of the process group" in text and "within 12 s" in text
        assert "two.weight input 0" in text and "drop the last batch" in text
    assert all(11.0 < seconds < 24.0 for seconds in second["seconds"])
    assert len(second["said"]) == 2 and "rank 1 waits for ranks [0]" in second["said"][0] and not first["said"]


# --- graphs, on one rank --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, forward, backward",
    [
        ({}, 1, 1),
        ({"reduce_amax": True}, 1, 1),
        ({"recipe": "tensorwise"}, 4, 2),
        ({"current_scaling": (True, False, False)}, 3, 1),
    ],
    ids=str,
)
def test_all_reduces_of_a_graph(one_process: str, options: dict[str, Any], forward: int, backward: int) -> None:
    """One for all amaxes with a history of a direction; one for each tensor that is scaled by its current amax, never again."""
    step = compile_mlp(64, amax_group=one_process, **options)
    counts = [sum("all_reduce" in kernel.name for kernel in graph.kernels) for graph in step.graphs]
    assert counts == [forward, backward]


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_group_of_one_changes_nothing(one_process: str, recipe: str) -> None:
    found = []
    for options in ({}, {"amax_group": one_process}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = ResidualMlp()
        model.compile(backend="fp8", options={"recipe": recipe, **options})
        found.append(train(model))
    assert found[0]["histories"] == found[1]["histories"]
    for before, after in zip(found[0]["gradients"], found[1]["gradients"], strict=True):
        assert all(torch.equal(gradient, after[name]) for name, gradient in before.items())
