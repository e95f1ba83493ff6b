"""Trainer with FP8Callback under FSDP2 on two processes, against replicas whose blocks are compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.launched import as_on_gpus, check_gradients, launched, on_two_ranks, whole
from tests.hosts.small import STATE, llama
from tests.hosts.test_trainer_ranks import LINEARS, STEPS, check_resumed, replica, trained
from tests.support.processes import warnings

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FSDP = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": "SHARDED_STATE_DICT"}


def _train(rank: int, folder: str) -> dict[str, Any]:
    launched(rank)
    as_on_gpus()
    warned = warnings()
    more = {"fsdp": True, "fsdp_config": FSDP}
    found = {"callback": trained(f"{folder}/callback", options={"measure_every": STEPS}, **more)}
    found["replica"] = replica(found["callback"]["fed"])
    options = {"recipe": "tensorwise", "schedule": {"warmup_steps": 1}}
    found["whole"] = trained(f"{folder}/whole", options=options, **more)
    found["resumed"] = trained(f"{folder}/resumed", f"{folder}/whole/checkpoint-1", options, **more)
    found["name"] = trained(f"{folder}/name", torch_compile_backend="fp8", **more)
    for one in found.values():
        one["weights"] = {name: whole(x) for name, x in one["weights"].items()}
    return {**found, "warned": list(warned)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    return on_two_ranks(tmp_path_factory.mktemp("fsdp2"), _train)


def test_training_is_that_of_replicas(ranks) -> None:
    """Gradients of each step, bitwise. Weights to rounding: AdamW updates parts of them, whose ends round otherwise."""
    for one in ranks[1]:
        ours, theirs = one["callback"], one["replica"]
        assert ours["wrapper"] == "FSDPLlamaForCausalLM" and len(ours["gradients"]) == STEPS
        check_gradients(ours["gradients"], theirs["gradients"], 21)
        for name, x in theirs["weights"].items():
            torch.testing.assert_close(ours["weights"][name], x, rtol=0.0, atol=1e-7)


@pytest.mark.parametrize("how", ["callback", "name"])
def test_report_state_and_log_have_plain_names(ranks, how: str) -> None:
    """`name`: TrainingArguments(torch_compile_backend="fp8"), which Accelerate compiles before FSDP2; a callback logs."""
    for one in ranks[1]:
        ours, theirs = one[how], one["replica"]
        assert {name for name, _, decision in ours["rows"] if decision == "fp8"} == {name.split(".", 3)[3] for name in LINEARS}
        assert set(ours["graphs"]) == {"LlamaDecoderLayer, training"} and ours["state"] == theirs["state"]
        assert ours["outside"] == ["lm_head.weight"] and ours["steps"] == [0, 1, 2]
        *_, last = ours["log"]
        assert last.keys() & STATE == STATE and last["fp8/matmuls"] == 21  # one graph serves both layers
        assert one["warned"] == []
    assert 20 < ranks[1][0]["callback"]["log"][-1]["fp8/input/sqnr"] < 50


@pytest.mark.parametrize("how", ["callback", "name"])
def test_the_sharded_checkpoint_is_vanilla(ranks, how: str) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    known = FileSystemReader(ranks[0] / how / f"checkpoint-{STEPS}" / "pytorch_model_fsdp_0").read_metadata()
    expected = llama(2).state_dict()
    found = {name.removeprefix("model."): tuple(x.size) for name, x in known.state_dict_metadata.items()}
    assert found == {name: tuple(x.shape) for name, x in expected.items()}


def test_a_run_that_resumes_goes_on_in_its_phase(ranks) -> None:
    check_resumed(ranks[1])
