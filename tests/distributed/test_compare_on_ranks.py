"""compare() and monitor(compare_every=...) of a model under DDP, on two ranks or on one of them alone: none
waits for another, and the training goes on bitwise. A model that FSDP2 has sharded is refused, also on one
rank alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fp8compile
from fp8compile.errors import OptionError
from tests.support.harness import noise, scaling_tensors
from tests.support.hooks import keep_scale, slots_of
from tests.support.models import Mlp
from tests.support.processes import on_ranks, warnings

STEPS = 3


class Net(nn.Module):
    """With buffers, which DDP sends to all ranks before each forward, and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.unused = nn.BatchNorm1d(128), Mlp(), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


def to_one(y: Tensor) -> Tensor:
    return (y - 1).square().mean()


def batch(step: int, rank: int) -> Tensor:
    return noise(16, 128, seed=10 * step + rank)


class Run:
    """A model under DDP, compiled, whose ranks share their amaxes."""

    def __init__(self, rank: int):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.rank, self.net = rank, Net()
        self.ddp = DistributedDataParallel(self.net, find_unused_parameters=True)
        rule = {"module": "*.up", "reduce_amax": True}
        policy = {"rules": [rule], "defaults": {"reduce_amax": True}}
        self.compiled = torch.compile(self.ddp, backend="fp8", options={"policy": policy})
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-2)

    def compared(self, how: str, step: int) -> fp8compile.Comparison:
        ddp = self.ddp
        ways: dict[str, Callable[..., Any]] = {"ddp": ddp, "compiled": self.compiled, "module": self.net}
        return fp8compile.compare(ways.get(how, lambda x: ddp(x)), batch(step, self.rank), loss=to_one)

    def train(self, how: str | None = None, steps: int = STEPS) -> tuple[Any, list[fp8compile.Comparison]]:
        """Losses and the state at the end; comparisons, if `how` says so: in turn between forward and
        backward, between backward and step, and after the step."""
        losses, seen = [], []
        for step in range(steps):
            loss = to_one(self.compiled(batch(step, self.rank)))
            seen += [self.compared(how, step)] if how and step % 3 == 0 else []
            loss.backward()
            seen += [self.compared(how, step)] if how and step % 3 == 1 else []
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen += [self.compared(how, step)] if how and step % 3 == 2 else []
            losses.append(loss.item())
        return (losses, {**self.net.state_dict(), **scaling_tensors(self.net)}), seen


def same(ends: Any, others: Any) -> bool:
    """To the bit."""
    return ends[0] == others[0] and all(torch.equal(x, ends[1][name]) for name, x in others[1].items())


def _compare(rank: int) -> dict[str, Any]:
    """By a function on both ranks, then on rank 1 alone: also in the first call of all, where nothing is
    compiled, and no rank has agreed with another."""
    warned = warnings()
    plain, _ = Run(rank).train()
    run = Run(rank)
    ends, both = run.train("function")
    kept = [same(ends, plain), "forward" not in vars(run.ddp)]
    run = Run(rank)
    if rank == 1:
        run.compared("ddp", 0)
    ends, alone = run.train("ddp" if rank == 1 else None)
    kept += [same(ends, plain), "forward" not in vars(run.ddp)]
    seen = [[(one.to_dict(), one.summary()) for one in found] for found in (both, alone)]
    return {"kept": kept, "both": seen[0], "alone": seen[1], "warned": warned}


@pytest.mark.weekly
def test_a_rank_compares_its_own_batch() -> None:
    names = {name for name, _ in Net().named_parameters()} - {"unused"}
    ranks = on_ranks(2, _compare)
    for rank, found in enumerate(ranks):
        assert all(found["kept"]) and not found["warned"] and len(found["both"]) == STEPS
        for one, text in found["both"]:
            assert one["rank"] == rank and one["deterministic"] and one["flagged"] == []
            assert f" on rank {rank}: loss" in text
            assert {row["name"] for row in one["rows"]} == names
        alone = [{**one, "model": ""} for one, _ in found["alone"]]
        assert alone == ([] if rank == 0 else [{**one, "model": ""} for one, _ in found["both"]])
    first, second = (found["both"] for found in ranks)
    assert all(a["loss"] != b["loss"] for (a, _), (b, _) in zip(first, second, strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_numbers_are_those_of_one_process(one_process) -> None:
    """Under DDP and not: the same losses and rows. The group has one rank, so no rank is named."""
    run = Run(0)
    run.train(steps=1)
    one, other, third = (run.compared(how, 1) for how in ("function", "module", "compiled"))
    assert {**one.to_dict(), "model": ""} == {**other.to_dict(), "model": ""} and one.rank is None
    assert {**one.to_dict(), "model": ""} == {**third.to_dict(), "model": ""}
    assert "on rank" not in str(one) and "forward" not in vars(run.ddp)
    assert to_one(run.compiled(batch(1, 0))).item() == pytest.approx(other.loss_fp8, rel=1e-6)


@pytest.mark.slow
def test_explain_passes_ddp_by(one_process, monkeypatch) -> None:
    """Its own forward does not run. Names, and so the rules of policies, are those of the model inside."""
    ddp = DistributedDataParallel(Net())
    for model in (ddp, lambda x: ddp(x)):
        with monkeypatch.context() as patched:
            patched.setattr(
                DistributedDataParallel, "_pre_forward", lambda *_, **__: pytest.fail("communicates")
            )
            report = fp8compile.explain(model, batch(0, 0))
        assert {record.fqn for record in report.matmuls} == {"mlp.up", "mlp.down"}
    assert "forward" not in vars(ddp)


# -- while a model trains --


def _monitored(rank: int, folder: str) -> dict[str, Any]:
    """Trained twice: the second time with comparisons, in the last of which a scale of rank 1 is wrong."""
    plain, _ = Run(rank).train()
    warned, run, rows = warnings(), Run(rank), []
    path = f"{folder}/run.jsonl"
    with (
        fp8compile.monitor(run.compiled, 1000, path, 2),
        fp8compile.monitor(run.compiled, 1000, rows.extend, 2),
    ):
        unchanged, healthy = same(run.train()[0], plain), list(warned)
        to_one(run.compiled(batch(0, rank))).backward()
        if rank == 1:
            keep_scale(slots_of(run.net)["mlp.up.weight", "input", 0], 2.0**10)
        run.optimizer.step()
    whole = [row for row in rows if row["compare"] == "step"]
    return {"same": unchanged, "rows": whole, "healthy": healthy, "warned": warned}


@pytest.mark.weekly
def test_a_monitor_compares_on_each_rank(tmp_path) -> None:
    ranks = on_ranks(2, _monitored, str(tmp_path))
    for found in ranks:
        assert found["same"] and [row["step"] for row in found["rows"]] == [2, 4] and found["healthy"] == []
    assert ranks[0]["rows"][0]["loss"] != ranks[1]["rows"][0]["loss"]
    assert not any("out of range" in text for text in ranks[0]["warned"])
    (text,) = {text for text in ranks[1]["warned"] if "out of range" in text}
    assert text.startswith("fp8: step 4 on rank 1: out of range in FP8: mlp.up.weight")
    # of rank 0 alone: the step and six parameters
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 2 * 7


# -- FSDP2 --


def _sharded(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    warned, net = warnings(), Net()
    net.mlp.compile(backend="fp8")
    fully_shard(net)
    found: dict[str, Any] = {"error": None}
    if rank == 1:
        with pytest.raises(OptionError) as caught:
            fp8compile.compare(net, batch(0, rank), loss=to_one)
        found["error"] = str(caught.value)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    with fp8compile.monitor(net, 1000, print, 1):
        for step in range(2):
            loss = to_one(net(batch(step, rank)))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {**found, "warned": warned, "losses": losses}


@pytest.mark.slow
def test_a_sharded_model_is_refused_in_one_line() -> None:
    """On one rank alone, which waits for none; a monitor warns once, and the training goes on."""
    ranks = on_ranks(2, _sharded)
    fix = "compare the model on one device, before it is sharded"
    assert ranks[0]["error"] is None and "is a DTensor (fully_shard" in ranks[1]["error"]
    assert fix in ranks[1]["error"] and "\n" not in ranks[1]["error"]
    for found in ranks:
        (text,) = [text for text in found["warned"] if "compares" in text]
        assert text.startswith("fp8: the monitor no longer compares Net: OptionError: compare: ")
        assert fix in text and "\n" not in text and len(found["losses"]) == 2
