"""transformers' Trainer and PEFT with FP8Callback: two steps of a Llama of one layer, graphs interpreted."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8compile
from fp8compile.errors import OptionError, StrictError
from fp8compile.runtime.optimizer_steps import steps_of
from tests.hosts.launched import check_weights
from tests.hosts.small import (
    STATE,
    examples,
    in_fp8,
    linears,
    llama,
    logged,
    saved,
    training_arguments,
    vanilla,
)

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("interpreted")]

LINEARS = linears()


def trainer(folder: Path, callback: Any = None, model: Any = None, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(**training_arguments(folder, **more))
    callbacks = [] if callback is None else [callback]
    return Trainer(llama() if model is None else model, args, train_dataset=examples(), callbacks=callbacks)


def callback(*args: Any, **options: Any) -> Any:
    from fp8compile.integrations.transformers import FP8Callback

    return FP8Callback(*args, **options)


def test_two_steps_report_log_and_checkpoint(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", callback(recipe="delayed", measure_every=2))
    run.train()
    assert in_fp8(run.model) == LINEARS
    first, second = logged(run)
    assert first.keys() & STATE == STATE and first["fp8/matmuls"] == 21
    assert math.isclose(first["fp8/share"], 5 / 6)
    assert first["loss"] != second["loss"]
    measured = {key for key in second if key.endswith(("overflows%", "underflows%", "sqnr"))}
    assert len(measured) == 9 and not measured & first.keys()
    assert 20 < second["fp8/input/sqnr"] < 50 and 15 < second["fp8/gradient/sqnr"] < 50
    names = vanilla(llama(), tmp_path / "vanilla")
    assert saved(tmp_path / "run" / "checkpoint-2") == names
    run.save_model(str(tmp_path / "final"))
    assert saved(tmp_path / "final") == names
    kept = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    assert kept["log_history"][0]["fp8/matmuls"] == 21


def test_a_run_that_resumes_goes_on_in_its_phase(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Warm-up ends after step 1: what resumes at step 1 is in FP8 at once, and its second loss is that of an
    unbroken run. A second `train` of the same Trainer begins at step 0, and compiles nothing again."""
    from transformers import TrainerCallback

    class Phases(TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.seen.append(steps_of(model))

    def fresh(phases: Phases) -> Any:
        torch._dynamo.reset()
        run = trainer(tmp_path, callback(recipe="tensorwise", schedule={"warmup_steps": 1}), model=llama())
        run.add_callback(phases)
        return run

    whole, again = Phases(), Phases()
    run = fresh(whole)
    run.train()
    assert whole.seen == [0, 1]
    expected = logged(run)[1]["loss"]
    run = fresh(again)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert again.seen == [1] and logged(run)[-1]["loss"] == pytest.approx(expected, abs=1e-6)
    graphs = len(fp8compile.report(run.model).graphs)
    run.train()
    assert again.seen == [1, 0, 1] and len(fp8compile.report(run.model).graphs) == graphs
    assert "compiled already" not in caplog.text


def test_by_the_name_of_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TrainingArguments(torch_compile_backend="fp8"), with the policy of the environment, and a callback that
    only logs."""
    monkeypatch.setenv("FP8COMPILE_POLICY", str(policy := tmp_path / "policy.toml"))
    policy.write_text(
        '[defaults]\nrecipe = "tensorwise"\n[[rules]]\nmodule = "model.layers.0.self_attn.*"\nfp8 = "off"\n'
    )
    run = trainer(tmp_path / "run", callback(measure_every=2), torch_compile_backend="fp8")
    run.train()
    assert in_fp8(run.model) == {name for name in LINEARS if "mlp" in name}
    assert {m.recipe for m in fp8compile.report(run.model).matmuls if m.decision == "fp8"} == {"tensorwise"}
    assert logged(run)[0]["fp8/matmuls"] == 9 and 20 < logged(run)[1]["fp8/weight/sqnr"] < 50
    assert saved(tmp_path / "run" / "checkpoint-2") == vanilla(llama(), tmp_path / "vanilla")


def test_what_trainer_compiles_with_and_the_options_agree(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'torch_compile_backend' must be 'fp8', or left out"):
        trainer(tmp_path, callback(), torch_compile=True).train()
    wrong = r"'torch_compile_backend' must be left out if FP8Callback has options \(recipe\)"
    with pytest.raises(OptionError, match=wrong):
        trainer(tmp_path, callback(recipe="rowwise"), torch_compile_backend="fp8").train()


def test_nothing_in_fp8_is_one_line_and_with_strict_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = {"rules": [{"fp8": "off"}]}
    with caplog.at_level(logging.WARNING, "fp8compile"):
        trainer(tmp_path, callback(nothing)).train()
    (line,) = [record.getMessage() for record in caplog.records if "FP8Callback" in record.getMessage()]
    assert line.startswith("fp8: FP8Callback: nothing of LlamaForCausalLM became FP8: ") and "\n" not in line
    torch._dynamo.reset()
    with pytest.raises(StrictError, match="FP8Callback: nothing of LlamaForCausalLM became FP8"):
        model = llama()
        model.compile(backend="eager")
        trainer(tmp_path, callback(strict=True), model).train()


def test_bad_input_is_found_before_training() -> None:
    for options, why in (
        ({"recpie": "delayed"}, "unknown fp8 option 'recpie'.*Did you mean 'recipe'"),
        ({"policy": "missing.toml"}, "missing.toml"),
        ({"schedule": {"warmup": 3}}, "Did you mean 'warmup_steps'"),
        ({"schedule": 200}, "'schedule' must be a dict such as"),
        ({"measure_every": 0}, "'measure_every' must be an integer >= 1; got 0"),
    ):
        with pytest.raises(OptionError, match=why):
            callback(**options)


def test_peft(tmp_path: Path) -> None:
    """The frozen layers have no wgrad. Adapters of rank 8 stay in high precision, and only they are saved."""
    peft = pytest.importorskip("peft")
    from safetensors.torch import load_file

    config = peft.LoraConfig(r=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")

    def adapted() -> Any:
        return peft.get_peft_model(llama(), config)

    run = trainer(tmp_path / "run", callback(), adapted())
    run.train()
    assert {m.gemm for m in fp8compile.report(run.model).matmuls if m.decision == "fp8"} == {"fprop", "dgrad"}
    names = [name.removeprefix("base_model.model.") for name in in_fp8(run.model)]
    assert {name.removesuffix(".base_layer") for name in names} == LINEARS
    assert logged(run)[0].keys() >= {"fp8/share", "fp8/matmuls"}
    adapted().save_pretrained(tmp_path / "vanilla")
    folders = tmp_path / "run/checkpoint-2", tmp_path / "vanilla"
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert ours.keys() == theirs.keys()


@pytest.mark.weekly
def test_peft_on_a_base_in_fp8_only(tmp_path: Path) -> None:
    """To the bit as without `frozen`. A checkpoint has the adapters, and what is merged is vanilla."""
    peft = pytest.importorskip("peft")
    from safetensors.torch import load_file

    def adapted(frozen: str) -> Any:
        torch._dynamo.reset()
        chosen = {"target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
        config = peft.LoraConfig(r=8, task_type="CAUSAL_LM", **chosen)
        run = trainer(tmp_path / frozen, callback(frozen=frozen), peft.get_peft_model(llama(), config))
        run.train()
        return run.model

    plain, model = adapted("high_precision"), adapted("fp8")
    wanted, state = plain.state_dict(), model.state_dict()
    assert state.keys() == wanted.keys() and all(type(x) is torch.Tensor for x in state.values())
    assert all(torch.equal(x, state[name]) for name, x in wanted.items() if "lora" in name)
    kinds = {x.parameter: not x.reason for graph in fp8compile.report(model).graphs for x in graph.frozen}
    held = [name.removesuffix(".weight") for name in kinds if kinds[name]]
    assert {name.removesuffix(".base_layer") for name in held} == LINEARS
    folders = [tmp_path / of / "checkpoint-2" for of in ("fp8", "high_precision")]
    check_weights(*(load_file(folder / "adapter_model.safetensors") for folder in folders))
    for safe in (False, True):
        with pytest.raises(fp8compile.Fp8CompileError, match="restore_frozen_weights"):
            model.merge_and_unload(safe_merge=safe)
    fp8compile.restore_frozen_weights(model)
    at = "base_model.model.model.layers.0.self_attn.q_proj"
    merged = state[f"{at}.base_layer.weight"] + model.get_submodule(at).get_delta_weight("default")
    found = model.merge_and_unload().state_dict()
    assert found.keys() == llama().state_dict().keys()
    assert torch.equal(found["model.layers.0.self_attn.q_proj.weight"], merged)
