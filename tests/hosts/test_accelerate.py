"""Hugging Face Accelerate with FSDP2, two steps of a small Llama, against replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8compile.errors import OptionError
from tests.hosts.launched import as_on_gpus, average, facts, gradients, launched
from tests.hosts.small import llama
from tests.support.harness import sqnr
from tests.support.processes import on_ranks

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WAYS = ("regional", "whole", "blocks")


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(10 * step + rank))


def prepared(how: str, model: torch.nn.Module) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin

    from fp8compile.integrations.accelerate import FP8Plugin

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = None if how == "blocks" else FP8Plugin(options={"recipe": "delayed"}, use_regional_compilation=how == "regional")
    wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    fsdp = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **wrap)
    accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp, dynamo_plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return (accelerator, *accelerator.prepare(model, optimizer))


def _train(rank: int) -> dict[str, Any]:
    """Two steps of each way, and of a replica whose blocks are compiled: losses, gradients, reports, names."""
    launched(rank)
    as_on_gpus()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for how in ("replica", *WAYS):
        torch._dynamo.reset()
        model = llama(2)
        if how in ("replica", "blocks"):
            for block in model.model.layers:
                block.compile(backend="fp8")
        if how == "replica":
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        else:
            accelerator, model, optimizer = prepared(how, model)
            assert str(accelerator.distributed_type) == "DistributedType.FSDP"
        losses, grads = [], []
        for step in range(2):
            loss = model(input_ids=batch(step, rank), labels=batch(step, rank)).loss
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
    found["vanilla"] = sorted(llama(2).state_dict())
    return found


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return on_ranks(2, _train, once=True)


@pytest.mark.parametrize("how", WAYS)
def test_training_is_that_of_a_replica(trained, how: str) -> None:
    """To the bit where the same parts are compiled; else norms outside of the blocks add up in another order."""
    for found in trained:
        ours, replica = found[how], found["replica"]
        assert ours["losses"] == pytest.approx(replica["losses"], abs=0.0 if how == "blocks" else 2e-5)
        assert ours["losses"][1] != ours["losses"][0]
        for got, expected in zip(ours["gradients"], replica["gradients"], strict=True):
            assert got.keys() == expected.keys() and len(got) == 21
            for name, gradient in expected.items():
                if how == "blocks":
                    assert torch.equal(got[name], gradient), name
                else:
                    assert sqnr(gradient, got[name]) > 20.0, name


@pytest.mark.parametrize("how", WAYS)
def test_report_state_and_checkpoint_have_the_names_of_the_user(trained, how: str) -> None:
    for found in trained:
        ours, replica = found[how], found["replica"]
        assert {name.rpartition(".")[2] for name, _, _ in ours["rows"]} == set(LINEARS)
        assert ours["rows"] == replica["rows"] and {row[2] for row in ours["rows"]} == {"fp8"}
        assert set(ours["graphs"]) == {"LlamaDecoderLayer, training"} and ours["outside"] == ["lm_head.weight"]
        assert ours["state"] == replica["state"] and len(ours["state"]) == 1 + 34
    assert trained[0][how]["saved"] == trained[0]["vanilla"] and not trained[1][how]["saved"]  # gathered on the first rank


def test_a_plugin_checks_its_options() -> None:
    from fp8compile.integrations.accelerate import FP8Plugin

    with pytest.raises(OptionError, match="'recipe' must be one of"):
        FP8Plugin(options={"recipe": "delaid"})
    with pytest.raises(OptionError, match="take accelerate's TorchDynamoPlugin; got 'eager'"):
        FP8Plugin(backend="eager")
    plugin = FP8Plugin(options={"recipe": "rowwise"}, fullgraph=True)
    assert plugin.to_kwargs() == {"backend": "fp8", "options": {"recipe": "rowwise"}, "fullgraph": True}


def test_a_plugin_without_options_takes_the_policy_of_the_environment(monkeypatch) -> None:
    from fp8compile.integrations.accelerate import FP8Plugin

    monkeypatch.setenv("FP8COMPILE_POLICY", "no-such-policy")
    with pytest.raises(OptionError, match="no-such-policy"):
        FP8Plugin()
