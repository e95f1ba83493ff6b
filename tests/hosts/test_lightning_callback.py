"""Lightning with FP8Callback, and Fabric: two steps of two MLPs in one process, graphs interpreted."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.errors import OptionError, StrictError
from fp8compile.runtime.optimizer_steps import steps_of
from tests.hosts.small import STATE, in_fp8
from tests.support.harness import noise
from tests.support.models import ResidualMlp

lightning = pytest.importorskip("lightning")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("interpreted")]


class Lit(lightning.LightningModule):
    """Two networks, one of them in a list, and a module without parameters."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.late, self.loss = late, nn.MSELoss()
        self.seen: list[int] = []
        self.losses: list[float] = []
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net = ResidualMlp()
            self.blocks = nn.ModuleList([ResidualMlp()])

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        self.seen.append(steps_of(self))
        loss = self.loss(self.blocks[0](self.net(batch)), batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batches(same: bool = False) -> Any:
    rows = [noise(32, 128, seed=0 if same else step) for step in range(4)]
    return torch.utils.data.DataLoader(rows, batch_size=None)


def trainer(folder: Path, callback: Any, steps: int = 2, **more: Any) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}
    keep = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    logger = CSVLogger(folder, name="", version="")
    return lightning.Trainer(
        max_steps=steps, logger=logger, log_every_n_steps=1, callbacks=[callback, keep], **quiet, **more
    )


def callback(*args: Any, **options: Any) -> Any:
    from fp8compile.integrations.lightning import FP8Callback

    return FP8Callback(*args, **options)


LINEARS = {"up", "down"}  # of both networks


@pytest.mark.parametrize("late", [False, True], ids=["init", "configure_model"])
def test_two_steps_report_log_and_checkpoint(tmp_path: Path, late: bool) -> None:
    lit = Lit(late)
    trainer(tmp_path, callback(measure_every=2)).fit(lit, batches())
    report = fp8compile.report(lit)
    assert in_fp8(lit) == LINEARS and len(report.graphs) == 2 and not report.outside
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    first, second = rows
    assert {name for name in STATE if first[name]} == STATE
    assert float(first["fp8/matmuls"]) == len(report.matmuls) == 11
    assert first["fp8/share"] == "1.0" and not first["fp8/input/sqnr"]
    assert 20 < float(second["fp8/input/sqnr"]) < 50
    state = torch.load(tmp_path / "step=2.ckpt", weights_only=False)["state_dict"]
    assert list(state) == list(Lit().state_dict()) and len(state) == 8
    Lit().load_state_dict(state)


def test_a_run_that_resumes_goes_on_in_its_phase(tmp_path: Path) -> None:
    """Warm-up ends after step 1. A second `fit` compiles nothing. Batches are equal: Lightning skips none."""
    options = {"recipe": "tensorwise", "schedule": {"warmup_steps": 1}}
    whole = Lit()
    trainer(tmp_path, callback(**options)).fit(whole, batches(same=True))
    assert whole.seen == [0, 1]
    torch._dynamo.reset()
    again, ours = Lit(), callback(**options)
    trainer(tmp_path / "again", ours).fit(
        again, batches(same=True), ckpt_path=tmp_path / "step=1.ckpt", weights_only=False
    )
    assert again.seen == [1] and again.losses == [pytest.approx(whole.losses[1], abs=1e-6)]
    graphs = len(fp8compile.report(again).graphs)
    trainer(tmp_path / "third", ours).fit(again, batches(same=True))
    assert again.seen == [1, 0, 1] and len(fp8compile.report(again).graphs) == graphs


def test_a_network_by_its_name(tmp_path: Path) -> None:
    lit = Lit()
    trainer(tmp_path, callback(network="blocks.0"), 1).fit(lit, batches())
    report = fp8compile.report(lit)
    outside = {record.parameter for record in report.outside}
    assert len(report.graphs) == 1 and outside == {"net.up.weight", "net.down.weight"}
    wrong = "'network' must be the name of a module .* got 'nte'.*Did you mean 'net'"
    with pytest.raises(OptionError, match=wrong):
        trainer(tmp_path, callback(network="nte"), 1).fit(Lit(), batches())


def test_a_network_that_is_compiled_already_stays_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once."""
    lit = Lit()
    lit.net.compile(backend="fp8")
    with caplog.at_level(logging.WARNING, "fp8compile"):
        trainer(tmp_path, callback(network="net", recipe="rowwise"), 1).fit(lit, batches())
    assert caplog.text.count("ResidualMlp is compiled already and stays so; without effect: recipe") == 1
    assert {m.recipe for m in fp8compile.report(lit).matmuls} == {"delayed"}


def test_nothing_in_fp8_is_an_error_with_strict(tmp_path: Path) -> None:
    class Functional(Lit):  # nobody calls a module
        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            return nn.functional.linear(batch, self.net.up.weight).square().mean()

    with pytest.raises(StrictError, match="FP8Callback: nothing of Functional became FP8"):
        trainer(tmp_path, callback(strict=True)).fit(Functional(), batches())


def test_fabric(tmp_path: Path) -> None:
    """Fabric compiles what it is given again, with the same arguments, around its own wrapper."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    torch.manual_seed(0)
    bare = ResidualMlp()
    compiled = torch.compile(bare, backend="fp8", options={"recipe": "rowwise"})
    model, optimizer = fabric.setup(compiled, torch.optim.AdamW(bare.parameters()))
    losses = []
    for batch in list(batches())[:2]:
        loss = model(batch).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert in_fp8(bare) == LINEARS and {m.recipe for m in fp8compile.report(bare).matmuls} == {"rowwise"}
    fabric.save(tmp_path / "state.ckpt", {"model": model})
    assert list(fabric.load(tmp_path / "state.ckpt")["model"]) == list(bare.state_dict())
    assert losses[0] != losses[1]
