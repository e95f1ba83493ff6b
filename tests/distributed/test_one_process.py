"""Reports, statistics and state of several processes have the names and numbers of one process, and go on from its state.

All ranks get the same batch, so that their mean gradient is the gradient of one process, to the bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fp8compile
from fp8compile.ir.state_page import HISTORY
from tests.distributed.test_parallelism import Net, batch, build, parallelize
from tests.support.harness import sqnr
from tests.support.processes import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RECIPES = ("delayed", "tensorwise")
WAYS = ("ddp", "fsdp", "tp")


class Run:
    """The model on these ranks, or on one process alone (`way` "one" or "one, whole")."""

    def __init__(self, way: str, recipe: str) -> None:
        torch._dynamo.reset()
        self.model: Net = build()
        self.call: Any = self.model
        options: dict[str, Any] = {"recipe": recipe}
        if way == "tp":
            parallelize(self.model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
            options["amax_group"] = "tp"
        if way in ("ddp", "one, whole"):
            net = DistributedDataParallel(self.model) if way == "ddp" else self.model
            self.call = torch.compile(net, backend="fp8", options=options)
            return
        for block in self.model.blocks:
            block.compile(backend="fp8", fullgraph=True, options=options)
            if way == "fsdp":
                fully_shard(block)
        if way == "fsdp":
            fully_shard(self.model)

    def step(self, number: int) -> float:
        loss = self.call(batch(number, 0)).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in self.model.parameters():
                assert p.grad is not None
                p.detach().sub_(0.1 * p.grad)
                p.grad = None
        return loss.item()

    def weights(self) -> dict[str, Tensor]:
        named = self.model.named_parameters()
        return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in named}

    def load(self, weights: dict[str, Tensor]) -> None:
        for name, p in self.model.named_parameters():
            value = weights[name]
            p.detach().copy_(distribute_tensor(value, p.device_mesh, p.placements) if isinstance(p, DTensor) else value)

    def said(self) -> dict[str, Any]:
        """What the user sees by name."""
        records = fp8compile.report(self.model).matmuls
        return {
            "report": sorted({(r.fqn, r.gemm, r.m, r.n, r.k, r.decision, r.reason, r.recipe) for r in records}),
            "stats": sorted(fp8compile.stats(self.model).rows(), key=lambda row: (row["name"], row["role"], row["use"])),
            "state": fp8compile.scaling_state(self.model),
        }


def _ways(rank: int, recipe: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Two steps, what is then reported, and a third step: it goes on, it is another model's that has loaded the state which
    one process had, or one without a state."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for way in ("one", "one, whole", *WAYS):
        run = Run(way, recipe)
        result: dict[str, Any] = {"losses": [run.step(0), run.step(1)], **run.said(), "weights": run.weights()}
        result["next"] = run.step(2)
        twin = found.get(("one, whole" if way == "ddp" else "one", recipe), result)
        for key, state in (("loaded", twin["state"]), ("cold", None)) if recipe == "delayed" else ():
            other = Run(way, recipe)
            other.load(twin["weights"])
            if state is not None:
                fp8compile.load_scaling_state(other.model, state)
            result[key] = other.step(2)
        found[way, recipe] = result
    return found


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], dict[str, Any]]]:
    parts = [on_ranks(2, tmp_path_factory.mktemp("ways"), _ways, recipe) for recipe in RECIPES]  # each has a time limit
    return [{**delayed, **tensorwise} for delayed, tensorwise in zip(*parts, strict=True)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_data_parallel_ranks_say_what_one_process_says(ways: list[dict[Any, Any]], way: str, recipe: str) -> None:
    """Losses, reports, statistics and states, to the bit. (`test_split_graphs` cuts a graph as DDP does.)"""
    for found in ways:
        one, ours = found["one, whole" if way == "ddp" else "one", recipe], found[way, recipe]
        assert ours["losses"] == one["losses"] and ours["next"] == one["next"]
        assert ours["report"] == one["report"] and len(one["report"]) >= 9
        assert ours["stats"] == one["stats"] and len(one["stats"]) > 10
        assert ours["state"].keys() == one["state"].keys() and (len(one["state"]) > 10) is (recipe == "delayed")
        assert all(torch.equal(ours["state"][name], row) for name, row in one["state"].items())


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_data_parallel_ranks_go_on_from_the_state_of_one_process(ways: list[dict[Any, Any]], way: str) -> None:
    """Loaded before the first call, it changes the next loss as it does there."""
    for found in ways:
        one, ours = found["one, whole" if way == "ddp" else "one", "delayed"], found[way, "delayed"]
        assert ours["loaded"] == one["loaded"] == one["next"]
        assert ours["cold"] == one["cold"] != one["next"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_tensor_parallel_ranks_say_what_one_process_says(ways: list[dict[Any, Any]], recipe: str) -> None:
    """With `amax_group`: the names, and the amaxes up to rounding; those of the weights and of the first input before the first
    update to the bit. A report has the sizes of the shards: each is half of the matmul."""
    for found in ways:
        one, ours = found["one", recipe], found["tp", recipe]
        (expected, whole), (got, half) = (
            ([(row[0], row[1], *row[5:]) for row in said["report"]], [row[2] * row[3] * row[4] for row in said["report"]])
            for said in (one, ours)
        )
        assert got == expected and [2 * size for size in half] == whole
        keys = ("name", "role", "use", "layout", "recipe", "format")
        assert [[row[key] for key in keys] for row in ours["stats"]] == [[row[key] for key in keys] for row in one["stats"]]
        assert ours["state"].keys() == one["state"].keys() and (len(one["state"]) > 10) is (recipe == "delayed")
        for name, row in one["state"].items():
            if name == "fp8compile.version":
                continue
            theirs, mine = row[HISTORY:-1], ours["state"][name][HISTORY:-1]  # newest first
            torch.testing.assert_close(mine, theirs, rtol=0.15, atol=0, msg=name)
            if ".weight.weight." in name or name.startswith("blocks.0.mlp.gate.weight.input"):
                assert theirs[1] == mine[1] > 0.0, name
        assert sqnr(torch.tensor(one["losses"]), torch.tensor(ours["losses"])) > 40.0


def test_tensor_parallel_ranks_go_on_from_the_state_of_one_process(ways: list[dict[Any, Any]]) -> None:
    """The losses differ by rounding from those of one process: less than a lost state changes them."""
    first, second = ([found[way, "delayed"] for way in ("one", "tp")] for found in ways)
    one, ours = first
    assert ours["loaded"] == second[1]["loaded"]
    assert abs(ours["loaded"] - one["loaded"]) < 0.3 * abs(one["cold"] - one["loaded"])
