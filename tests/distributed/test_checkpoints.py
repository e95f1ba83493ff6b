"""Scaling state through DCP: a run goes on bitwise on as many ranks, and cold on others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fp8compile
from fp8compile.errors import StateError
from fp8compile.features.delayed.checkpoint import LEAVE_OUT
from fp8compile.features.delayed.state_page import Rows
from tests.distributed.ranks import Way, build, local, parallel
from tests.support.harness import noise, scaling_tensors
from tests.support.models import ResidualMlp
from tests.support.processes import on_ranks, warnings

KINDS = ("ddp", "fsdp", "tp", "pp", "fsdp x tp")


class Net(nn.Module):
    """Some of the blocks of a model, under the names that they have in it."""

    def __init__(self, blocks: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict()
        for i in blocks:
            torch.manual_seed(i)
            self.blocks[str(i)] = ResidualMlp()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


def batch(step: int, rank: int) -> Tensor:
    return noise(32, 128, seed=10 * step + rank) * (1 + step / 4) * (1 + rank)


class Run:
    """A model on these ranks, trained by plain SGD."""

    def __init__(self, kind: str, rank: int, **options: Any) -> None:
        torch._dynamo.reset()
        self.rank, self.data, self.schedule, ranks = rank, rank, None, dist.get_world_size()
        self.model: nn.Module = Net((rank,)) if kind == "pp" else build("mlps")
        if kind == "pp":
            run = torch.compile(self.model, backend="fp8", options=options)
            stage = PipelineStage(run, rank, ranks, torch.device("cpu"))
            self.schedule: Any = Schedule1F1B(stage, ranks, loss_fn=F.mse_loss)
        else:
            mesh = (ranks // 2, 2) if kind == "fsdp x tp" else ()
            self.run, self.data = parallel(self.model, Way(kind, options, mesh=mesh))

    def step(self, number: int) -> dict[str, Tensor]:
        """The gradients of one step, as this rank has them."""
        if self.schedule is not None:
            x, target = batch(number, 0), batch(100 + number, 0)
            self.schedule.step(x) if self.rank == 0 else self.schedule.step(target=target)
        else:
            self.run(batch(number, self.data)).square().mean().backward()
        found = {}
        for name, p in self.model.named_parameters():
            assert p.grad is not None
            found[name] = local(p.grad).clone()
            p.detach().sub_(0.1 * p.grad)
            p.grad = None
        return found

    def checkpoint(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "scaling": fp8compile.ScalingState(self.model)}


def equal(x: dict[str, Tensor], y: dict[str, Tensor]) -> bool:
    return x.keys() == y.keys() and all(torch.equal(tensor, y[name]) for name, tensor in x.items())


def resume(rank: int, folder: str, kind: str) -> dict[str, Any]:
    """Two steps, a checkpoint, two more; and another run that goes on from it."""
    first = Run(kind, rank)
    first.step(0), first.step(1)
    dcp.save(first.checkpoint(), checkpoint_id=f"{folder}/{kind}")
    state, expected = scaling_tensors(first.model), [first.step(2), first.step(3)]
    other = Run(kind, rank)
    saved = other.checkpoint()
    dcp.load(saved, checkpoint_id=f"{folder}/{kind}")
    other.model.load_state_dict(saved["model"])
    loaded = scaling_tensors(other.model)
    return {"state": state, "same": equal(state, loaded), "steps": [expected, [other.step(2), other.step(3)]]}


def _on_two(rank: int, folder: str) -> dict[str, Any]:
    """Each kind goes on; then the warnings and errors of a run that loads what other ranks have saved."""
    found: dict[str, Any] = {kind: resume(rank, folder, kind) for kind in KINDS[:-1]}
    run, said = Run("fsdp", rank), warnings()
    run.step(0)
    for kind in ("fsdp x tp", "tp", "pp", "ddp"):
        before, errors = scaling_tensors(run.model), []
        said.clear()
        for strict in (True, False):
            saved = {"scaling": fp8compile.ScalingState(run.model, strict=strict)}
            try:
                dcp.load(saved, checkpoint_id=f"{folder}/{kind}")
            except StateError as error:
                errors.append(str(error))
                assert equal(before, scaling_tensors(run.model))
        found[f"from {kind}"] = [*said], errors, scaling_tensors(run.model)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """On four ranks, and on two."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return on_ranks(4, resume, str(folder), KINDS[-1]), on_ranks(2, _on_two, str(folder))


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_to_the_bit(found, kind: str) -> None:
    """Also before the first call, where a rank has no slots yet. Ranks have states of their own."""
    results = found[0] if kind == KINDS[-1] else [one[kind] for one in found[1]]
    for result in results:
        assert result["same"] and len(result["state"]) > 6
        assert all(map(equal, *result["steps"]))
    assert not equal(results[0]["state"], results[1]["state"])


@pytest.mark.slow
def test_what_other_ranks_have_saved(found) -> None:
    """On another number of ranks all starts cold, and so does a part of another shape; `strict`: an error on
    all ranks. Where FSDP2 has all of a parameter, so has DDP."""
    number = "this scaling state is of another number of ranks (4, here 2)"
    part = "blocks.0.up.weight: this rank had [128, 128] when it was saved, and now has all of it"
    for rank, one in enumerate(found[1]):
        for kind, warning in (("fsdp x tp", f"fp8: {number}: the run starts cold"), ("tp", part)):
            said, _, state = one[f"from {kind}"]
            rows = [row for row in state.values() if row.numel() > 1]
            assert warning in said[0] and len(rows) > 6 and all(Rows(row).cold for row in rows)
        assert len(one["from fsdp x tp"][0]) == 1
        assert one["from fsdp x tp"][1] == [f"on ranks [0, 1]: {number}. Load it on as many, or {LEAVE_OUT}"]
        assert len(one["from tp"][1]) == 1 and "on ranks [0, 1]" in one["from tp"][1][0]
        assert f"missing: blocks.{1 - rank}.up.weight.input.0" in one["from pp"][0][0]
        said, errors, state = one["from ddp"]
        assert not said and not errors and equal(state, one["ddp"]["state"])


# -- one process --


def test_without_a_process_group(tmp_path: Path, interpreted: None, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint of another model, or without scaling state, changes nothing."""
    model = Net()
    model.compile(backend="fp8")
    model(batch(0, 0)).square().mean().backward()
    dcp.save({"scaling": fp8compile.ScalingState(model)}, checkpoint_id=tmp_path / "whole")
    other = Net()
    dcp.load({"scaling": fp8compile.ScalingState(other)}, checkpoint_id=tmp_path / "whole")
    state = scaling_tensors(model)
    assert equal(state, scaling_tensors(other))

    another = Net((0, 7))
    unexpected = "unexpected: blocks.1.up.weight.input.0 (the model has no blocks.1.up.weight)"
    with pytest.raises(StateError, match=re.escape(unexpected)):
        dcp.load({"scaling": fp8compile.ScalingState(another, strict=True)}, checkpoint_id=tmp_path / "whole")
    assert len(scaling_tensors(another)) == 1
    dcp.load({"scaling": fp8compile.ScalingState(another)}, checkpoint_id=tmp_path / "whole")
    assert unexpected in caplog.text and "(model, strict=True)" in caplog.text
    assert len(scaling_tensors(another)) > 1

    kept = fp8compile.ScalingState(model)
    saved = kept.state_dict()
    model(batch(2, 0)).square().mean().backward()
    assert not equal(state, scaling_tensors(model))
    kept.load_state_dict(saved)  # also by the object that made it
    assert equal(state, scaling_tensors(model))

    without = {"checkpoint_id": tmp_path / "without"}
    dcp.save({"model": model.state_dict()}, **without)
    with pytest.raises(dcp.api.CheckpointException, match="scaling.ranks"):
        dcp.load({"scaling": fp8compile.ScalingState(model)}, **without)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"scaling": fp8compile.ScalingState(model)}, **without, planner=planner)
    assert "no scaling state" in caplog.text and equal(state, scaling_tensors(model))


def test_several_modules() -> None:
    """The stages that a rank has in an interleaved pipeline."""
    fp8compile.ScalingState([Net((0,)), Net((3,))])
    whole = {"fp8compile.version": torch.tensor([1]), "blocks.7.up.weight.input.0": torch.ones(28)}
    with pytest.raises(StateError, match="unexpected: blocks.7.up.weight.input.0"):
        fp8compile.ScalingState([Net((0,)), Net((3,))], strict=True).load_state_dict(whole)
    with pytest.raises(StateError, match=r"two of the modules have a 'blocks.0.up.weight'"):
        fp8compile.ScalingState([Net((0,)), Net((0, 3))])
