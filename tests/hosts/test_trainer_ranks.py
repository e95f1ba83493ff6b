"""Trainer and TRL with FP8Callback on two processes (DDP and FSDP2, gloo, as of torchrun), and replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8compile.runtime.optimizer_steps import steps_of
from tests.hosts.launched import (
    as_on_gpus,
    average,
    check_gradients,
    check_weights,
    facts,
    gradients,
    launched,
    on_two_ranks,
    whole,
)
from tests.hosts.small import (
    STATE,
    examples,
    linears,
    llama,
    logged,
    saved,
    tokenizer,
    training_arguments,
    vanilla,
)
from tests.support.processes import warnings

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS, LR = 3, 1e-3
PLAIN = {"lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 0.0, "optim": "adamw_torch"}
# DDP cuts the graph
PLAIN |= {"max_steps": STEPS, "learning_rate": LR, "ddp_backend": "gloo", "ddp_bucket_cap_mb": 1}
BF16 = {"bf16": True, "gradient_checkpointing": True}
BF16 |= {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
FSDP = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
FSDP |= {"state_dict_type": "SHARDED_STATE_DICT"}
SHARDED = {"fsdp": True, "fsdp_config": FSDP}
BY_NAME = {"torch_compile_backend": "fp8"}


def trained(
    folder: str, options: Any = None, resume: str | None = None, trl: bool = False, **more: Any
) -> dict[str, Any]:
    """With FP8Callback. `fed`: the batches of this rank; `gradients` and `steps`: those before each step of
    the optimizer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from fp8compile.integrations.transformers import FP8Callback

    found: dict[str, Any] = {"fed": [], "gradients": [], "steps": []}

    class Recording(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            found["fed"].append({name: x.clone() for name, x in inputs.items()})
            return super().training_step(model, inputs, num_items_in_batch)

    class Watcher(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            found["steps"].append(steps_of(model))

        def on_pre_optimizer_step(
            self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
        ) -> None:
            found["gradients"].append(gradients(model))

    torch._dynamo.reset()
    settings = training_arguments(Path(folder), **{**PLAIN, **more})
    how = {"callbacks": [FP8Callback(**(options or {})), Watcher()]}
    if trl:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        data = Dataset.from_list([{"input_ids": row["input_ids"]} for row in examples(24)])
        args = SFTConfig(**settings, max_length=64, bf16=False)
        run = SFTTrainer(llama(2), args=args, train_dataset=data, processing_class=tokenizer(), **how)
    else:
        run = Recording(llama(2), TrainingArguments(**settings), train_dataset=examples(24), **how)
    run.train(resume_from_checkpoint=resume)
    found["weights"] = {name: whole(x) for name, x in run.model.state_dict().items()}
    found |= {"wrapper": type(run.model_wrapped).__name__, "log": logged(run)}
    return {**found, **facts(run.model)}


def replica(batches: list[dict[str, torch.Tensor]], accumulate: int = 1) -> dict[str, Any]:
    """The same model without Trainer and DDP, on this rank's batches; gradients are averaged over ranks."""
    torch._dynamo.reset()
    model = llama(2)
    model.compile(backend="fp8")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    seen = []
    for step in range(STEPS):
        for inputs in batches[step * accumulate : (step + 1) * accumulate]:
            (model(**inputs).loss / accumulate).backward()
        average(model)
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return {"gradients": seen, "weights": model.state_dict(), **facts(model)}


def _ddp(rank: int, folder: str) -> dict[str, Any]:
    launched(rank)
    warned = warnings()
    found = {"ddp": trained(f"{folder}/ddp", {"measure_every": STEPS})}
    found["accumulated"] = trained(f"{folder}/accumulated", gradient_accumulation_steps=2, save_strategy="no")
    found["bf16"] = trained(f"{folder}/bf16", save_strategy="no", **BF16)
    found["name"] = trained(f"{folder}/name", **BY_NAME)
    found["trl"] = trained(f"{folder}/trl", trl=True)
    replicas = {how: replica(found[how]["fed"], count) for how, count in (("ddp", 1), ("accumulated", 2))}
    return {**found, "replicas": replicas, "warned": list(warned)}


def _fsdp2(rank: int, folder: str) -> dict[str, Any]:
    launched(rank)
    as_on_gpus()
    warned = warnings()
    found = {"fsdp2": trained(f"{folder}/fsdp2", {"measure_every": STEPS}, **SHARDED)}
    phases = {"recipe": "tensorwise", "schedule": {"warmup_steps": 1}}
    found["unbroken"] = trained(f"{folder}/unbroken", phases, **SHARDED)
    found["resumed"] = trained(f"{folder}/resumed", phases, f"{folder}/unbroken/checkpoint-1", **SHARDED)
    found["fsdp2 name"] = trained(f"{folder}/fsdp2 name", **BY_NAME, **SHARDED)
    return {**found, "replicas": {"fsdp2": replica(found["fsdp2"]["fed"])}, "warned": list(warned)}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    pytest.importorskip("trl")
    return on_two_ranks(tmp_path_factory.mktemp("ddp"), _ddp)


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    return on_two_ranks(tmp_path_factory.mktemp("fsdp2"), _fsdp2)


@pytest.mark.parametrize("how", ["ddp", "accumulated", "fsdp2"])
def test_training_is_that_of_replicas(request: pytest.FixtureRequest, how: str) -> None:
    """Gradients of each step, bitwise; weights, too, where AdamW does not update parts of them."""
    _, found = request.getfixturevalue("fsdp2" if how == "fsdp2" else "ddp")
    for one in found:
        ours, theirs = one[how], one["replicas"][how]
        assert ours["wrapper"] == ("FSDPLlamaForCausalLM" if how == "fsdp2" else "DistributedDataParallel")
        check_gradients(ours["gradients"], theirs["gradients"], STEPS, 21)
        check_weights(ours["weights"], theirs["weights"], 1e-7 if how == "fsdp2" else 0.0)
    first, second = (one[how]["fed"][0]["input_ids"] for one in found)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("how", ["ddp", "trl", "bf16", "name"])
def test_ddp_report_log_and_checkpoint(ddp, tmp_path: Path, how: str) -> None:
    """`name`: TrainingArguments(torch_compile_backend="fp8") compiles what DDP has made, a callback logs."""
    folder, found = ddp
    for one in found:
        ours = one[how]
        assert ours["wrapper"] == ("OptimizedModule" if how == "name" else "DistributedDataParallel")
        assert {name for name, _, decision in ours["rows"] if decision == "fp8"} == linears(2)
        assert ours["log"][-1].keys() & STATE >= {"fp8/share", "fp8/matmuls"}
        assert ours["log"][-1]["fp8/matmuls"] == 42
        assert ours["steps"] == [0, 1, 2] and one["warned"] == []
    first, second = (one[how] for one in found)
    check_weights(first["weights"], second["weights"])
    losses = [[row["loss"] for row in one["log"]] for one in (first, second)]
    # Trainer's losses are the means of both ranks
    assert losses[0] == losses[1] and losses[0][0] != losses[0][-1]
    if how != "bf16":
        assert saved(folder / how / f"checkpoint-{STEPS}") == vanilla(llama(2), tmp_path)


def test_under_ddp_report_state_and_log_are_those_of_a_replica(ddp) -> None:
    for one in ddp[1]:
        ours, theirs = one["ddp"], one["replicas"]["ddp"]
        assert ours["rows"] == theirs["rows"] and len(ours["graphs"]) > 1  # DDP has cut the graph
        # each part of a graph has a slot of its own for what both read
        assert set(ours["state"]) >= set(theirs["state"])
        layers = [{name.split(".weight.")[0] for name in side["state"]} for side in (ours, theirs)]
        assert layers[0] == layers[1]
        first, *_, last = ours["log"]
        assert first.keys() & STATE == STATE
        assert 20 < last["fp8/input/sqnr"] < 50 and "fp8/input/sqnr" not in first


@pytest.mark.parametrize("how", ["fsdp2", "fsdp2 name"])
def test_fsdp2_report_log_and_checkpoint(fsdp2, how: str) -> None:
    """`name`: Accelerate compiles before FSDP2; a callback logs."""
    from torch.distributed.checkpoint import FileSystemReader

    folder, found = fsdp2
    for one in found:
        ours, theirs = one[how], one["replicas"]["fsdp2"]
        names = {name for name, _, decision in ours["rows"] if decision == "fp8"}
        assert names == linears(2)
        assert set(ours["graphs"]) == {"LlamaDecoderLayer, training"} and ours["state"] == theirs["state"]
        assert ours["outside"] == ["lm_head.weight"] and ours["steps"] == [0, 1, 2]
        *_, last = ours["log"]
        assert last.keys() & STATE == STATE and last["fp8/matmuls"] == 42
        assert one["warned"] == []
    assert how != "fsdp2" or 20 < found[0][how]["log"][-1]["fp8/input/sqnr"] < 50
    known = FileSystemReader(folder / how / f"checkpoint-{STEPS}" / "pytorch_model_fsdp_0").read_metadata()
    sizes = {name.removeprefix("model."): tuple(x.size) for name, x in known.state_dict_metadata.items()}
    assert sizes == {name: tuple(x.shape) for name, x in llama(2).state_dict().items()}


def test_a_run_that_resumes_goes_on_in_its_phase(fsdp2) -> None:
    """Warm-up ends after step 1. The resumed run is in FP8 at once, with the unbroken one's losses."""
    for one in fsdp2[1]:
        whole, resumed = one["unbroken"], one["resumed"]
        assert whole["steps"] == [0, 1, 2] and resumed["steps"] == [1, 2]
        losses = [row["loss"] for row in whole["log"]]
        assert [row["loss"] for row in resumed["log"]][-2:] == pytest.approx(losses[1:], abs=1e-6)
