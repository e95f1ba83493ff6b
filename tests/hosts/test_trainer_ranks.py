"""Trainer and TRL with FP8Callback on two processes (DDP, gloo, as torchrun starts them), against replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8compile.runtime.optimizer_steps import steps_of
from tests.hosts.launched import average, check_gradients, facts, gradients, launched, on_two_ranks
from tests.hosts.small import STATE, examples, linears, llama, logged, saved, tokenizer, training_arguments, vanilla
from tests.support.processes import warnings

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS, LR = 3, 1e-3
PLAIN = {"lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 0.0, "optim": "adamw_torch"}
PLAIN |= {"max_steps": STEPS, "learning_rate": LR, "ddp_backend": "gloo", "ddp_bucket_cap_mb": 1}  # DDP cuts the graph
LINEARS = linears(2)
LINEARS |= {f"model.layers.{i}.mlp.{name}_proj" for i in range(2) for name in ("gate", "up", "down")}


def made(folder: Path, callbacks: list[Any], **more: Any) -> Any:
    """A Trainer that keeps the batches of this rank, and how often the loss is averaged."""
    from transformers import Trainer, TrainingArguments

    class Recording(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            self.fed.append({name: x.clone() for name, x in inputs.items()})
            return super().training_step(model, inputs, num_items_in_batch)

    args = TrainingArguments(**training_arguments(folder, **{**PLAIN, **more}))
    run = Recording(llama(2), args, train_dataset=examples(24), callbacks=callbacks)
    run.fed = []
    return run


def fp8_callback(**options: Any) -> Any:
    from fp8compile.integrations.transformers import FP8Callback

    return FP8Callback(**options)


def watcher() -> Any:
    """Keeps the gradients in front of each step, and the steps that the schedule has seen before it."""
    from transformers import TrainerCallback

    class Watcher(TrainerCallback):
        def __init__(self) -> None:
            self.gradients: list[dict[str, torch.Tensor]] = []
            self.steps: list[int] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.steps.append(steps_of(model))

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.gradients.append(gradients(model))

    return Watcher()


def ran(run: Any, watched: Any) -> dict[str, Any]:
    found = {**facts(run.model), "steps": watched.steps, "wrapper": type(run.model_wrapped).__name__}
    found |= {"gradients": watched.gradients, "weights": run.model.state_dict(), "log": logged(run), "fed": run.fed}
    return found


def trained(folder: str, resume: str | None = None, options: Any = None, **more: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    watched = watcher()
    run = made(Path(folder), [fp8_callback(**(options or {})), watched], **more)
    run.train(resume_from_checkpoint=resume)
    return ran(run, watched)


def replica(batches: list[dict[str, torch.Tensor]], accumulate: int = 1) -> dict[str, Any]:
    """The same model in FP8, without Trainer and DDP, on the batches of this rank; gradients are averaged over the ranks."""
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


def _train(rank: int, folder: str) -> dict[str, Any]:
    launched(rank)
    warned = warnings()
    found = {"ddp": trained(f"{folder}/ddp", options={"measure_every": STEPS})}
    found["replica"] = replica(found["ddp"]["fed"])
    found["accumulated"] = trained(f"{folder}/accumulated", gradient_accumulation_steps=2, save_strategy="no")
    found["accumulated replica"] = replica(found["accumulated"]["fed"], 2)
    found["warned"] = list(warned)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    return on_two_ranks(tmp_path_factory.mktemp("trainer"), _train)


@pytest.mark.parametrize("how", ["ddp", "accumulated"])
def test_training_is_that_of_replicas(ranks, how: str) -> None:
    """Gradients of each step and the weights at the end, bitwise; and the same on both ranks."""
    _, found = ranks
    expected = [one["replica" if how == "ddp" else "accumulated replica"] for one in found]
    for ours, theirs in ((one[how], other) for one, other in zip(found, expected, strict=True)):
        assert ours["wrapper"] == "DistributedDataParallel" and len(ours["gradients"]) == STEPS
        check_gradients(ours["gradients"], theirs["gradients"], 21)
        assert [name for name, x in theirs["weights"].items() if not torch.equal(ours["weights"][name], x)] == []
    first, second = (one[how] for one in found)
    assert all(torch.equal(x, second["weights"][name]) for name, x in first["weights"].items())
    assert not torch.equal(first["fed"][0]["input_ids"], second["fed"][0]["input_ids"])


def test_report_state_and_log_have_plain_names(ranks) -> None:
    _, found = ranks
    for one in found:
        ours, theirs = one["ddp"], one["replica"]
        assert ours["rows"] == theirs["rows"] and ours["steps"] == [0, 1, 2]
        assert set(ours["state"]) >= set(theirs["state"])  # each part of a graph has a slot of its own for what both read
        assert {name.split(".weight.")[0] for name in ours["state"]} == {name.split(".weight.")[0] for name in theirs["state"]}
        assert {name for name, _, decision in ours["rows"] if decision == "fp8"} == LINEARS
        assert len(ours["graphs"]) > 1  # DDP has cut the graph
        first, *_, last = ours["log"]
        assert first.keys() & STATE == STATE and first["fp8/matmuls"] == 42
        assert 20 < last["fp8/input/sqnr"] < 50 and "fp8/input/sqnr" not in first
        assert one["warned"] == []
    first, second = ([row["loss"] for row in one["ddp"]["log"]] for one in found)
    assert first == second  # Trainer's losses are the means of both ranks


def test_the_checkpoint_is_vanilla(ranks, tmp_path: Path) -> None:
    folder, _ = ranks
    assert saved(folder / "ddp" / f"checkpoint-{STEPS}") == vanilla(llama(2), tmp_path)


# -- phases, another way to compile, TRL -------------------------------------------------------------------------------


def _others(rank: int, folder: str) -> dict[str, Any]:
    launched(rank)
    options = {"recipe": "tensorwise", "schedule": {"warmup_steps": 1}}
    found = {"whole": trained(f"{folder}/whole", options=options)}
    found["resumed"] = trained(f"{folder}/resumed", f"{folder}/whole/checkpoint-1", options)
    bf16 = {"bf16": True, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    found["bf16"] = trained(f"{folder}/bf16", save_strategy="no", **bf16)
    found["trl"] = _trl(folder)
    found["name"] = trained(f"{folder}/name", torch_compile_backend="fp8")
    return found


def _trl(folder: str) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    torch._dynamo.reset()
    watched = watcher()
    data = Dataset.from_list([{"input_ids": row["input_ids"]} for row in examples(24)])
    args = SFTConfig(**training_arguments(Path(folder) / "trl", max_length=64, bf16=False, **PLAIN))
    callbacks = [fp8_callback(), watched]
    run = SFTTrainer(llama(2), args=args, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks)
    run.fed = []
    run.train()
    return ran(run, watched)


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    pytest.importorskip("trl")
    return on_two_ranks(tmp_path_factory.mktemp("others"), _others)


def test_a_run_that_resumes_goes_on_in_its_phase(others) -> None:
    check_resumed(others[1])


def check_resumed(ranks: list[dict[str, Any]]) -> None:
    """Warm-up ends after step 1. The resumed run is in FP8 at once, and has the losses of the unbroken one."""
    for one in ranks:
        whole, resumed = one["whole"], one["resumed"]
        assert whole["steps"] == [0, 1, 2] and resumed["steps"] == [1, 2]
        losses = [row["loss"] for row in whole["log"]]
        assert [row["loss"] for row in resumed["log"]][-2:] == pytest.approx(losses[1:], abs=1e-6)


@pytest.mark.parametrize("how", ["trl", "bf16", "name", "resumed"])
def test_both_ranks_have_the_same_weights_and_plain_names(others, tmp_path: Path, how: str) -> None:
    """`name`: TrainingArguments(torch_compile_backend="fp8") compiles what DDP has made, a callback logs. `bf16`: with
    checkpointing, too."""
    folder, found = others
    for one in found:
        ours = one[how]
        assert ours["wrapper"] == ("OptimizedModule" if how == "name" else "DistributedDataParallel")
        assert {name for name, _, decision in ours["rows"] if decision == "fp8"} == LINEARS
        assert ours["log"][-1].keys() & STATE >= {"fp8/share", "fp8/matmuls"} and ours["log"][-1]["fp8/matmuls"] == 42
    first, second = (one[how] for one in found)
    assert all(torch.equal(x, second["weights"][name]) for name, x in first["weights"].items())
    assert [row["loss"] for row in first["log"]] == [row["loss"] for row in second["log"]]
    assert first["log"][0]["loss"] != first["log"][-1]["loss"]
    if how != "bf16":
        assert saved(folder / how / f"checkpoint-{STEPS}") == vanilla(llama(2), tmp_path)
