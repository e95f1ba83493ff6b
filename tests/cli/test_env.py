"""The command `env`, and the variables that it knows."""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path

import pytest
import torch

import fp8compile
from fp8compile.devices import catalog
from fp8compile.logs import VARIABLES

env = importlib.import_module("fp8compile.cli.env")  # `cli.env` is the command
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A home folder, no environment variables except those that a test sets, and no GPU."""
    for name in [name for name in os.environ if name.startswith(env.PREFIXES) or name in env.OTHERS]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return tmp_path


def test_env(machine, monkeypatch, run):
    monkeypatch.setenv("FP8COMPILE_DUMP", f"{machine}/dumps")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{machine}-other/cache")
    monkeypatch.setenv("FP8COMPILE_POLCY", "llama")
    monkeypatch.setenv("SECRET", "not for others")
    rows = dict(line.split(None, 1) for line in run("env")[0].splitlines())
    assert rows["fp8compile"] == fp8compile.__version__ and rows["torch"] == torch.__version__
    assert rows["policy"] == "default" and rows["GPU"].startswith("none that torch sees")
    assert rows["FP8COMPILE_DUMP"] == "~/dumps"
    assert rows["TORCHINDUCTOR_CACHE_DIR"] == f"{machine}-other/cache"
    assert "Did you mean 'FP8COMPILE_POLICY'" in rows["FP8COMPILE_POLCY"] and "SECRET" not in rows


def test_env_as_json_and_of_what_fails(machine, monkeypatch, run):
    """A policy that is not valid, and a GPU that does not answer, are rows of the table."""

    def fail(device):
        raise RuntimeError("CUDA error: no device\nmore about it")

    monkeypatch.setenv("FP8COMPILE_POLICY", "~/fp8.toml")
    (machine / "fp8.toml").write_text('device = "h100"')
    found = json.loads(run("env --json")[0])
    assert found["policy"] == "~/fp8.toml, for the device 'h100'" and found["gpus"] == []
    assert found["environment"] == {"FP8COMPILE_POLICY": "~/fp8.toml"}
    assert found["versions"]["torch"] == torch.__version__
    (machine / "fp8.toml").unlink()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    out, _ = run("env")
    assert re.search(r"^policy +not valid: .*~/fp8.toml.* does not exist", out, re.MULTILINE)
    assert str(machine) not in out
    assert re.search(r"^GPU 0 +RuntimeError: CUDA error: no device$", out, re.MULTILINE)


@pytest.mark.parametrize(
    "key, says",
    [
        ("h200", ["NVIDIA H200, compute capability 9.0, 141 GiB", "blockwise; mxfp8 is emulated in bf16",
                  "'h200', shipped"]),
        ("b200", ["compute capability 10.0",
                  "FP8: delayed, tensorwise, rowwise, rowwise_with_gw_hp, blockwise, mxfp8\n"]),
        ("a100", ["compute capability 8.0", "no FP8: models are compiled in high precision"]),
        ("mi300x", ["architecture gfx942", "FP8: delayed", "mxfp8 is emulated in bf16\n"]),
    ],
)  # fmt: skip
def test_env_of_gpus(machine, monkeypatch, run, key, says):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: catalog.find(key).gpu)
    out, _ = run("env")
    assert all(text in out for text in says) and len(re.findall("^GPU 1 ", out, re.MULTILINE)) == 3


def test_every_variable_is_in_the_list_and_in_the_documentation():
    sources = [*ROOT.glob("fp8compile/**/*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]
    text = "".join(file.read_text(encoding="utf-8") for file in sources)
    assert set(re.findall(r"\bFP8COMPILE_[A-Z]+\b", text)) == set(VARIABLES)
    documented = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in documented for name in VARIABLES)
