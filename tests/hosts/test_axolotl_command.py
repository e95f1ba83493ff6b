"""`axolotl train` itself, with a YAML file, a tiny model and Inductor's code. Axolotl 0.19 does not start
with a newer TRL than the one that it pins (`No module named 'trl.experimental.prm'`): `make axolotl` installs
those, and runs this."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.small import llama, saved, tokenizer, vanilla

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = """
base_model: ./model
plugins: [fp8compile.integrations.axolotl.FP8Plugin]
datasets: [{path: ./data.jsonl, ds_type: json, type: completion, field: text}]
dataset_prepared_path: ./prepared
output_dir: ./out
val_set_size: 0
sequence_len: 64
micro_batch_size: 2
gradient_accumulation_steps: 1
max_steps: 2
logging_steps: 1
save_steps: 2
learning_rate: 0.0001
optimizer: adamw_torch
lr_scheduler: constant
bf16: false
fp16: false
tf32: false
attn_implementation: sdpa
special_tokens: {pad_token: "1"}
"""


@pytest.fixture(scope="module", autouse=True)
def importable() -> None:
    pytest.importorskip("axolotl")
    for name in ("axolotl.cli.main", "axolotl.core.trainers.trl"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"axolotl train cannot be started with what is installed ({error}): make axolotl")


def train(folder: Path, *arguments: str, **section: Any) -> subprocess.CompletedProcess[str]:
    """`axolotl train config.yaml` in a folder with a model and data; `section` is the key fp8compile."""
    llama().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    lines = [{"text": " ".join(str((7 * i + 3 * j) % 256) for j in range(60))} for i in range(16)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(f"{SETTINGS}fp8compile: {json.dumps(section)}\n")  # JSON is YAML
    variables = {**os.environ, "AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}"  # of the launcher
    axolotl = [sys.executable, "-c", "from axolotl.cli.main import main; main()"]
    command = [*axolotl, "train", "config.yaml", *arguments]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("launcher", [(), ("--launcher", "python")], ids=["accelerate", "python"])
def test_two_steps_in_fp8(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    ended = train(tmp_path, *launcher, recipe="delayed", measure_every=2)
    assert ended.returncode == 0, ended.stderr[-3000:]
    loaded = "Plugin loaded successfully: fp8compile.integrations.axolotl.FP8Plugin"
    assert loaded in ended.stdout + ended.stderr
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    first, second = [row for row in state["log_history"] if "loss" in row]
    assert first["fp8/matmuls"] == 21 and first["fp8/share"] == pytest.approx(5 / 6)
    assert first["fp8/gradient/amax"] > 0
    assert 20 < second["fp8/input/sqnr"] < 50 and 0 < second["loss"] < first["loss"]
    names = vanilla(llama(), tmp_path / "vanilla")
    assert saved(tmp_path / "out") == saved(tmp_path / "out" / "checkpoint-2") == names


def test_a_wrong_key_ends_the_command(tmp_path: Path) -> None:
    ended = train(tmp_path, "--launcher", "python", recpie="delayed")
    assert ended.returncode != 0 and not (tmp_path / "out").exists()
    assert "unknown fp8 option 'recpie' (value 'delayed'). Did you mean 'recipe'?" in ended.stderr
