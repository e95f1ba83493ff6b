"""Over which ranks amaxes are reduced: `reduce_amax` for replicas, `amax_group` for the shards of a tensor.
(test_parallelism.py trains with a group.)"""

from __future__ import annotations

import datetime
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8compile
from fp8compile.compat import process_groups
from fp8compile.errors import Fp8CompileError, OptionError
from fp8compile.runtime import agreement
from tests.features.delayed.test_moves import by_schedule
from tests.support.gpu_steps import compile_mlp
from tests.support.harness import histories, noise
from tests.support.hooks import slots_of
from tests.support.models import Branches, Linear
from tests.support.processes import on_ranks


def batch(step: int, rank: int) -> Tensor:
    return noise(32, 128, seed=10 * step + rank) * (1 + step / 2) * (1 + rank)


def error_of(model: Any, x: Tensor) -> str:
    try:
        model(x).square().mean().backward()
    except (OptionError, Fp8CompileError) as error:
        return str(error)
    except Exception as error:  # Dynamo's, around it
        return f"{error} {error.__cause__}"
    return ""


# -- replicas --


def _amaxes(rank: int) -> dict[str, Any]:
    """Two calls with amaxes of each rank. Then one rank has a bad batch in the second step."""
    model = nn.Linear(128, 128)
    run = torch.compile(model, backend="fp8", options={"reduce_amax": True})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in (1.0, 2.0):
        y = run(torch.full((16, 128), step * (1 + rank)))
        y.backward(torch.full_like(y, step * (4 - rank)))
        optimizer.step()  # the state moves here, on all ranks
    found: dict[str, Any] = {
        role: slots_of(model)["weight", role, 0].history()[:2] for role in ("input", "gradient")
    }
    other = nn.Linear(128, 128)  # runs the graph of the model before
    run = torch.compile(other, backend="fp8", options={"reduce_amax": True})
    optimizer = torch.optim.SGD(other.parameters(), lr=0.0)
    for step in range(3):
        x = batch(step, rank)[:16]
        if step == 1 and rank == 1:
            x[0, 0] = float("nan")
        run(x).square().mean().backward()
        optimizer.zero_grad()
        optimizer.step()
        found[f"step {step}"] = histories(other)
    return found


def test_amaxes_of_replicas_and_a_bad_batch_on_one_of_them() -> None:
    """Reduced, all record the largest amax; a bad batch on one rank leaves no trace on any."""
    first, second = on_ranks(2, _amaxes)
    for found in (first, second):
        assert found["input"] == [4.0, 2.0] and found["gradient"] == [8.0, 4.0]
    assert all(first[f"step {step}"] == second[f"step {step}"] for step in range(3))
    assert first["step 1"] == first["step 0"] != first["step 2"]


def _decides_differently(rank: int) -> str:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    rules = [{"gemm": "wgrad", "module": "0", "fp8": "off"}] if rank == 1 else []
    options = {"reduce_amax": True, "policy": {"rules": rules, "extends": "none"}}
    return error_of(torch.compile(model, backend="fp8", options=options), batch(0, 0))


@pytest.mark.slow
def test_a_rank_that_decides_differently_is_named() -> None:
    for rank, said in enumerate(on_ranks(2, _decides_differently)):
        fp8, kept = "0 wgrad fp8 delayed", "0 wgrad high_precision"
        theirs, own = (kept, fp8) if rank == 0 else (fp8, kept)
        assert f"ranks [{1 - rank}]" in said and f"rank {1 - rank} has {theirs}, this one {own}." in said


def _on_four(rank: int) -> dict[str, Any]:
    """2 x 2 ranks: over which of them the input's amax, 1 + rank, is reduced."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found: dict[str, Any] = {}

    def run(key: str, shard: bool, **options: Any) -> None:
        torch._dynamo.reset()
        # with a forward of its own: compile() of torch's compiles nothing
        model = Linear(128, 128, bias=False)
        model.compile(backend="fp8", options=options)
        if shard:
            fully_shard(model, mesh=mesh["dp"])
        found[key] = error_of(model, torch.full((16, 128), 1.0 + rank))
        torch.optim.SGD(model.parameters()).step()
        if not found[key]:
            found[key] = slots_of(model)["weight", "input", 0].history()[0]

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


@pytest.mark.slow
def test_dimensions_of_a_mesh() -> None:
    """As a pair, as a mesh of one dimension, and by name where the parameters live on the mesh, or on a part
    of it. Names of nothing are errors."""
    four = on_ranks(4, _on_four)
    for key in ("mesh and name", "name"):
        assert [found[key] for found in four] == [3.0, 4.0, 3.0, 4.0]
    for key in ("mesh", "outer name"):
        assert [found[key] for found in four] == [2.0, 2.0, 4.0, 4.0]
    for key in ("both", "covered"):
        assert [found[key] for found in four] == [4.0] * 4
    for found in four:
        assert "'reduce_amax' must be the name of a process group" in found["no mesh"]
        assert "the parameters are on no DeviceMesh: pass (mesh, dimension)" in found["no mesh"]
        assert "the mesh of the parameters has 'dp', 'tp'" in found["unknown"]
        assert "Did you mean 'dp'" in found["unknown"]
        assert "'amax_group' must be the name of a process group" in found["current"]
        assert "'reduce_amax' must be" in found["no dimension"]


def _alone(rank: int) -> dict[str, Any]:
    """In the third step one rank goes another way through the model: it compiles a graph with other slots.
    Who catches the error and calls again gets it again."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=24))
    model = Branches()
    run = torch.compile(model, backend="fp8", options={"reduce_amax": group})
    found: dict[str, Any] = {"errors": [], "seconds": []}
    with (
        mock.patch.object(process_groups, "PATIENCE", 3.0),
        mock.patch.object(agreement.logger, "warning") as warning,
    ):
        for step in range(2):
            found["errors"].append(error_of(run, batch(step, rank)))
        before = histories(model)
        for _ in range(1 + rank):
            began = time.monotonic()
            found["errors"].append(error_of(lambda x: run(x, second=rank == 1), batch(2, rank)))
            found["seconds"].append(time.monotonic() - began)
    found["moved"] = {key: x for key, x in histories(model).items() if any(x[0])} != before
    found["said"] = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    return found


@pytest.mark.weekly
def test_a_rank_that_compiles_other_slots_alone() -> None:
    """It cannot know whether the others come: it says for whom it waits, and gives up before they do."""
    first, second = on_ranks(2, _alone)
    assert first["errors"] == ["", "", ""] and first["moved"]
    *before, once, again = second["errors"]
    assert before == ["", ""] and not second["moved"]
    for text in (once, again):
        assert "rank 1 has compiled a graph that ranks [0] of the process group" in text
        assert "within 12 s" in text
        assert "two.weight input 0" in text and "drop the last batch" in text
    assert all(seconds > 11.0 for seconds in second["seconds"])
    assert len(second["said"]) == 2 and not first["said"]
    assert "rank 1 waits for ranks [0]" in second["said"][0]


def test_recipes_with_finer_scales_refuse_a_group() -> None:
    for recipe in ("rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"):
        with pytest.raises(OptionError, match=f"'amax_group' must be False with recipe '{recipe}'"):
            fp8compile.Recipe(recipe, amax_group="tp")


# -- graphs, on one rank --

ALL_REDUCES = [
    ({}, 0, 0),
    ({"reduce_amax": True}, 0, 0),
    ({"recipe": "tensorwise"}, 4, 2),
    ({"current_scaling": (True, False, False)}, 2, 0),
]


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(("options", "forward", "backward"), ALL_REDUCES, ids=str)
def test_all_reduces_of_a_graph(
    one_process: str, options: dict[str, Any], forward: int, backward: int
) -> None:
    """None for amaxes with a history; one for each tensor that is scaled by its current amax, never again."""
    step = compile_mlp(64, amax_group=one_process, **options)
    counts = [sum("all_reduce" in kernel.name for kernel in graph.kernels) for graph in step.graphs]
    assert counts == [forward, backward]


def test_all_reduces_of_a_step(one_process: str) -> None:
    """One for all amaxes of the model, however many graphs it has: none before the first move, then one a
    pair of forward and backward, and one a step."""
    model = nn.Sequential(*(Linear(128, 128) for _ in range(3)))
    for layer in model:
        layer.compile(backend="fp8", options={"reduce_amax": True})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
        counts = []
        for _ in range(3):
            for _ in range(2):
                model(batch(0, 0)).square().mean().backward()
                counts.append(reduced.call_count)
            optimizer.step()
            counts.append(reduced.call_count)
    assert counts == [0, 1, 2, 2, 3, 4, 4, 5, 6]


SCHEDULES = ("fbsfbs", "ffbbs?fbs", "fffbbrsefb?rs", "fefbfbbsfrs")


def _schedules(rank: int) -> list[list[list[Tensor]]]:
    """Trainings on batches of each rank: plain ones, and ones with recomputations, evaluations and reads."""
    found = []
    for events in SCHEDULES:
        torch._dynamo.reset()
        ways = ((False, False), (True, True))
        found.append([by_schedule(events, *way, rank=rank, reduce_amax=True) for way in ways])
    return found


@pytest.mark.slow
def test_recomputations_and_reads_change_nothing_on_ranks() -> None:
    """To the bit; and all ranks have one state, though their weights drift apart."""
    first, second = on_ranks(2, _schedules)
    for mine, theirs in zip(first, second, strict=True):
        for plain, busy in (mine, theirs):
            assert len(plain) == len(busy) and all(map(torch.equal, plain, busy))
        inputs = [[x for x in plain if x.dim() == 1 and x.numel() == 30] for plain, _ in (mine, theirs)]
        assert len(inputs[0]) == len(inputs[1]) == 12 and all(map(torch.equal, *inputs))
