"""Lightning on two processes, under DDP and ModelParallelStrategy (FSDP2), against replicas without it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8compile.runtime.optimizer_steps import steps_of
from tests.hosts.launched import (
    average,
    check_gradients,
    check_weights,
    facts,
    gradients,
    launched,
    on_two_ranks,
    whole,
)
from tests.hosts.small import STATE
from tests.support.models import ResidualMlp
from tests.support.processes import warnings

lightning = pytest.importorskip("lightning")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 3
WAYS = {
    "ddp": "replica",
    "accumulated": "accumulated replica",
    "fsdp2": "replica",
    "fsdp2 by hand": "replica",
}


class Lit(lightning.LightningModule):
    """Two networks, one of them in a list."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = ResidualMlp(256, 1024)
        self.blocks = nn.ModuleList([ResidualMlp(256, 1024)])
        for module in (self.net, *self.blocks) if by_hand else ():
            module.compile(backend="fp8")
        self.losses: list[float] = []
        self.steps: list[int] = []
        self.seen: list[dict[str, torch.Tensor]] = []

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for module in (self.net, *self.blocks) if self.device_mesh is not None else ():
            fully_shard(module, mesh=self.device_mesh["data_parallel"])

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


def fitted(folder: Path, rank: int, how: str) -> Lit:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from fp8compile.integrations.lightning import FP8Callback

    torch._dynamo.reset()
    by_hand, sharded = "by hand" in how, "fsdp2" in how
    strategy = ModelParallelStrategy(2, 1) if sharded else DDPStrategy(bucket_cap_mb=1)  # DDP cuts the graphs
    callbacks = [] if by_hand else [FP8Callback(measure_every=STEPS)]
    if not sharded:
        callbacks.append(ModelCheckpoint(folder / how, "{step}", save_top_k=-1, every_n_train_steps=1))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": not sharded}
    quiet |= {"logger": CSVLogger(folder, how, version=""), "log_every_n_steps": 1}
    counts = {"devices": 2, "max_steps": STEPS, "accumulate_grad_batches": 2 if how == "accumulated" else 1}
    quiet |= {"use_distributed_sampler": False, "callbacks": callbacks}
    trainer = lightning.Trainer(accelerator="cpu", strategy=strategy, **counts, **quiet)
    rows = [batch(number, rank) for number in range(2 * STEPS)]
    trainer.fit(lit := Lit(by_hand), torch.utils.data.DataLoader(rows, batch_size=None))
    return lit


def replica(rank: int, accumulate: int = 1) -> Lit:
    """Without Lightning: gradients are averaged over the ranks."""
    torch._dynamo.reset()
    lit = Lit(by_hand=True)
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
    weights = {name: whole(x) for name, x in lit.state_dict().items()}
    return {"losses": lit.losses, "steps": lit.steps, "gradients": lit.seen, "weights": weights, **facts(lit)}


def _train(rank: int, folder: str) -> dict[str, Any]:
    launched(rank)
    warned = warnings()
    found = {how: ran(fitted(Path(folder), rank, how)) for how in WAYS}
    found |= {"replica": ran(replica(rank)), "accumulated replica": ran(replica(rank, 2))}
    return {**found, "warned": list(warned)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    return on_two_ranks(tmp_path_factory.mktemp("lightning"), _train)


@pytest.mark.parametrize("how", WAYS)
def test_training_is_that_of_replicas(ranks, how: str) -> None:
    """Losses and gradients of each step, bitwise; weights, too, where AdamW does not update parts of them."""
    for one in ranks[1]:
        ours, theirs = one[how], one[WAYS[how]]
        assert ours["losses"] == theirs["losses"] and ours["losses"][0] != ours["losses"][-1]
        check_gradients(ours["gradients"], theirs["gradients"], STEPS, 8)
        check_weights(ours["weights"], theirs["weights"], 1e-7 if "fsdp2" in how else 0.0)
    first, second = (one[how] for one in ranks[1])
    check_weights(first["weights"], second["weights"])
    assert first["losses"] != second["losses"]


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "fsdp2 by hand"])
def test_report_and_state_are_those_of_replicas(ranks, how: str) -> None:
    for one in ranks[1]:
        ours, theirs = one[how], one["replica"]
        assert ours["rows"] == theirs["rows"] and {row[2] for row in ours["rows"]} == {"fp8"}
        assert "by hand" in how or ours["steps"] == [0, 1, 2]
        assert ours["state"] == theirs["state"] and len(ours["state"]) == 1 + 12 and not ours["outside"]
        assert how != "ddp" or len(ours["graphs"]) > len(theirs["graphs"])  # DDP has cut them
        assert one["warned"] == []


def test_log_and_checkpoint_of_the_first_rank(ranks) -> None:
    folder = ranks[0] / "ddp"
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    assert len(rows) == STEPS
    assert {name for name in STATE if rows[0][name]} == STATE and float(rows[0]["fp8/matmuls"]) == 11
    assert not rows[0]["fp8/input/sqnr"] and 20 < float(rows[-1]["fp8/input/sqnr"]) < 50
    state = torch.load(folder / f"step={STEPS}.ckpt", weights_only=False)["state_dict"]
    assert list(state) == list(Lit().state_dict())
    Lit().load_state_dict(state)
