"""Accelerate by names alone: its list of backends, its launcher with a config file, its names for FP8 recipes."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8compile
from fp8compile.errors import OptionError
from tests.hosts.small import llama, saved, tokens, vanilla

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with this package and the tests on the path. Graphs are interpreted by what the script does."""
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FP8COMPILE_"))}
    environment = {**clean, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder), **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


# --- the list of backends -----------------------------------------------------------------------------


def test_accelerate_has_a_list_of_backends(tmp_path: Path) -> None:
    """Why the module is needed. If this fails, it may not be needed any more."""
    done = python("-c", "from accelerate.utils import TorchDynamoPlugin; TorchDynamoPlugin(backend='fp8')", folder=tmp_path)
    assert "'FP8' is not a valid DynamoBackend" in done.stderr


def test_registered_backends_are_accepted_and_nonsense_is_refused() -> None:
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    from fp8compile.integrations.accelerate import accept_registered_backends

    accept_registered_backends()  # twice is once
    assert TorchDynamoPlugin(backend="fp8").to_kwargs() == {"backend": "fp8"}
    assert DynamoBackend("FP8") is DynamoBackend("FP8") is pickle.loads(pickle.dumps(DynamoBackend("FP8")))
    assert copy.deepcopy(DynamoBackend("FP8")) is DynamoBackend("FP8") != DynamoBackend.NO
    assert "FP8" in DynamoBackend and "FP8" not in DynamoBackend.list() and DynamoBackend("INDUCTOR") is DynamoBackend.INDUCTOR
    for nonsense in ("FP9", "Fp8", "", 8, None):
        with pytest.raises(ValueError, match="is not a valid DynamoBackend"):
            DynamoBackend(nonsense)
    with pytest.raises(ValueError, match="'FP9' is not a valid DynamoBackend"):
        TorchDynamoPlugin(backend="fp9")


@pytest.mark.usefixtures("interpreted")
def test_an_accelerator_by_the_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    import fp8compile.integrations.accelerate

    monkeypatch.setenv("FP8COMPILE_POLICY", str(policy := tmp_path / "policy.toml"))
    policy.write_text('[defaults]\nrecipe = "rowwise"\n')
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, dynamo_backend="fp8")
    model, optimizer = accelerator.prepare(bare := llama(), torch.optim.AdamW(bare.parameters()))
    losses = []
    for step in range(2):
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    report = fp8compile.report(model)
    assert len({m.fqn for m in report.matmuls if m.decision == "fp8"}) == 7 and losses[0] != losses[1]
    assert {m.recipe for m in report.matmuls if m.decision == "fp8"} == {"rowwise"}
    accelerator.save_model(model, str(tmp_path / "saved"))
    accelerator.save_state(str(tmp_path / "state"))
    names = vanilla(llama(), tmp_path / "vanilla")
    assert saved(tmp_path / "saved") == names == saved(tmp_path / "state")
    after = {name: p.detach().clone() for name, p in bare.named_parameters()}
    with torch.no_grad():
        for p in bare.parameters():
            p.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert all(torch.equal(p, after[name]) for name, p in bare.named_parameters())


# --- the launcher -------------------------------------------------------------------------------------

SCRIPT = """
import json, sys, torch, fp8compile
from accelerate import Accelerator
from tests.hosts.small import llama, tokens
from tests.support.harness import interpreted

accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(bare := llama(), torch.optim.AdamW(llama().parameters()))
with interpreted():
    for step in range(2):
        accelerator.backward(model(input_ids=tokens(step), labels=tokens(step)).loss)
report = fp8compile.report(model)
accelerator.save_model(model, sys.argv[1])
facts = {"share": report.fp8_flop_fraction, "recipes": sorted({m.recipe for m in report.matmuls if m.decision == "fp8"})}
print("facts", json.dumps({**facts, "arguments": sys.argv[2:], "name": __name__, "local": "helper" in sys.modules}))
"""
CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: 'no'
use_cpu: true
num_machines: 1
num_processes: 1
debug: false
dynamo_config:
  dynamo_backend: FP8
"""
LAUNCH = ("-m", "fp8compile.integrations.accelerate", "launch")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "policy.toml").write_text('[defaults]\nrecipe = "tensorwise"\n')
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "helper.py").write_text("")
    path = tmp_path / "scripts" / "train.py"
    path.write_text("import helper" + SCRIPT)  # a module beside the script, as with `python train.py`
    return path


def facts(done: subprocess.CompletedProcess[str]) -> Any:
    import json

    (line,) = [line for line in done.stdout.splitlines() if line.startswith("facts ")] or [f"facts null {done.stderr[-3000:]}"]
    return json.loads(line.removeprefix("facts "))


@pytest.mark.parametrize("flags", [("--config_file", "config.yaml"), ("--cpu", "--dynamo_backend", "fp8")], ids=["file", "flag"])
def test_launch(tmp_path: Path, script: Path, flags: tuple[str, ...]) -> None:
    """The script knows nothing of FP8."""
    ours = (str(script), "saved", "--lr", "3")
    done = python(*LAUNCH, *flags, *ours, folder=tmp_path, FP8COMPILE_POLICY=str(tmp_path / "policy.toml"))
    found = facts(done)
    assert found["share"] == pytest.approx(5 / 6) and found["recipes"] == ["tensorwise"], done.stderr[-3000:]
    assert (found["arguments"], found["name"], found["local"]) == (["--lr", "3"], "__main__", True)
    assert saved(tmp_path / "saved") == vanilla(llama(), tmp_path / "vanilla")


def test_launch_of_a_module_on_two_processes(tmp_path: Path) -> None:
    """`-m train` and torchrun's processes know the name, too."""
    text = "import sys, accelerate\nfrom accelerate import Accelerator\n"
    text += "a = Accelerator(cpu=True)\n"
    text += "print('found', a.num_processes, a.state.dynamo_plugin.to_kwargs(), __name__, sys.argv[1:])\n"
    (tmp_path / "train.py").write_text(text)
    flags = ("--cpu", "--num_processes", "1", "--dynamo_backend", "fp8", "--dynamo_use_regional_compilation", "-m")
    done = python(*LAUNCH, *flags, "train", "--lr", "3", folder=tmp_path)
    assert "found 1 {'backend': 'fp8'} __main__ ['--lr', '3']" in done.stdout, done.stderr[-3000:]


def test_wrong_launches_are_refused(tmp_path: Path, script: Path) -> None:
    done = python(*LAUNCH, "--cpu", "--dynamo_backend", "fp9", str(script), folder=tmp_path)
    assert done.returncode == 2 and "invalid choice: 'fp9'" in done.stderr
    done = python("-m", "fp8compile.integrations.accelerate", "lunch", folder=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("usage: python -m fp8compile.integrations.accelerate launch")
    missing = {"FP8COMPILE_POLICY": str(tmp_path / "no-such.toml")}
    done = python(*LAUNCH, "--config_file", "config.yaml", str(script), "saved", folder=tmp_path, **missing)
    assert done.returncode != 0 and "no-such.toml" in done.stderr and "FP8COMPILE_POLICY" in done.stderr


def test_accelerates_own_launcher_refuses_the_name(tmp_path: Path) -> None:
    """docs/hosts.md says so. If this fails, it may work now."""
    done = python("-m", "accelerate.commands.launch", "--cpu", "--dynamo_backend", "fp8", "train.py", folder=tmp_path)
    assert done.returncode != 0 and "invalid choice: 'fp8'" in done.stderr


# --- names of recipes ---------------------------------------------------------------------------------


def test_a_recipe_object_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine is not installed, so its check is left out."""
    import accelerate.utils.dataclasses as theirs

    from fp8compile.integrations.accelerate import recipe_options

    monkeypatch.setattr(theirs, "is_transformer_engine_available", lambda: True)
    assert recipe_options(theirs.TERecipeKwargs()) == {
        "recipe": "delayed",
        "eval": "high_precision",
        "margin": 0,
        "interval": 1,
        "fp8_format": "hybrid",
        "amax_history_len": 1024,
        "amax_compute_algo": "most_recent",
        "override_linear_precision": (False, False, False),
    }
    asked = theirs.TERecipeKwargs(fp8_format="E4M3", amax_history_len=32, use_mxfp8_block_scaling=True)
    found = recipe_options(asked)
    assert (found["recipe"], found["fp8_format"], found["amax_history_len"]) == ("mxfp8", "e4m3", 32)
    fields = {field.name for field in dataclasses.fields(theirs.TERecipeKwargs)}
    for name in fields:  # each has a counterpart
        recipe_options({name: getattr(theirs.TERecipeKwargs(fp8_format="E4M3"), name)})


def test_a_plugin_with_the_options_of_a_config_file() -> None:
    from fp8compile.integrations.accelerate import FP8Plugin, recipe_options

    section = {"backend": "TE", "fp8_format": "E4M3", "amax_history_length": 64, "amax_compute_algorithm": "max"}
    options = recipe_options({**section, "override_linear_precision": [False, False, True], "use_autocast_during_eval": True})
    plugin = FP8Plugin(options=options)
    assert plugin.to_kwargs()["options"] == options
    assert (options["eval"], options["amax_history_len"], options["amax_compute_algo"]) == ("fp8", 64, "max")


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ({"backend": "MSAMP"}, "accelerate's 'backend' is 'MSAMP' .*Leave it out"),
        ({"opt_level": "O2"}, "accelerate's 'opt_level' has no counterpart: .*fp8compile.optim.AdamW"),
        ({"enable_fsdp_float8_all_gather": True}, "'enable_fsdp_float8_all_gather' has no counterpart: call fp8compile.distributed"),
        ({"pad_inner_dim": True}, "'pad_inner_dim' has no counterpart: .*Leave it out"),
        ({"fp8_format": "E5M2"}, "'fp8_format': 'E5M2' .*Write 'HYBRID'"),
        ({"fp8_format": "E3M4"}, "'fp8_format' must be one of 'hybrid', 'e4m3'"),
        ({"amax_history": 3}, "no key 'amax_history' .*Did you mean 'amax_history_len'"),
        ({"amax_history_len": 3, "amax_history_length": 4}, "'amax_history_length' is given twice, as 3 and as 4"),
        ({"use_autocast_during_eval": "yes"}, "'use_autocast_during_eval' must be True or False"),
        ({"margin": 1.5}, "'margin' must be an integer"),
        (3, "'recipe' must be a dict of accelerate's names"),
    ],
)
def test_a_key_without_a_counterpart_is_named(recipe: Any, why: str) -> None:
    from fp8compile.integrations.recipe_names import recipe_options

    with pytest.raises(OptionError, match=why):
        recipe_options(recipe)
