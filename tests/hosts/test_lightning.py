"""PyTorch Lightning with ModelParallelStrategy (FSDP2), two steps, against replicas. (test_lightning_ranks.py has DDP.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.ranks import Net
from tests.hosts.launched import average, facts, gradients, launched
from tests.support.processes import on_ranks

lightning = pytest.importorskip("lightning")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WAYS = ("blocks", "wrapped", "callback")


def build(how: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    for block in net.blocks if how == "blocks" else ():
        block.compile(backend="fp8")
    return torch.compile(net, backend="fp8") if how == "wrapped" else net


def batches(rank: int) -> list[torch.Tensor]:
    return [torch.randn(32, 128, generator=torch.Generator().manual_seed(10 * step + rank)) for step in range(2)]


class Lit(lightning.LightningModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.net = build(how)
        self.losses: list[float] = []
        self.seen: list[dict[str, torch.Tensor]] = []

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        net = getattr(self.net, "_orig_mod", self.net)
        for module in (*net.blocks, net):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(gradients(self.net))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trainer(how: str) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
    how_many = {"devices": 2, "max_steps": 2, "use_distributed_sampler": False}
    callbacks = []
    if how == "callback":
        from fp8compile.integrations.lightning import FP8Callback

        callbacks.append(FP8Callback(network="net"))
    return lightning.Trainer(accelerator="cpu", strategy=ModelParallelStrategy(2, 1), callbacks=callbacks, **how_many, **quiet)


def _train(rank: int) -> dict[str, Any]:
    launched(rank)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for how in WAYS:
        torch._dynamo.reset()
        lit = Lit(how)
        trainer(how).fit(lit, torch.utils.data.DataLoader(batches(rank), batch_size=None))
        found[how] = {"losses": lit.losses, "gradients": lit.seen, **facts(lit.net)}
    torch._dynamo.reset()
    model = build("blocks")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seen = [], []
    for batch in batches(rank):
        loss = model(batch).square().mean()
        loss.backward()
        average(model)
        losses.append(loss.item())
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    found["replica"] = {"losses": losses, "gradients": seen, **facts(model)}
    return found


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return on_ranks(2, _train, once=True)


@pytest.mark.parametrize("how", WAYS)
def test_training_is_that_of_a_replica(trained, how: str) -> None:
    for found in trained:
        ours, replica = found[how], found["replica"]
        assert ours["losses"] == replica["losses"] and len(ours["losses"]) == 2
        for got, expected in zip(ours["gradients"], replica["gradients"], strict=True):
            assert got.keys() == expected.keys() and len(got) == 12
            for name, gradient in expected.items():
                assert torch.equal(got[name], gradient), name


@pytest.mark.parametrize("how", WAYS)
def test_report_and_state_have_the_names_of_the_user(trained, how: str) -> None:
    for found in trained:
        ours, replica = found[how], found["replica"]
        assert ours["rows"] == replica["rows"] and {row[2] for row in ours["rows"]} == {"fp8"}
        assert {name for name, _, _ in ours["rows"]} == {"up", "down"}
        assert set(ours["graphs"]) == {"ResidualMlp, training"}
        assert ours["state"] == replica["state"] and len(ours["state"]) == 1 + 12


def test_lightning_refuses_a_compiled_module_under_fsdp2() -> None:
    """Which is why the network is compiled, and not the LightningModule."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning.pytorch.utilities.compile import _verify_strategy_supports_compile, from_compiled

    with pytest.raises(RuntimeError, match="incompatible with the current strategy"):
        _verify_strategy_supports_compile(from_compiled(torch.compile(Lit("plain"), backend="fp8")), ModelParallelStrategy())
