"""`fp8_all_gather`: what it refuses, what ranks agree on, what is reported and measured.
(test_equivalence_on_ranks.py trains with it and without.)"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import fp8compile
from fp8compile.distributed import fp8_all_gather
from fp8compile.features.fsdp_gather.all_gather import Gathered
from fp8compile.features.fsdp_gather.gathered_scales import Scales, code_of
from fp8compile.ir.records import Gatherable
from tests.distributed.ranks import Net, build, gathered
from tests.support import hooks
from tests.support.harness import Dispatched, noise
from tests.support.models import ResidualMlp
from tests.support.processes import error_of, on_ranks

UP_OFF = {"policy": {"rules": [{"module": "*.up", "fp8": "off"}]}}


def sharded(
    options: dict[str, Any] | None = None, gather: bool = True, model: str = "mlps", **how: Any
) -> Net:
    """A model whose blocks are compiled and sharded, gathered in bf16 or FP8."""
    torch._dynamo.reset()
    net: Any = build(model)
    how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks:
        block.compile(backend="fp8", fullgraph=True, options={"recipe": "tensorwise", **(options or {})})
        fully_shard(block, **how)
    fully_shard(net, **{key: value for key, value in how.items() if key != "reshard_after_forward"})
    if gather:
        fp8_all_gather(net)
    return net


def step(model: nn.Module, number: int, rank: int, width: int = 128) -> None:
    model(noise(32, width, seed=10 * number + rank)).float().square().mean().backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None


# -- what ranks agree on --


def _disagreeing(rank: int, mesh: tuple[int, ...]) -> dict[str, tuple[str, str]]:
    """The first rank keeps one weight of each block in high precision, and the others do not."""
    names = ("replicate", "shard")[-len(mesh) :]
    model = sharded(UP_OFF if rank == 0 else {}, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
    for i in range(4):
        step(model, i, rank)
    return gathered(model)


@pytest.mark.parametrize("mesh", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_ranks_that_decide_differently_gather_the_same(mesh: tuple[int, ...]) -> None:
    """In FP8 what all of a group allow. None waits for another, nor does another group."""
    expected = [(False, "policy"), (False, "other ranks keep it"), (True, ""), (True, "")]
    for rank, said in enumerate(on_ranks(2 * len(mesh), _disagreeing, mesh)):
        dtype, reason = said["blocks.0.up.weight"]
        assert (dtype == "e4m3", reason.partition(":")[0]) == expected[rank]
        assert said["blocks.0.down.weight"] == ("e4m3", "")


# -- refusals --


class Tied(ResidualMlp):
    """Reads a weight by something else than a matmul."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up.weight.square().mean()


def _never(rank: int) -> list[str]:
    extended: Any = sharded(gather=False)
    local = extended.blocks[1].up.weight._local_tensor
    local.fsdp_pre_all_gather = local.fsdp_post_all_gather = lambda *_: None
    offload = CPUOffloadPolicy(pin_memory=False)
    attempts = (lambda: fp8_all_gather(Net()), lambda: sharded(offload_policy=offload))
    attempts += (lambda: sharded(reshard_after_forward=2), lambda: fp8_all_gather(extended))
    return [*map(error_of, attempts)]


@pytest.mark.slow
def test_what_can_never_be_gathered_is_refused_with_the_fix() -> None:
    for plain, offload, number, extension in on_ranks(4, _never):
        fewer = "blocks.0.up.weight is resharded to fewer ranks after forward: use reshard_after_forward=True"
        assert all(said.startswith("ShardingError: ") for said in (plain, offload, number, extension))
        assert "nothing of this Net is sharded: call fully_shard(model) first" in plain
        assert "blocks.0.up.weight is offloaded to the CPU: fully_shard without CPUOffloadPolicy" in offload
        assert fewer in number
        assert "blocks.1.up.weight has an all-gather extension already" in extension


def _read_otherwise(rank: int, strict: bool) -> tuple[str, dict, str, dict]:
    """Weights that something else than a matmul reads, in a graph and outside: errors, what is gathered."""
    options = {"recipe": "tensorwise", "strict": strict}
    tied: Any = fully_shard(Tied())
    tied.compile(backend="fp8", options=options)
    fp8_all_gather(tied)
    shared = error_of(lambda: [step(tied, i, rank) for i in range(3)]), gathered(tied)
    model: Any = sharded(options)

    def look() -> None:
        step(model, 0, rank), step(model, 1, rank)
        model.unshard()
        (model.blocks[0].unshard(), model.blocks[0].up.weight.square().sum(), model.blocks[0].reshard())
        step(model, 2, rank), step(model, 3, rank)

    return *shared, error_of(look), gathered(model)


@pytest.mark.weekly
@pytest.mark.parametrize("strict", [False, True])
def test_what_graphs_say_is_told(strict: bool) -> None:
    for shared, in_graph, eager, outside in on_ranks(2, _read_otherwise, strict):
        if strict:
            why = "up.weight is gathered in high precision: beside FP8 matmuls, it is read by"
            assert shared.startswith("StrictError: ") and why in shared
            assert eager.startswith("StrictError: ")
            assert "blocks.0.up.weight was gathered in FP8, and is read by aten.pow" in eager
        else:
            assert shared == eager == "nothing"
            dtype, reason = in_graph["up.weight"]
            assert dtype == "float32" and reason.startswith("read by aten.pow")
            assert in_graph["down.weight"] == ("e4m3", "")
            assert "outside of compiled graphs" in outside["blocks.0.up.weight"][1]


def _never_in_fp8(rank: int, policy: dict[str, Any]) -> str:
    model = sharded({"policy": policy, "strict": True})
    return error_of(lambda: [step(model, i, rank) for i in range(4)])


@pytest.mark.weekly
def test_a_policy_without_fp8_is_told_and_a_schedule_is_not() -> None:
    off = {"rules": [{"module": "blocks.*", "fp8": "off"}]}
    for said in on_ranks(2, _never_in_fp8, off):
        assert said.startswith("StrictError: ")
        assert "no weight is gathered in FP8" in said or "no matmul" in said
    assert on_ranks(2, _never_in_fp8, {"schedule": {"warmup_steps": 100}}) == ["nothing"] * 2


# -- statistics, and what a step asks of the device --

# or copy from the host to the device
WAITS = {"_local_scalar_dense", "nonzero", "index_put_", "lift_fresh", "item"}


def _statistics(rank: int, recipe: str) -> list[Any]:
    rows = []
    for gather in (False, True):
        model: Any = sharded({"recipe": recipe, "margin": [0, 1, 0]}, gather, "square")
        for i in range(3):
            step(model, i, rank, 256)
        fp8compile.stats(model, measure=True)
        step(model, 3, rank, 256)
        rows.append(fp8compile.stats(model).rows())
    weight = model.blocks[0].up.weight.full_tensor().to(torch.bfloat16)
    step(model, 4, rank, 256)
    with Dispatched() as seen:
        hooks.refresh_gathered_scales(model.blocks[0].up.weight)
    asked = {name.removeprefix("aten.").split(".")[0] for name in seen.names}
    return [*rows, fp8compile.stats(model).rows(), weight.abs().max().item(), asked]


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if isinstance(value, float)}


@pytest.mark.parametrize(
    ("ranks", "recipe"), [(2, "tensorwise"), pytest.param(1, "blockwise", marks=pytest.mark.slow)]
)
def test_statistics(ranks: int, recipe: str) -> None:
    """A weight has the rows that it has without it. What is measured is of the rank's own rows; amax and
    scale are those of the whole weight, and of the last forward. No step asks the device for anything."""
    for plain, ours, later, amax, asked in on_ranks(ranks, _statistics, recipe):
        named = ("name", "role", "use", "layout", "recipe", "format")
        assert [[row[key] for key in named] for row in ours] == [[row[key] for key in named] for row in plain]
        for expected, got in zip(plain, ours, strict=True):
            if got["role"] != "weight" or ranks == 1:
                assert numbers(got) == pytest.approx(numbers(expected), rel=1e-12) and got["sqnr"]
            else:
                assert got["sqnr"] == pytest.approx(expected["sqnr"], abs=1)
                assert got["sqnr"] != expected["sqnr"]
                if recipe == "tensorwise":
                    assert all(got[key] == expected[key] for key in ("scale", "scale_inv", "scale_inv_min"))
        if recipe == "tensorwise":
            named = "blocks.0.up.weight", "weight"
            (first,) = (row for row in later if (row["name"], row["role"]) == named)
            assert first["amax"] == amax and first["scale"] * amax == pytest.approx(448 / 2)
        assert "stack" in asked and not asked & WAITS


def test_the_padding_of_an_uneven_shard_is_not_measured() -> None:
    """Three ranks share 48 rows by 17, 17 and 14."""
    shard = torch.nn.functional.pad(noise(14, 64), (0, 0, 0, 3))
    parameter: Any = SimpleNamespace(shard=shard, own_rows=14, dtype=torch.bfloat16)
    scales = Scales([Gathered(parameter, owner=None, code=code_of(Gatherable()))])  # type: ignore[arg-type]
    scales.write(scales.amaxes([0]))
    elements, amax, *_ = scales.measured(0).tolist()
    assert elements == 14 * 64 and amax == shard.to(torch.bfloat16).abs().max()
