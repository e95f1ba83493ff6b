"""Pipelines, on two and four processes: bitwise their stages run by hand. Shape inference leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

import fp8compile
from tests.distributed.ranks import plain, whole
from tests.support.harness import noise, scaling_tensors
from tests.support.hooks import slots_of, waiting_apart
from tests.support.models import ResidualMlp
from tests.support.processes import on_ranks

pytestmark = pytest.mark.slow

STEPS, MICROBATCHES = 2, 4
# and how many stages a rank has
SCHEDULES = {
    "1F1B": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "GPipe": (ScheduleGPipe, 1),
}


def batch(step: int, replica: int) -> Tensor:
    """Inputs and targets."""
    return (1 + step) * noise(2, 32, 128, seed=10 * step + replica)


@dataclass(frozen=True)
class Case:
    """A pipeline over two ranks. `static`: the shapes of stages are given, not inferred. `parallel`: data
    parallelism within each stage, over two more ranks."""

    schedule: str
    recipe: str = "delayed"
    static: bool = False
    parallel: str = ""  # "ddp" or "fsdp"
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "1F1B": Case("1F1B"),
    "1F1B, static": Case("1F1B", "blockwise", static=True),
    "interleaved": Case("interleaved", "rowwise"),
    "GPipe": Case("GPipe", "tensorwise"),
    "over 2 x 2, fsdp": Case("1F1B", parallel="fsdp", options={"reduce_amax": "dp"}),
    # Static shapes: after an inference of shapes, DDP reduces the gradients of each microbatch of the first
    # step, without FP8 as well. The sums are then rounded in another order.
    "over 2 x 2, ddp": Case("interleaved", static=True, parallel="ddp", options={"reduce_amax": "dp"}),
}


def stage_of(number: int, case: Case, mesh: Any, parallel: bool) -> nn.Module:
    """A compiled stage; `parallel`: as the case says."""
    torch.manual_seed(number)
    module = ResidualMlp()
    options = {"recipe": case.recipe, **case.options}
    if case.options.get("reduce_amax") == "dp" and not (parallel and case.parallel == "fsdp"):
        options["reduce_amax"] = (mesh, "dp")  # parameters that are on no mesh
    module.compile(backend="fp8", options=options)
    if parallel and case.parallel == "fsdp":
        fully_shard(module, mesh=mesh["dp"])
    if parallel and case.parallel == "ddp":
        return DistributedDataParallel(module, process_group=mesh.get_group("dp"))
    return module


@contextmanager
def garbage() -> Iterator[None]:
    """Uninitialised memory, on which a pipeline runs stages to infer shapes, is full of large numbers."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: (
            x.fill_(1e30) if (x := make(*args, **kwargs)).dtype == torch.float32 else x
        )

    names = ("empty_strided", "empty")
    with mock.patch.multiple(torch, **{name: filled(getattr(torch, name)) for name in names}):
        yield


def watched(stage: PipelineStage) -> list[tuple[str, int]]:
    """The forwards and backwards of a stage, with their microbatches, as they run."""
    seen: list[tuple[str, int]] = []
    for kind in ("forward", "backward"):
        original = getattr(stage, f"{kind}_one_chunk")

        def run(number: int, *args: Any, kind: str = kind, original: Any = original, **kwargs: Any) -> Any:
            seen.append((kind, number))
            return original(number, *args, **kwargs)

        setattr(stage, f"{kind}_one_chunk", run)
    return seen


def by_hand(
    stages: list[nn.Module],
    orders: list[list[tuple[str, int]]],
    x: Tensor,
    target: Tensor,
    apart: dict[int, Any],
) -> None:
    """One step in one process, each stage in its order. A stage waits for what it reads. `apart`: what waits
    on each of the two ranks."""
    made: dict[tuple[str, int, int], Any] = {
        ("forward", -1, i): part for i, part in enumerate(x.chunk(MICROBATCHES))
    }
    leaves: dict[tuple[int, int], Tensor] = {}
    wanted, last, todo = target.chunk(MICROBATCHES), len(stages) - 1, [list(order) for order in orders]
    while any(todo):
        ready = [
            s
            for s, order in enumerate(todo)
            if order and (order[0][0], s - 1 if order[0][0] == "forward" else s + 1, order[0][1]) in made
        ]
        assert ready, todo
        for s in ready:
            kind, i = todo[s].pop(0)
            with waiting_apart(apart, s % 2):
                if kind == "forward":
                    leaves[s, i] = made["forward", s - 1, i].detach().requires_grad_(s > 0)
                    y = made["forward", s, i] = stages[s](leaves[s, i])
                else:
                    torch.autograd.backward(made["forward", s, i], made["backward", s + 1, i])
                    made["backward", s, i] = leaves[s, i].grad
            if kind == "forward" and s == last:
                made["backward", s + 1, i] = torch.ones(())
                made["forward", s, i] = F.mse_loss(y, wanted[i])
    for stage in stages:
        for p in stage.parameters():
            assert p.grad is not None
            p.grad.div_(MICROBATCHES)


def trained(model: nn.Module) -> list[tuple[str, str, str]]:
    """The decisions about a model. An inference of shapes may have compiled an evaluation, too."""
    graphs = [graph for graph in fp8compile.report(model).graphs if not graph.note]
    return [(record.fqn, record.gemm, record.decision) for graph in graphs for record in graph.matmuls]


def _pipeline(rank: int, case: Case) -> dict[str, Any]:
    """A case, and the same stages by hand: which gradients differ, the states, and what the reports say."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("pp", "dp"))
    here, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    torch._dynamo.reset()
    kind, per_rank = SCHEDULES[case.schedule]
    count = 2 * per_rank
    mine = {number: stage_of(number, case, mesh, True) for number in range(here, count, 2)}
    stages = []
    for number, module in mine.items():
        ends = (torch.zeros(8, 128, requires_grad=grad) for grad in (number > 0, True))
        given = dict(zip(("input_args", "output_args"), [(end,) for end in ends], strict=True))
        how = {"group": mesh.get_group("pp"), **(given if case.static else {})}
        stages.append(PipelineStage(module, number, count, torch.device("cpu"), **how))
    schedule = kind(stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=F.mse_loss)  # type: ignore[arg-type]
    orders = [watched(stage) for stage in stages]
    twins = [stage_of(number, case, mesh, False) for number in range(count)]
    wrong, apart = [], dict[int, Any]()
    for step in range(STEPS):
        x, target = batch(step, replica)
        for module in (*mine.values(), *twins):
            module.zero_grad()
        for order in orders:
            order.clear()
        with garbage():
            ends = [x] if here == 0 else []
            schedule.step(*ends, **({"target": target} if here == 1 else {}))
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, {number: order for number, order in zip(mine, orders, strict=True)})
        ran = {number: order for one in every for number, order in one.items()}
        by_hand(twins, [ran[number] for number in range(count)], x, target, apart)
        for number, module in mine.items():
            expected = dict(twins[number].named_parameters())
            for name, p in module.named_parameters():
                ours, theirs = p.grad, expected[plain(name)].grad
                if case.parallel:
                    dist.all_reduce(theirs, group=mesh.get_group("dp"))
                    theirs = theirs / 2
                ours = whole(ours)
                if not torch.equal(ours, theirs):
                    wrong.append((step, number, name, (ours - theirs).abs().max().item()))
    pairs = [(module, twins[number]) for number, module in mine.items()]
    states = [[scaling_tensors(model) for model in pair] for pair in pairs]
    decisions = [[trained(model) for model in pair] for pair in pairs]
    amaxes = [slot.history() for module in mine.values() for slot in slots_of(module).values()]
    return {"wrong": wrong, "states": states, "decisions": decisions, "amaxes": amaxes, "orders": orders}


def check(found: dict[str, Any], case: Case) -> None:
    """Gradients and state are those of the stages by hand. A history has an amax each time that a microbatch
    came while none waited."""
    every = sorted((kind, i) for kind in ("forward", "backward") for i in range(MICROBATCHES))
    assert all(sorted(order) == every for order in found["orders"])
    assert not found["wrong"], found["wrong"][:5]
    for ours, expected in found["states"]:
        assert ours.keys() == expected.keys() and (len(ours) > 6) is (case.recipe == "delayed")
        for name, row in expected.items():
            assert torch.equal(ours[name], row), name
    for ours, expected in found["decisions"]:
        assert ours == expected, (ours, expected)
        assert {decision for *_, decision in ours} == {"fp8"}
    assert all(max(history) < 1e3 for history in found["amaxes"])
    moves = {sum(amax > 0 for amax in history) for history in found["amaxes"]}
    for order in found["orders"] if len(found["orders"]) == 1 and moves else []:
        waiting = [sum(1 if kind == "forward" else -1 for kind, _ in order[:i]) for i in range(len(order))]
        alone = sum(count == 0 for count, (kind, _) in zip(waiting, order, strict=True) if kind == "forward")
        assert moves == {STEPS * alone}


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_is_its_stages_by_hand(name: str) -> None:
    """From the first step on. A pipeline infers shapes by running each stage on uninitialised memory: these
    runs do not move histories, and do not count as the first, cold calls. Data parallel stages are their
    replicas by hand."""
    case = CASES[name]
    for found in on_ranks(4 if case.parallel else 2, _pipeline, case):
        check(found, case)


def _reduced_over_all(rank: int) -> None:
    run = torch.compile(ResidualMlp(), backend="fp8", options={"reduce_amax": True})
    stage = PipelineStage(run, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)
    x = torch.randn(32, 128)
    schedule.step(x) if rank == 0 else schedule.step(target=x)


def test_all_ranks_of_a_pipeline_are_refused() -> None:
    """The first stage raises, so its process ends. No process hangs."""
    with pytest.raises(AssertionError, match="the ranks that share a pipeline stage") as failed:
        on_ranks(2, _reduced_over_all)
    assert "0 of 2 processes hang" in str(failed.value)
