"""`python -m benchmarks.train`: its cases, tiny, on a CPU; its arms, its errors, and the script that runs it on a device."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import arms, kernels, results, train
from benchmarks.cases import CASES
from benchmarks.cases.base import Fit, parse_case

ROOT = Path(__file__).resolve().parents[2]
STUB = Path(__file__).parent / "transformer_engine_stub"


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m benchmarks.train` with `arguments`."""
    command = [sys.executable, "-m", "benchmarks.train", *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Every case once, tiny and interpreted, with the delayed recipe; results by name."""
    folder = tmp_path_factory.mktemp("results")
    variant = "llama-8b-layers:ckpt=1,accum=8"
    cases = [part for name in [*CASES, variant] for part in ("--case", name)]
    flags = "--arms fp8-delayed --rounds 2 --steps 1 --warmup 1 --device cpu --interpreted --no-warm-compile".split()
    done = run(*cases, *flags, "--json", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return {result["name"]: result for result in results.read([folder])}


@pytest.mark.weekly
@pytest.mark.parametrize("name", CASES)
def test_case(measured, name):
    result = measured[name]
    assert result["size"] == "tiny" and result["device"]["name"] == "cpu"
    (row,) = result["rows"]
    assert row["error"] is None
    assert row["tokens_per_s"]["median"] > 0 and len(row["tokens_per_s"]["rounds"]) == 2
    assert row["step_ms"]["total"] >= row["step_ms"]["forward"] > 0 and row["step_ms"]["backward"] > 0
    assert row["fp8"]["proof"].startswith("not applicable: emulated")
    assert row["fp8"]["decisions"]["fp8"] >= 3
    assert row["kernels"] is None and row["memory"] is None
    # a warm-up, and two rounds of one step with an untimed one before it, except at the start of `loss`; `linear` has no loss
    assert len(row["losses"]) == {"linear": 0, "loss": 4}.get(name, 5)


@pytest.mark.weekly
def test_variant(measured):
    result = measured["llama-8b-layers:ckpt=1,accum=8"]
    assert result["variant"]["ckpt"] == 1 and result["rows"][0]["tokens"] == 128  # two micro-batches of 64 when tiny


@pytest.mark.weekly
def test_training_goes_on_in_the_loss_case(measured):
    row = measured["loss"]["rows"][0]
    (first, before), (second, after) = row["validation"]
    assert (first, second) == (2, 4)  # steps since the start, warm-up and lead among them
    assert after < before


@pytest.mark.weekly
def test_arms_in_turn_and_one_that_cannot_be_imported(tmp_path):
    """One arm runs at a time; an arm whose package cannot be imported becomes a row with an error."""
    broken = tmp_path / "broken" / "torchao"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('no such torchao')\n")
    path = tmp_path / "r.json"
    done = run(
        *"--case ffn-half --arms eager-bf16,torchao-tensorwise,te-delayed --rounds 1 --steps 1 --warmup 1 --device cpu".split(),
        *("--rebuild", "--interpreted", "--torchao", broken.parent, "--json", path),
        PYTHONPATH=f"{STUB}:{ROOT}",
    )
    assert done.returncode == 0, done.stderr
    eager, torchao, te = json.loads(path.read_text())["rows"]
    assert eager["ratio"]["eager_bf16"] == 1.0 and eager["ratio"]["compiled_bf16"] is None
    assert torchao["error"] == "ImportError: no such torchao"
    assert "torchao-tensorwise: ImportError: no such torchao" in done.stdout
    assert te["error"] is None and te["kind"] == "te" and te["tokens_per_s"]["median"] > 0


TRAIN = {
    "--case gpt5": "no case 'gpt5'",
    "--case dit --arms bf16,fp4": "no arm 'fp4'",
    "--case dit:depth=3": "case dit has no variant 'depth'",
    "--case dit:batch=many": "dit:batch=many is not a whole number",
    "--case dit:compile=twice": "one of whole, block",
    "--case dit:batch": "a variant is written key=value",
    "--case dit --rounds 0": "not a whole number of at least 1",
    "--case dit --torchao nowhere": "no such file or folder",
    "--case loss --rebuild": "goes on training",
    "--case all --json one.json": "several cases need a folder",
}
KERNELS = {
    "--family gelu softmax": "no family 'softmax'",
    "--shape 4096": "written 32768x4096",
    "--shape 0x16": "written 32768x4096",
    "--runs 29": "at least 30",
    "--torchao nowhere": "no such file or folder",
}


@pytest.mark.parametrize("arguments", [*TRAIN, *KERNELS])
def test_errors_are_one_line(arguments, capsys):
    main = train.main if arguments in TRAIN else kernels.main
    with pytest.raises(SystemExit) as stopped:
        main([*arguments.split(), "--device", "cpu"])
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert (TRAIN | KERNELS)[arguments] in captured.err and captured.err.count("\n") == 1 and not captured.out


# -- cases and arms ----------------------------------------------------------------------------------------------------


def test_full_points():
    """Full sizes can be listed anywhere: nothing is allocated before a point is built."""
    for name, case in CASES.items():
        points = case.points("full", case.variant({}), Fit(141 << 30, 7))
        assert points and all(point.tokens >= 8192 for point in points), name


def test_as_many_layers_as_fit():
    case, variant, _ = parse_case("llama-8b-layers", CASES)

    def layers(gigabytes: int, arms: int) -> str:
        return case.points("full", variant, Fit(gigabytes << 30, arms))[0].note

    assert layers(141, 1) == "32 layers"
    assert layers(141, 7) == "9 layers"
    assert layers(80, 7) == "5 layers"


def test_never_slower_map_has_216_cells():
    case, variant, name = parse_case("linear:grid=6", CASES)
    points = case.points("full", variant, Fit(0, 1))
    assert name == "linear:grid=6" and len({p.label for p in points}) == 216
    halves = [case.points("full", {**variant, "part": part}, Fit(0, 1)) for part in (1, 2)]
    assert sorted(p.label for half in halves for p in half) == sorted(p.label for p in points)


def test_autotuning_with_accumulation_has_no_cuda_graphs():
    arm = arms.ARMS["bf16-max-autotune"]
    assert arms.settings(arm, 1, False) == {"mode": "max-autotune"}
    assert arms.settings(arm, 8, False) == {"mode": "max-autotune-no-cudagraphs"}
    assert arms.settings(arms.ARMS["eager-bf16"], 1, False) is None


def test_torchao_from_a_wheel(tmp_path):
    with zipfile.ZipFile(tmp_path / "torchao-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torchao/__init__.py", "")
    folder = arms.torchao_folder(tmp_path, tmp_path / "unpacked")
    assert (folder / "torchao" / "__init__.py").is_file()
    assert arms.torchao_folder(folder, tmp_path) == folder
    with pytest.raises(ValueError, match="neither a torchao wheel"):
        arms.torchao_folder(tmp_path / "unpacked", tmp_path)


# -- the script for a device -------------------------------------------------------------------------------------------


def test_device_script_usage():
    script = ROOT / "benchmarks" / "device.sh"
    done = subprocess.run(["bash", str(script), "everything"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and done.stderr.startswith("usage:") and done.stderr.count("\n") == 1


def test_device_script_measures_kernels_first(tmp_path):
    """Runs the script with a stand-in for Python that records its arguments."""
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(f'#!/usr/bin/env bash\necho "$*" >>{asked}\n')
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python), "DEVICE": "cpu", "OUT": str(tmp_path / "out")}
    command = ["bash", str(ROOT / "benchmarks" / "device.sh"), "kernels"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    _, _, first, *rest = [line for line in asked.read_text().splitlines() if line]
    assert first.startswith("-m benchmarks.kernels --json ") and first.endswith("--budget 150 --device cpu --size tiny")
    assert [line.split()[3] for line in rest if "benchmarks.train" in line] == ["linear", "linear:grid=6"]
    _, at_most, left = re.search(r"benchmarks\.kernels (.*)\(at most (\d+) s, (\d+) s left\)", done.stdout).groups()
    assert at_most == "200" and 400 < int(left) <= 470  # a slow machine takes seconds to start
