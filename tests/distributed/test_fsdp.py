"""FSDP2 (`fully_shard`) and tensor parallel parameters, on two processes with gloo: memory, gradients, reports and state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8compile
from fp8compile.errors import StateError
from fp8compile.reporting.outside import WHY_OUTSIDE
from tests.support.harness import sqnr
from tests.support.models import ResidualMlp
from tests.support.processes import on_ranks

pytestmark = pytest.mark.slow

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualMlp() for _ in range(2))
        self.norm, self.out = nn.LayerNorm(128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


WEIGHTS = 3 * 128 * 256  # elements of the blocks' weights that backward reads: the first one has no dgrad


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(32, 128, generator=torch.Generator().manual_seed(10 * step + rank))


def on_two(folder: Path, work: Callable[..., Any], *args: Any) -> list[Any]:
    return on_ranks(2, folder, work, *args)


def shard(model: Net, reshard: bool | int | None, compiled: str, **options: Any) -> Net:
    from torch.distributed.fsdp import fully_shard

    how = {"backend": "fp8", "options": options}
    for block in model.blocks if compiled == "blocks" else ():
        block.compile(fullgraph=True, **how)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model)
    if compiled == "whole":
        model.compile(**how)
    return model


# --- memory and gradients -------------------------------------------------------------------------

RESHARDED = "weights are cast again in backward: FSDP2 reshards them after forward"
CASES: list[tuple[bool | int | None, str, dict[str, Any]]] = [
    (True, "blocks", {}),
    (None, "whole", {"recipe": "blockwise"}),
    (False, "blocks", {"recipe": "tensorwise"}),
]


def _train(rank: int) -> list[dict[str, Any]]:
    """Two steps of each case. Returns the bytes of whole FP8 weights kept between the last forward and its backward, the
    gradients with and without FSDP2, and the report."""
    results = []
    for reshard, compiled, options in CASES:
        torch._dynamo.reset()
        model, plain = shard(build(), reshard, compiled, **options), build()
        for block in plain.blocks:
            block.compile(backend="fp8", options=options)
        gradients: list[dict[str, torch.Tensor]] = [{}, {}]
        for step in range(2):
            kept: dict[int, int] = {}

            def pack(x: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
                if x.dtype in FP8 and x.numel() == 128 * 256:
                    kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                return x

            for net, found in zip((model, plain), gradients, strict=True):
                net.zero_grad()
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x) if net is model else torch.enable_grad():
                    y = net(batch(step, rank))
                y.square().mean().backward()
                for name, p in net.named_parameters():
                    if net is plain:
                        dist.all_reduce(p.grad)
                    found[f"{step} {name}"] = p.grad.full_tensor().clone() if net is model else p.grad / 2
        report = fp8compile.report(model)
        results.append({"kept": sum(kept.values()), "gradients": gradients, "report": str(report), "dict": report.to_dict()})
    return results


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> list[list[dict[str, Any]]]:
    return on_two(tmp_path_factory.mktemp("train"), _train)


@pytest.mark.parametrize("case", range(len(CASES)), ids=str)
def test_no_weight_is_kept_in_fp8_where_fsdp2_reshards(trained, case: int) -> None:
    """A copy kept from forward to backward would hold the whole weight on every rank. FSDP2 also changes no gradient."""
    keeps = CASES[case][0] is False
    for result in (results[case] for results in trained):
        ours, plain = result["gradients"]
        assert ours.keys() == plain.keys() and len(ours) == 2 * 12
        for name, gradient in ours.items():
            assert torch.equal(gradient, plain[name]), name
        assert result["kept"] == WEIGHTS * keeps
        assert (RESHARDED in result["report"]) is not keeps
        assert any(RESHARDED in graph["remarks"] for graph in result["dict"]["graphs"]) is not keeps


def test_a_report_of_a_sharded_model(trained) -> None:
    """A report finds graphs by the unsharded parameters. FSDP2's hooks break the graph of the root: its own part is eager."""
    for results in trained:
        for (_, compiled, _), result in zip(CASES, results, strict=True):
            said = result["dict"]
            fp8 = {record["fqn"] for graph in said["graphs"] for record in graph["matmuls"] if record["decision"] == "fp8"}
            assert {name.rpartition(".")[2] for name in fp8} == {"up", "down"}
            assert [record["parameter"] for record in said["outside"]] == ["out.weight"]
            broken = "FSDP2's hooks break the graph of Net, and what is left of it runs eagerly"
            why = broken if compiled == "whole" else WHY_OUTSIDE
            assert f"100.0% of matmul FLOPs of what was compiled; in no compiled graph: 1 linear (out): {why}" == said[
                "summary"
            ].partition("matmuls, ")[2]
            assert said["outside"][0]["reason"] == why and result["report"].endswith(f"* {why}")


def _wrapped(rank: int) -> dict[str, str]:
    """The root is compiled by the wrapper, of which the module inside knows nothing."""
    run = torch.compile(shard(build(), True, ""), backend="fp8", options={"recipe": "tensorwise"})
    run(batch(0, rank)).sum().backward()
    return {"summary": fp8compile.report(run).summary()}


def test_what_hooks_leave_to_eager_in_a_wrapped_model(tmp_path) -> None:
    for found in on_two(tmp_path, _wrapped):
        assert found["summary"].startswith("11 of 11 matmuls")
        assert "(out): FSDP2's hooks break the graph of Net" in found["summary"]


# --- state ----------------------------------------------------------------------------------------


def step(model: nn.Module, number: int, rank: int) -> float:
    """A training step, its gradients averaged over the ranks: by FSDP2, or here for a replica. Returns this rank's loss."""
    loss = model(batch(number, rank) * (1 + number / 4)).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            if not hasattr(p.grad, "to_local"):
                dist.all_reduce(p.grad)
                p.grad /= 2
            p.detach().sub_(0.1 * p.grad)
            p.grad = None
    return loss.item()


def _state(rank: int) -> dict[str, Any]:
    """Two steps of a sharded model and of a replica; then others that go on from the state of either."""

    def replica() -> nn.Module:
        model = build()
        for block in model.blocks:
            block.compile(backend="fp8")
        return model

    def weights(model: nn.Module) -> dict[str, torch.Tensor]:
        whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
        return {name: p.detach().clone() for name, p in whole.items()}

    def load(model: nn.Module, given: dict[str, torch.Tensor]) -> None:
        for name, p in model.named_parameters():
            value = given[name]
            p.detach().copy_(distribute_tensor(value, p.device_mesh, p.placements) if hasattr(p, "device_mesh") else value)

    from torch.distributed.tensor import distribute_tensor

    found: dict[str, Any] = {}
    models = {"replica": replica(), "sharded": shard(build(), True, "blocks")}
    for name, model in models.items():
        losses = [step(model, 0, rank), step(model, 1, rank)]
        report = fp8compile.report(model)
        found[name] = {
            "losses": losses,
            "stats": fp8compile.stats(model).rows(),
            "report": sorted((r.fqn, r.gemm, r.m, r.n, r.k, r.decision, r.reason) for r in report.matmuls),
            "state": fp8compile.scaling_state(model),
            "weights": weights(model),
        }
    kept = found["sharded"]
    found["third"] = {name: step(model, 2, rank) for name, model in models.items()}
    found["resumed"] = {}
    for when in ("before fully_shard", "before the first call", "after a call", "cold"):
        torch._dynamo.reset()
        model = build()
        if when == "before fully_shard":
            fp8compile.load_scaling_state(model, kept["state"])
        shard(model, True, "blocks")
        if when == "after a call":
            step(model, 7, rank)
        load(model, kept["weights"])
        if when in ("before the first call", "after a call"):
            fp8compile.load_scaling_state(model, kept["state"])
        found["resumed"][when] = step(model, 2, rank)
    try:
        fp8compile.load_scaling_state(model, {**kept["state"], "blocks.7.up.weight.input.0": torch.zeros(40)})
    except StateError as error:
        found["error"] = str(error)
    return found


@pytest.fixture(scope="module")
def states(tmp_path_factory) -> list[dict[str, Any]]:
    return on_two(tmp_path_factory.mktemp("state"), _state)


def test_state_and_statistics_of_a_sharded_model_are_those_of_a_replica(states) -> None:
    for found in states:
        replica, sharded = found["replica"], found["sharded"]
        assert sharded["losses"] == replica["losses"] and found["third"]["sharded"] == found["third"]["replica"]
        assert sharded["state"].keys() == replica["state"].keys() and len(sharded["state"]) > 10
        for name, row in replica["state"].items():
            assert torch.equal(sharded["state"][name], row), name
        assert sharded["stats"] == replica["stats"] and len(sharded["stats"]) > 10
        assert [row[:6] for row in sharded["report"]] == [row[:6] for row in replica["report"]]


def test_a_sharded_model_goes_on_from_its_state(states) -> None:
    """To the bit, if it was loaded after `fully_shard`, which makes new parameters. Names are checked, as without FSDP2."""
    for found in states:
        expected = found["third"]["sharded"]
        resumed = found["resumed"]
        assert resumed["before the first call"] == resumed["after a call"] == expected
        assert resumed["before fully_shard"] == resumed["cold"] != expected
        assert "unexpected: blocks.7.up.weight.input.0 (the model has no blocks.7.up.weight)" in found["error"]


def _phases(rank: int) -> list[float]:
    """How far a call is from high precision, in dB, of a sharded model whose optimizer took three steps, and of one whose
    optimizer took one step. The schedule begins FP8 after two."""
    found = []
    for steps in (3, 1):
        torch._dynamo.reset()
        model, plain = shard(build(), True, "blocks", policy={"schedule": {"warmup_steps": 2}}), build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for number in range(steps):
            model(batch(number, rank)).sum().backward()
            optimizer.step()
        found.append(sqnr(plain(batch(9, rank)), model(batch(9, rank))))
    return found


def test_phases_of_sharded_models_follow_their_own_optimizers(tmp_path) -> None:
    for found in on_two(tmp_path, _phases):
        assert 20.0 < found[0] < 60.0 and found[1] > 100.0


def _classes(rank: int) -> list[tuple[set[tuple[str, str]], list[str]]]:
    """The decisions of a policy that names a class, and the classes in the report: without FSDP2, with sharded blocks, with one
    group for the whole model."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for sharded in ((), (ResidualMlp,), (Net,)):
        torch._dynamo.reset()
        model = build()
        rules = [{"module_class": "ResidualMlp", "parameter": "*up*", "fp8": "off"}]
        model.compile(backend="fp8", options={"policy": {"rules": rules}, "strict": True})
        for module in reversed(list(model.modules())):
            if isinstance(module, sharded):
                fully_shard(module)
        model(batch(0, rank)).sum().backward()
        report = fp8compile.report(model)
        mlps = [m for m in report.matmuls if m.parameter.endswith(("up.weight", "down.weight"))]
        decisions = {(m.fqn.rpartition(".")[2], m.decision) for m in mlps}
        found.append((decisions, [graph.name for graph in report.graphs if graph.matmuls]))
    return found


def test_a_policy_names_classes_as_the_user_does(tmp_path) -> None:
    """`fully_shard` makes a class of its own for each, and breaks the graph at each of its modules."""
    for plain, blocks, whole in on_two(tmp_path, _classes):
        assert plain[0] == {("up", "high_precision"), ("down", "fp8")}
        assert blocks[0] == whole[0] == plain[0]
        assert {*plain[1], *whole[1]} == {"Net, training"} and {*blocks[1]} == {"ResidualMlp, training"}


def _tensor_parallel(rank: int) -> list[dict[str, torch.Tensor]]:
    """Two steps, a saved state, and two more steps; then a second model continues from that state."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def made() -> nn.Module:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = parallelize_module(ResidualMlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        model.compile(backend="fp8")
        return model

    def step(model: nn.Module, number: int) -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(batch(number, 0) * (1 + number / 4)).square().mean().backward()
        return {name: p.grad.to_local().clone() for name, p in model.named_parameters()}

    mesh = init_device_mesh("cpu", (2,))
    first = made()
    step(first, 0), step(first, 1)
    state = fp8compile.scaling_state(first)
    expected = step(first, 2)
    second = made()
    fp8compile.load_scaling_state(second, state)
    return [state, expected, step(second, 2), fp8compile.scaling_state(second)]


def test_state_of_tensor_parallel_parameters(tmp_path) -> None:
    """Each rank has its own state, and continues from it."""
    for state, expected, got, after in on_two(tmp_path, _tensor_parallel):
        assert len(state) > 6 and after.keys() == state.keys()
        for name, gradient in expected.items():
            assert torch.equal(gradient, got[name]), name
