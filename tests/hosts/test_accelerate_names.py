"""Accelerate by names alone: its backends, its launcher with a config file, its names for FP8 recipes."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp8compile
from fp8compile.errors import OptionError
from tests.hosts.small import llama, saved, tokens, vanilla

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
NAMES = "fp8compile.integrations.accelerate"  # after its import, Accelerate knows the name "fp8"


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with this package on the path."""
    settings = ("ACCELERATE_", "FP8COMPILE_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    environment = {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(folder)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


# -- the list of backends --


def test_registered_backends_are_accepted_and_nonsense_is_refused() -> None:
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    from fp8compile.integrations.accelerate import accept_registered_backends

    accept_registered_backends()  # twice is once
    assert TorchDynamoPlugin(backend="fp8").to_kwargs() == {"backend": "fp8"}
    assert DynamoBackend("FP8") is DynamoBackend("FP8") is pickle.loads(pickle.dumps(DynamoBackend("FP8")))
    assert copy.deepcopy(DynamoBackend("FP8")) is DynamoBackend("FP8")
    assert "FP8" in DynamoBackend and "FP8" not in DynamoBackend.list()
    assert DynamoBackend("INDUCTOR") is DynamoBackend.INDUCTOR
    for nonsense in ("FP9", "Fp8", "", 8, None):
        with pytest.raises(ValueError, match="is not a valid DynamoBackend"):
            DynamoBackend(nonsense)


@pytest.mark.usefixtures("interpreted")
def test_an_accelerator_by_the_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    importlib.import_module(NAMES)

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
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.unwrap_model(model, keep_torch_compile=False).save_pretrained(tmp_path / "saved")
    names = vanilla(llama(), tmp_path / "vanilla")
    assert saved(tmp_path / "saved") == names == saved(tmp_path / "state")
    accelerator.save_model(model, str(tmp_path / "wrapped"))  # with any backend: docs/hosts.md
    assert saved(tmp_path / "wrapped") == [f"_orig_mod.{name}" for name in names]
    after = {name: p.detach().clone() for name, p in bare.named_parameters()}
    with torch.no_grad():
        for p in bare.parameters():
            p.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert all(torch.equal(p, after[name]) for name, p in bare.named_parameters())


# -- the launcher --

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
LAUNCH = ("-m", NAMES, "launch")


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(("--cpu", "--dynamo_backend", "fp8", "-m", "train"), marks=pytest.mark.weekly),
        ("--config_file", "config.yaml", "scripts/train.py"),
    ],
)
def test_launch(how: tuple[str, ...], tmp_path: Path) -> None:
    """The script knows nothing of FP8. It imports a module beside it, as with `python train.py`."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    text = "import helper, sys\nfrom accelerate.utils import TorchDynamoPlugin\n"
    text += "print('found', TorchDynamoPlugin().backend, __name__, sys.argv[1:])\n"
    for folder in (tmp_path, tmp_path / "scripts"):
        folder.mkdir(exist_ok=True)
        (folder / "helper.py").write_text("")
        (folder / "train.py").write_text(text)
    done = python(*LAUNCH, *how, "--lr", "3", folder=tmp_path)
    assert "found FP8 __main__ ['--lr', '3']" in done.stdout, done.stderr[-3000:]


def test_wrong_launches_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from fp8compile.integrations.accelerate import _main as main

    for arguments, why in (
        (["launch", "--cpu", "--dynamo_backend", "fp9", "train.py"], "invalid choice: 'fp9'"),
        (["lunch"], "usage: python -m fp8compile.integrations.accelerate launch"),
        ([], "usage: python -m fp8compile.integrations.accelerate launch"),
    ):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2 and why in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0 and capsys.readouterr().out.startswith("usage: ")


def test_accelerates_own_launcher_refuses_the_name(tmp_path: Path) -> None:
    """docs/hosts.md says so. If this fails, it may work now."""
    done = python(
        "-m", "accelerate.commands.launch", "--cpu", "--dynamo_backend", "fp8", "train.py", folder=tmp_path
    )
    assert done.returncode != 0 and "invalid choice: 'fp8'" in done.stderr


# -- names of recipes --


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
    for field in dataclasses.fields(theirs.TERecipeKwargs):  # each has a counterpart
        recipe_options({field.name: getattr(asked, field.name)})


def test_a_plugin_checks_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a config file become its own; without any, the policy of the environment is read."""
    from fp8compile.integrations.accelerate import FP8Plugin, recipe_options

    section = {"backend": "TE", "fp8_format": "E4M3", "amax_history_length": 64}
    section |= {"amax_compute_algorithm": "max", "use_autocast_during_eval": True}
    options = recipe_options({**section, "override_linear_precision": [False, False, True]})
    assert (options["eval"], options["amax_history_len"], options["amax_compute_algo"]) == ("fp8", 64, "max")
    plugin = FP8Plugin(options=options, fullgraph=True)
    assert plugin.to_kwargs() == {"backend": "fp8", "options": options, "fullgraph": True}
    with pytest.raises(OptionError, match="'recipe' must be one of"):
        FP8Plugin(options={"recipe": "delaid"})
    with pytest.raises(OptionError, match="take accelerate's TorchDynamoPlugin; got 'eager'"):
        FP8Plugin(backend="eager")
    monkeypatch.setenv("FP8COMPILE_POLICY", "no-such-policy")
    with pytest.raises(OptionError, match="no-such-policy"):
        FP8Plugin()
