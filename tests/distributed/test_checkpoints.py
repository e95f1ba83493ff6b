"""Scaling state through torch.distributed.checkpoint: a run goes on bitwise on as many ranks, and on others
where it can."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fp8compile
from fp8compile.errors import StateError
from fp8compile.ir.state_page import (
    HISTORY,
    ODD,
    SlotSettings,
    merged,
    new_amaxes,
    new_page,
    next_page,
    raised,
)
from tests.distributed.ranks import Way, build, parallel
from tests.support.harness import scaling_tensors
from tests.support.models import ResidualMlp
from tests.support.processes import on_ranks

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
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(10 * step + rank))
    return x * (1 + step / 4) * (1 + rank)


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


class Run:
    """A model on these ranks, trained by plain SGD."""

    def __init__(self, kind: str, rank: int, **options: Any) -> None:
        torch._dynamo.reset()
        self.rank, self.data, self.schedule, ranks = rank, rank, None, dist.get_world_size()
        self.model: nn.Module = Net((rank,)) if kind == "pp" else build("mlps")
        if kind == "pp":
            run = torch.compile(self.model, backend="fp8", options=options)
            self.schedule: Any = Schedule1F1B(
                PipelineStage(run, rank, ranks, torch.device("cpu")), ranks, loss_fn=loss_of
            )
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
            found[name] = (p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad).clone()
            p.detach().sub_(0.1 * p.grad)
            p.grad = None
        return found

    def checkpoint(self, **how: Any) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "scaling": fp8compile.ScalingState(self.model, **how)}


def resume(
    rank: int, folder: str, kind: str, whens: tuple[str, ...] = ("before the first call",)
) -> dict[str, Any]:
    """Two steps, a checkpoint, two more; and others that go on from it."""
    first = Run(kind, rank)
    first.step(0), first.step(1)
    dcp.save(first.checkpoint(), checkpoint_id=f"{folder}/{kind}")
    state = scaling_tensors(first.model)
    found: dict[str, Any] = {"state": state, "expected": [first.step(2), first.step(3)]}
    for when in whens:
        other = Run(kind, rank)
        if when == "after a call":
            other.step(7)
        saved = other.checkpoint()
        if when == "cold":
            del saved["scaling"]
        dcp.load(saved, checkpoint_id=f"{folder}/{kind}")
        other.model.load_state_dict(saved["model"])
        if when == "before the first call":
            loaded = scaling_tensors(other.model)
            found["same"] = [name for name in state if torch.equal(loaded[name], state[name])]
        found[when] = [other.step(2), other.step(3)] if when != "cold" else [other.step(2)]
    return found


def _on_four(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"resumed": resume(rank, folder, "fsdp x tp")}
    found["fsdp x tp"] = found["resumed"]["state"]
    for name, options in (("fsdp", {}), ("reduced", {"reduce_amax": True})):  # with it, all have one state
        run = Run("fsdp", rank, **options)
        run.step(0), run.step(1)
        dcp.save({"scaling": fp8compile.ScalingState(run.model)}, checkpoint_id=f"{folder}/four {name}")
        found[name] = scaling_tensors(run.model)
    return found


def _on_two(rank: int, folder: str) -> dict[str, Any]:
    """Each kind goes on; then the states that these ranks have of the checkpoints of four, or the errors."""
    every = ("before the first call", "after a call", "cold")
    ways = {"ddp": every[:1], "fsdp": every, "tp": every[:1], "pp": every[:1]}
    found: dict[str, Any] = {kind: resume(rank, folder, kind, ways[kind]) for kind in KINDS[:-1]}

    def load(key: str, name: str, run: Run, strict: bool = True) -> None:
        try:
            dcp.load(
                {"scaling": fp8compile.ScalingState(run.model, strict=strict)},
                checkpoint_id=f"{folder}/{name}",
            )
            found[key] = scaling_tensors(run.model)
        except StateError as error:
            found[key] = str(error)

    reduced = Run("fsdp", rank, reduce_amax=True)
    load("four: fsdp", "four fsdp", reduced)
    reduced.step(2)  # takes what was loaded
    load("four: reduced", "four reduced", reduced)
    load("four: ddp", "four fsdp", Run("ddp", rank))
    load("four: tp", "fsdp x tp", Run("tp", rank))
    whole = Run("ddp", rank)
    load("four: no tp", "fsdp x tp", whole)
    load("four: what fits", "fsdp x tp", whole, strict=False)
    load("four: stages", "four fsdp", Run("pp", rank))
    whole.model = Net((rank + 1,))  # nobody has layer 0
    load("four: other stages", "four fsdp", whole)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """On four ranks, and on two."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return on_ranks(4, _on_four, str(folder)), on_ranks(2, _on_two, str(folder))


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_to_the_bit(found, kind: str) -> None:
    """Also before the first call, where a rank has no slots yet. Ranks have states of their own."""
    four, two = found
    results = [one["resumed"] for one in four] if kind == KINDS[-1] else [one[kind] for one in two]
    for result in results:
        assert result["same"] == list(result["state"]) and len(result["state"]) > 6
        for when in ("before the first call", "after a call"):
            for expected, got in zip(result["expected"], result.get(when, result["expected"]), strict=True):
                assert all(torch.equal(gradient, got[name]) for name, gradient in expected.items()), when
        expected, cold = result["expected"][0], result.get("cold", [None])[0]
        assert cold is None or not all(
            torch.equal(gradient, cold[name]) for name, gradient in expected.items()
        )
    first, second = (result["state"] for result in results[:2])
    assert first.keys() != second.keys() or any(not torch.equal(first[name], second[name]) for name in first)


# -- other numbers of ranks --


def histories(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: row[HISTORY:-1] for name, row in state.items() if name != "fp8compile.version"}


def largest(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    every = [histories(state) for state in states]
    return {name: torch.stack([one[name] for one in every]).amax(0) for name in every[0]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp", "reduced", "tp", "stages"])
def test_on_other_ranks(found, kind: str) -> None:
    """From four ranks to two, each takes the largest amax of each call, of those that had its part of the
    weights: 2 x 2 ranks to 1 x 2. The layers of a model on all ranks become stages. What is one for all stays
    what it is, to the last column."""
    saved, loaded = found
    for rank, one in enumerate(loaded):
        state = one[f"four: {kind}"]
        assert not isinstance(state, str), state
        given = [four[{"tp": "fsdp x tp", "reduced": "reduced"}.get(kind, "fsdp")] for four in saved]
        expected = largest(given[rank::2] if kind == "tp" else given)
        if kind == "stages":
            expected = {name: row for name, row in expected.items() if f"blocks.{rank}." in name}
        got = histories(state)
        assert got.keys() == expected.keys() and len(got) > 3
        assert all(torch.equal(history, expected[name]) for name, history in got.items())
        if kind == "reduced":
            assert all(torch.equal(row, state[name]) for name, row in given[0].items())
        else:
            assert any(
                not torch.equal(given[0][name], given[1][name]) for name in given[0].keys() & given[1].keys()
            )


@pytest.mark.slow
def test_what_does_not_fit_is_an_error_on_all_ranks(found) -> None:
    part = (
        "blocks.0.up.weight: the ranks that saved it had [0:128, 0:128] of [256, 128] or "
        "[128:256, 0:128] of [256, 128]"
    )
    for one in found[1]:
        assert f"{part}; this one has all of it" in one["four: no tp"]
        assert "on ranks [0, 1]" in one["four: no tp"]
        assert list(one["four: what fits"]) == ["fp8compile.version"]
        assert "unexpected: blocks.0.up.weight (no rank has it)" in one["four: other stages"]


# -- one process --


def trained(**options: Any) -> Net:
    model = Net()
    model.compile(backend="fp8", options=options)
    for step in range(2):
        model(batch(step, 0)).square().mean().backward()
    return model


def test_without_a_process_group(tmp_path: Path, interpreted: None, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint of other options, of another model, or without scaling state changes nothing."""
    model = trained()
    dcp.save({"scaling": fp8compile.ScalingState(model)}, checkpoint_id=tmp_path / "whole")
    other = Net()
    dcp.load({"scaling": fp8compile.ScalingState(other)}, checkpoint_id=tmp_path / "whole")
    state, loaded = scaling_tensors(model), scaling_tensors(other)
    assert state.keys() == loaded.keys() and all(
        torch.equal(row, loaded[name]) for name, row in state.items()
    )

    another = Net((0, 7))
    with pytest.raises(StateError, match=r"unexpected: blocks.1.up.weight \(no rank has it\)"):
        dcp.load({"scaling": fp8compile.ScalingState(another, strict=True)}, checkpoint_id=tmp_path / "whole")
    assert len(scaling_tensors(another)) == 1
    with caplog.at_level(logging.WARNING, "fp8compile"):
        dcp.load({"scaling": fp8compile.ScalingState(another)}, checkpoint_id=tmp_path / "whole")
    assert "unexpected: blocks.1.up.weight (no rank has it)" in caplog.text
    assert "(model, strict=True)" in caplog.text
    assert len(scaling_tensors(another)) > 1

    kept = fp8compile.ScalingState(model)
    saved = kept.state_dict()
    model(batch(2, 0)).square().mean().backward()
    assert not all(torch.equal(row, state[name]) for name, row in scaling_tensors(model).items())
    kept.load_state_dict(saved)  # also by the object that made it
    assert all(torch.equal(row, state[name]) for name, row in scaling_tensors(model).items())

    torch._dynamo.reset()
    model = trained(amax_history_len=4)
    before = scaling_tensors(model)
    with pytest.raises(StateError, match=r"blocks.0.up.weight.input.0: amaxes that are kept .* 16, here 4"):
        dcp.load({"scaling": fp8compile.ScalingState(model, strict=True)}, checkpoint_id=tmp_path / "whole")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "without")
    with pytest.raises(dcp.api.CheckpointException, match="scaling.ranks"):
        dcp.load({"scaling": fp8compile.ScalingState(model)}, checkpoint_id=tmp_path / "without")
    with caplog.at_level(logging.WARNING, "fp8compile"):
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(
            {"scaling": fp8compile.ScalingState(model)}, checkpoint_id=tmp_path / "without", planner=planner
        )
    assert "no scaling state" in caplog.text
    assert all(torch.equal(row, before[name]) for name, row in scaling_tensors(model).items())


def test_several_modules() -> None:
    """The stages that a rank has in an interleaved pipeline."""
    fp8compile.ScalingState([Net((0,)), Net((3,))])
    whole = {"fp8compile.version": torch.tensor([1]), "blocks.7.up.weight.input.0": torch.ones(28)}
    with pytest.raises(StateError, match="unexpected: blocks.7.up.weight.input.0"):
        fp8compile.ScalingState([Net((0,)), Net((3,))], strict=True).load_state_dict(whole)
    with pytest.raises(StateError, match=r"two of the modules have a 'blocks.0.up.weight'"):
        fp8compile.ScalingState([Net((0,)), Net((0, 3))])


# -- the rule --


@pytest.mark.parametrize("interval", [1, 3])
def test_merged_rows_cover_what_each_covers(interval: int) -> None:
    """The merged scale is the one that the merged history gives; equal rows stay as they are; an overflow is
    not forgotten."""
    settings = SlotSettings(448.0, 4, interval, 896.0)
    cpu = torch.device("cpu")

    def after(page: torch.Tensor, amaxes: list[float]) -> torch.Tensor:
        seen = raised(new_amaxes(3, cpu), [torch.tensor(amaxes)], [0])
        return next_page(page, seen, torch.arange(3))

    page = new_page(3, 4, cpu, [settings] * 3)
    for amaxes in ([1.0, 2.0, 0.0], [3.0, 0.5, 0.0], [0.25, 2.5, 0.0]):
        page = after(page, amaxes)
    one = merged(page)
    assert one[HISTORY:].tolist() == [2.5, 3.0, 2.0, 0.0]
    assert one[0] == page[:2, 0].min() and one[1] == page[:2, 1].max() and one[2] == page[:2, 2].max()
    if interval == 1:
        assert torch.isclose(one[0], torch.tensor(448.0 / 3.0))
    for row in page:
        assert torch.equal(merged(torch.stack([row, row])), row)
    assert torch.equal(merged(page[2:]), page[2])
    overflowed = after(page, [100.0, 0.5, 0.0])
    assert overflowed[:, ODD].tolist() == [1, 0, 0] and merged(overflowed)[ODD] == 1
    assert merged(overflowed)[0] == overflowed[0, 0]
