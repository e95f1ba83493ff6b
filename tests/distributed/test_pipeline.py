"""Pipelines and process groups, on two processes: shape inference leaves no trace, amaxes of different graphs never meet."""

from __future__ import annotations

import copy
import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fp8compile
from fp8compile.runtime.state import slots_of
from tests.support.harness import interpreted
from tests.support.models import ResidualMlp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
MICROBATCHES = 4


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def in_two_processes(worker, *args) -> None:
    context = torch.multiprocessing.spawn(worker, args, nprocs=2, join=False)
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=200)
    try:
        while not context.join(timeout=5):
            assert datetime.datetime.now() < deadline, "the processes hang"
    finally:
        for process in context.processes:
            process.kill()


def start(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timeout)


def _pipeline(rank: int, folder: str, static: bool) -> None:
    """Two steps of a stage. Its real inputs are small; uninitialised memory is filled with large numbers."""
    start(rank, folder)
    torch.manual_seed(rank)
    stage_module = ResidualMlp()
    twin = copy.deepcopy(stage_module)
    torch.save(twin.state_dict(), f"{folder}/weights{rank}")
    real = torch.empty_strided, torch.empty

    def full_of_garbage(make):
        return lambda *args, **kwargs: x.fill_(1e30) if (x := make(*args, **kwargs)).dtype == torch.float32 else x

    before, behind = (torch.zeros(8, 128, requires_grad=grad) for grad in (rank == 1, True))
    shapes = {"input_args": (before,), "output_args": (behind,)} if static else {}
    with interpreted():
        run = torch.compile(stage_module, backend="fp8")
        stage = PipelineStage(run, rank, 2, torch.device("cpu"), **shapes)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
        grads = []
        for step in range(2):
            stage_module.zero_grad()
            torch.manual_seed(10 + step)
            x, target = torch.randn(2, 32, 128)
            torch.empty_strided, torch.empty = map(full_of_garbage, real)
            try:
                schedule.step(x) if rank == 0 else schedule.step(target=target)
            finally:
                torch.empty_strided, torch.empty = real
            grads.append({name: p.grad.clone() for name, p in stage_module.named_parameters()})
    torch.save((grads, {key: slot.history() for key, slot in slots_of(stage_module).items()}), f"{folder}/stage{rank}")
    dist.destroy_process_group()


@pytest.mark.parametrize("static", [False, True])
def test_a_pipeline_is_right_from_the_first_step(tmp_path: Path, static: bool) -> None:
    """A pipeline infers shapes by running each stage on uninitialised memory. These runs must not move histories, and must not
    count as the first, cold calls. With static shapes or not, gradients are those of the stages in one process."""
    in_two_processes(_pipeline, str(tmp_path), static)
    stages = []
    for rank in range(2):
        stages.append(ResidualMlp())
        stages[rank].load_state_dict(torch.load(tmp_path / f"weights{rank}"))
    for step in range(2):
        torch.manual_seed(10 + step)
        x, target = torch.randn(2, 32, 128)
        for stage in stages:
            stage.zero_grad()
        for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            (loss_of(stages[1](stages[0](part)), wanted) / MICROBATCHES).backward()
        for rank, stage in enumerate(stages):
            grads, histories = torch.load(tmp_path / f"stage{rank}")
            for name, p in stage.named_parameters():
                assert torch.cosine_similarity(p.grad.flatten(), grads[step][name].flatten(), 0) > 0.98, (rank, step, name)
            assert histories and all(max(history) < 1e3 for history in histories.values())
            assert all(sum(amax > 0 for amax in history) == 2 * MICROBATCHES for history in histories.values())


def _reduced_over_all(rank: int, folder: str) -> None:
    start(rank, folder)
    stage_module = ResidualMlp()
    with interpreted():
        run = torch.compile(stage_module, backend="fp8", options={"reduce_amax": True})
        stage = PipelineStage(run, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
        x = torch.randn(32, 128)
        try:
            schedule.step(x) if rank == 0 else schedule.step(target=x)
        except Exception as error:
            Path(f"{folder}/error{rank}").write_text(f"{error} {error.__cause__}")  # torch may have wrapped it


def test_all_ranks_of_a_pipeline_are_refused(tmp_path: Path) -> None:
    in_two_processes(_reduced_over_all, str(tmp_path))
    assert "the ranks that share a pipeline stage" in (tmp_path / "error0").read_text()


def _different_experts(rank: int, folder: str) -> None:
    start(rank, folder)
    model = nn.ModuleDict({f"expert{rank}": nn.Linear(128, 128)})
    with interpreted():
        run = torch.compile(lambda x: model[f"expert{rank}"](x), backend="fp8", options={"reduce_amax": True})
        try:
            run(torch.randn(16, 128)).sum().backward()
        except fp8compile.Fp8CompileError as error:
            Path(f"{folder}/error{rank}").write_text(str(error))


def test_ranks_with_different_graphs_are_refused(tmp_path: Path) -> None:
    in_two_processes(_different_experts, str(tmp_path))
    for rank in range(2):
        assert f"ranks [{1 - rank}]" in (tmp_path / f"error{rank}").read_text()


def _groups(rank: int, folder: str, by_name: bool) -> None:
    """Each rank has its own group; then both use a common one."""
    start(rank, folder)
    own, both = [dist.new_group([i]) for i in range(2)][rank], dist.new_group([0, 1])
    found = []
    for group in (own, both):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Linear(128, 128)
        with interpreted():
            given = group.group_name if by_name else group
            run = torch.compile(model, backend="fp8", options={"reduce_amax": given})
            run(torch.full((16, 128), 1.0 + rank)).sum().backward()
        found.append(slots_of(model)["weight", "input", 0].history()[0])
    torch.save(found, f"{folder}/found{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("by_name", [False, True])
def test_amaxes_are_reduced_over_a_group(tmp_path: Path, by_name: bool) -> None:
    in_two_processes(_groups, str(tmp_path), by_name)
    assert [torch.load(tmp_path / f"found{rank}") for rank in range(2)] == [[1.0, 2.0], [2.0, 2.0]]


def test_a_group_that_is_none() -> None:
    with pytest.raises(fp8compile.OptionError, match="reduce_amax"):
        fp8compile.Recipe(reduce_amax="")
