"""Lightning's FP8Callback under DDP on two processes, against replicas that are compiled by hand."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.runtime.optimizer_steps import steps_of
from tests.hosts.launched import average, check_gradients, facts, gradients, launched, on_two_ranks
from tests.hosts.small import STATE
from tests.support.models import ResidualMlp
from tests.support.processes import warnings

lightning = pytest.importorskip("lightning")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 3
ALL = {f"{module}.{layer}" for module in ("net", "blocks.0") for layer in ("up", "down")}


class Lit(lightning.LightningModule):
    """Two networks, one of them in a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = ResidualMlp(256, 1024)
        self.blocks = nn.ModuleList([ResidualMlp(256, 1024)])
        self.losses: list[float] = []
        self.steps: list[int] = []
        self.seen: list[dict[str, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.net(x)).square().mean()

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        self.steps.append(steps_of(self))
        loss = self.forward(batch)
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(gradients(self))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(32, 256, generator=torch.Generator().manual_seed(10 * number + rank))


def callback(**options: Any) -> Any:
    from fp8compile.integrations.lightning import FP8Callback

    return FP8Callback(**options)


def fitted(folder: Path, rank: int, ours: Any, **more: Any) -> Lit:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import DDPStrategy

    torch._dynamo.reset()
    lit = Lit()
    keep = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    quiet |= {"logger": CSVLogger(folder, name="", version=""), "callbacks": [ours, keep]}
    how = {"accelerator": "cpu", "devices": 2, "max_steps": STEPS, "use_distributed_sampler": False}
    trainer = lightning.Trainer(strategy=DDPStrategy(bucket_cap_mb=1), **how, **quiet, **more)  # DDP cuts the graphs
    batches = torch.utils.data.DataLoader([batch(number, rank) for number in range(2 * STEPS)], batch_size=None)
    trainer.fit(lit, batches)
    return lit


def by_hand(rank: int, accumulate: int = 1) -> Lit:
    """A replica without Lightning and DDP, compiled as the callback does it: gradients are averaged over the ranks."""
    torch._dynamo.reset()
    lit = Lit()
    for module in (lit.net, lit.blocks[0]):
        module.compile(backend="fp8")
    optimizer = lit.configure_optimizers()
    for step in range(STEPS):
        for micro in range(accumulate):
            loss = lit.forward(batch(step * accumulate + micro, rank))
            (loss / accumulate).backward()
            lit.losses.append(loss.item())
        average(lit)
        lit.seen.append(gradients(lit))
        optimizer.step()
        optimizer.zero_grad()
    return lit


def ran(lit: Lit) -> dict[str, Any]:
    found = {"names": [f"{record.fqn}|{record.parameter}" for record in fp8compile.report(lit).matmuls]}
    found |= {"losses": [*lit.losses], "steps": [*lit.steps], "gradients": [*lit.seen], "weights": lit.state_dict()}
    return {**found, **facts(lit)}


def _train(rank: int, folder: str) -> dict[str, Any]:
    launched(rank)
    warned, at = warnings(), Path(folder)
    found = {"ddp": ran(fitted(at / "ddp", rank, callback(measure_every=STEPS))), "replica": ran(by_hand(rank))}
    found["accumulated"] = ran(fitted(at / "accumulated", rank, callback(), accumulate_grad_batches=2))
    found["accumulated replica"] = ran(by_hand(rank, 2))
    return {**found, "warned": list(warned)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    return on_two_ranks(tmp_path_factory.mktemp("lightning"), _train)


@pytest.mark.parametrize("how", ["ddp", "accumulated"])
def test_training_is_that_of_replicas(ranks, how: str) -> None:
    """Losses, gradients of each step and the weights at the end, bitwise; weights are the same on both ranks."""
    _, found = ranks
    for one in found:
        ours, theirs = one[how], one["replica" if how == "ddp" else "accumulated replica"]
        assert ours["losses"] == theirs["losses"] and len(ours["gradients"]) == len(theirs["gradients"]) == STEPS
        check_gradients(ours["gradients"], theirs["gradients"], 8)
        assert [name for name, x in theirs["weights"].items() if not torch.equal(ours["weights"][name], x)] == []
    first, second = (one[how] for one in found)
    assert all(torch.equal(x, second["weights"][name]) for name, x in first["weights"].items())
    assert first["losses"] != second["losses"]


def test_report_and_state_are_those_of_replicas(ranks) -> None:
    for one in ranks[1]:
        ours, theirs = one["ddp"], one["replica"]
        assert ours["rows"] == theirs["rows"] and {row[2] for row in ours["rows"]} == {"fp8"} and ours["steps"] == [0, 1, 2]
        assert ours["state"] == theirs["state"] and len(ours["state"]) == 1 + 12 and not ours["outside"]
        assert not any("module" in name or "_orig_mod" in name for name in ours["names"])
        assert len(ours["graphs"]) > len(theirs["graphs"])  # DDP has cut them
        assert one["warned"] == []


def test_log_and_checkpoint_of_the_first_rank(ranks) -> None:
    folder, _ = ranks
    rows = list(csv.DictReader((folder / "ddp" / "metrics.csv").read_text().splitlines()))
    assert len(rows) == STEPS
    assert {name for name in STATE if rows[0][name]} == STATE and float(rows[0]["fp8/matmuls"]) == 11
    assert not rows[0]["fp8/input/sqnr"] and 20 < float(rows[-1]["fp8/input/sqnr"]) < 50
    state = torch.load(folder / "ddp" / f"step={STEPS}.ckpt", weights_only=False)["state_dict"]
    assert list(state) == list(Lit().state_dict())
    Lit().load_state_dict(state)
