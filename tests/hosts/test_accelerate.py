"""Hugging Face Accelerate with FSDP2, two steps of a small Llama, against replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.hosts.launched import as_on_gpus, average, facts, gradients, launched
from tests.hosts.small import linears, llama, tokens
from tests.support.harness import sqnr
from tests.support.processes import on_ranks

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WAYS = ("regional", "whole")


def prepared(how: str) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin

    from fp8compile.integrations.accelerate import FP8Plugin

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FP8Plugin(options={"recipe": "delayed"}, use_regional_compilation=how == "regional")
    wrap = {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"],
    }
    fsdp = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **wrap)
    accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp, dynamo_plugin=plugin)
    assert str(accelerator.distributed_type) == "DistributedType.FSDP"
    model = llama(2)
    return (accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3)))


def _train(rank: int) -> dict[str, Any]:
    """Two steps of each way, and of a replica with compiled blocks: losses, gradients, reports, names."""
    launched(rank)
    as_on_gpus()
    found: dict[str, Any] = {"vanilla": sorted(llama(2).state_dict())}
    for how in ("replica", *WAYS):
        torch._dynamo.reset()
        if how == "replica":
            model = llama(2)
            for block in model.model.layers:
                block.compile(backend="fp8")
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        else:
            accelerator, model, optimizer = prepared(how)
        losses, grads = [], []
        for step in range(2):
            batch = tokens(10 * step + rank)
            loss = model(input_ids=batch, labels=batch).loss
            if how == "replica":
                loss.backward()
                average(model)
            else:
                accelerator.backward(loss)
            losses.append(loss.item())
            grads.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        found[how] = {"losses": losses, "gradients": grads, **facts(model)}
        if how != "replica":
            found[how]["saved"] = sorted(accelerator.get_state_dict(model))
    return found


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return on_ranks(2, _train, once=True)


@pytest.mark.parametrize("how", WAYS)
def test_training_is_that_of_a_replica(trained, how: str) -> None:
    """Not to the bit: norms outside of the blocks add up in another order."""
    for found in trained:
        ours, replica = found[how], found["replica"]
        assert ours["losses"] == pytest.approx(replica["losses"], abs=2e-5)
        assert ours["losses"][1] != ours["losses"][0]
        for got, expected in zip(ours["gradients"], replica["gradients"], strict=True):
            assert got.keys() == expected.keys() and len(got) == 21
            assert min(sqnr(gradient, got[name]) for name, gradient in expected.items()) > 20.0


@pytest.mark.parametrize("how", WAYS)
def test_report_state_and_checkpoint_have_the_names_of_the_user(trained, how: str) -> None:
    for found in trained:
        ours, replica = found[how], found["replica"]
        assert {name for name, _, _ in ours["rows"]} == linears(2)
        assert ours["rows"] == replica["rows"] and {row[2] for row in ours["rows"]} == {"fp8"}
        assert set(ours["graphs"]) == {"LlamaDecoderLayer, training"}
        assert ours["outside"] == ["lm_head.weight"]
        assert ours["state"] == replica["state"] and len(ours["state"]) == 1 + 34
    # gathered on the first rank
    assert trained[0][how]["saved"] == trained[0]["vanilla"] and not trained[1][how]["saved"]
