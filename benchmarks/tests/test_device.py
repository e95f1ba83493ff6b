"""`benchmarks/device.sh`: parts on a CPU, with packages of a GPU image; limits, failures, what it leaves."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import blocks, corpus, device, gpu_tests, kernels, lines, machine, matmuls, results, train
from benchmarks.families import FAMILIES
from benchmarks.pool import ROOT

SCRIPT = str(ROOT / "benchmarks" / "device.sh")
# What an image with torch 2.11 for CUDA has, by the names that are imported.
IMAGE = """torch torchgen functorch triton numpy sympy mpmath networkx jinja2 markupsafe tabulate click tqdm
matplotlib PIL kiwisolver contourpy cycler pyparsing dateutil six fontTools packaging pytest py pluggy
iniconfig pygments hypothesis sortedcontainers attr attrs typing_extensions filelock fsspec setuptools
pkg_resources transformers tokenizers safetensors huggingface_hub httpx anyio yaml regex requests nvidia
cuda""".split()
HIDES = """
import sys
from importlib.machinery import PathFinder

class Image(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target)
        known = name.startswith("_") or name in sys.stdlib_module_names or name in {image!r}
        if spec is None or path is not None or known:
            return spec
        where = [spec.origin or "", *(spec.submodule_search_locations or ())]
        return None if any("site-packages" in place for place in where) else spec

sys.meta_path[sys.meta_path.index(PathFinder)] = Image
"""


def environment(folder: Path, packages: list[str] = IMAGE, **more: str) -> dict[str, str]:
    """Variables with which Python finds no packages but these."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(HIDES.format(image=packages))
    made = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    made |= {"DEVICE": "cpu", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HYPOTHESIS_NO_PLUGINS": "1"}
    return {**made, **more}


def unpacked(out: Path, to: Path) -> dict[str, Path]:
    """The files of the one archive in a folder that has nothing else."""
    (archive,) = out.iterdir()
    with tarfile.open(archive) as tar:
        tar.extractall(to, filter="data")
    return {str(file.relative_to(to)): file for file in to.rglob("*") if file.is_file()}


def statuses(files: dict[str, Path]) -> dict[str, Any]:
    commit, *parts = lines.read(files["parts.jsonl"])
    assert commit["commit"] == machine.commit()["commit"]
    return {said["part"]: said["status"] for said in parts}


def ran(folder: Path, limit: int, parts: str, env: dict[str, str]) -> dict[str, Path]:
    """The files of a run that has to end well."""
    command = ["bash", SCRIPT, *parts.split(), "--limit", str(limit), "--out", str(folder / "out")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit + 30)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return unpacked(folder / "out", folder / "got")


@pytest.mark.skipif(not torch.__version__.startswith("2.11."), reason="a rented image has torch 2.11")
@pytest.mark.slow
def test_first_with_the_packages_of_a_bare_image(tmp_path: Path) -> None:
    """Every part ends within the limit, and has results."""
    files = ran(tmp_path, 540, "first", environment(tmp_path / "image"))
    expected = dict.fromkeys(device.GROUPS["first"], 0) | {"calibrate": "needs a GPU: not begun"}
    assert statuses(files) == expected
    tests = {line["outcome"] for line in lines.read(files["tests.jsonl"]) if "test" in line}
    assert tests == {gpu_tests.BEGUN, "passed", "skipped"}
    assert len(lines.read(files["matmuls.jsonl"])[-1]["matmuls"]) == 18
    kernels, layers = (results.read([files[f"{name}.jsonl"]])[0] for name in ("kernels", "layers"))
    assert {row["arm"]: row["error"] for row in kernels["rows"]} == {"fp8": None, "inductor": None}
    assert [row["arm"] for row in layers["rows"] if not row["error"]] == ["fp8-delayed"]
    assert any(name.startswith("logs/llama") for name in files)


@pytest.mark.weekly
def test_every_other_part_on_a_cpu(tmp_path: Path) -> None:
    """Each ends by itself; the curve has losses on real tokens of both arms, and a picture."""
    pytest.importorskip("tokenizers")
    tokens = tmp_path / "tokens.bin"
    assert corpus.write(tokens, [ROOT / "benchmarks", ROOT / "tests"], 1) > 50_000
    parts = [part for part in device.PARTS if part not in (*device.GROUPS["first"], "memory")]
    env = environment(tmp_path / "image", FP8COMPILE_TOKENS=str(tokens))
    files = ran(tmp_path, 1700, " ".join(parts), env)
    assert set(statuses(files).values()) == {0} and files["loss-cpu.png"].stat().st_size > 10_000
    (found,) = results.read([files["curve.jsonl"]])
    assert [row["arm"] for row in found["rows"]] == ["eager-bf16", "fp8-delayed"]
    for row in found["rows"]:
        assert len(row["losses"]) == found["settings"]["horizon"] and len(row["validation"]) >= 2
        assert row["losses"][0] == pytest.approx(10.8, abs=0.2)  # log(50304): of so many tokens


PARTS = {
    "raises": "raise ValueError('this part is broken')",
    "endless": "for i in range(999):\n    say(i)\n    time.sleep(0.05)",
    "good": "say(1)",
}
SAYS = """
import signal, sys, time

def say(i):
    with open(sys.argv[sys.argv.index("--json") + 1], "a") as file:
        print(i, file=file)

"""


def started(folder: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """benchmarks.device with `PARTS` instead of its own; no torch is imported."""
    for name, body in PARTS.items():
        (folder / f"part_{name}.py").write_text(SAYS + body)
    steps = ", ".join(f"{name!r}: (device.Step(1, 'part_{name} {{common}}'),)" for name in PARTS)
    program = "import sys; from benchmarks import device; "
    program += f"device.PARTS = {{{steps}}}; device.FACTS = ''; sys.exit(device.main())"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "DEVICE": "cpu", **more}
    command = [sys.executable, "-c", program, *arguments, "--out", str(folder / "out")]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_part_that_raises_and_stopping_the_whole(tmp_path: Path) -> None:
    process = started(tmp_path, "raises", "endless", "good", "--limit", "60")
    assert process.stdout is not None
    said = next(line for line in process.stdout if line.startswith("== endless"))
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    files = unpacked(tmp_path / "out", tmp_path / "got")
    expected = {"raises": 1, "endless": "stopped by SIGTERM", "good": "stopped by SIGTERM: not begun"}
    assert process.returncode == 143 and statuses(files) == expected and "--budget" in said
    assert "ValueError: this part is broken" in files["raises.log"].read_text()
    assert files["endless.jsonl"].read_text().startswith("0\n1\n")


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ("everything", {}, "'everything' is none of tests, matmuls, kernels, layers, settings, blocks, "),
        ("kernels", {"DEVICE": "tpu"}, "'tpu' is none of cuda, cpu"),
        ("gpt2", {}, "missing: triton (a Python package)\nmissing: tqdm (a Python package)"),
        ("curve", {"DEVICE": "cuda", "FP8COMPILE_TOKENS": "/nowhere"}, "missing: /nowhere: python -m "),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, arguments: str, variables: dict[str, str], message: str
) -> None:
    image = [name for name in IMAGE if name not in ("triton", "tqdm")]
    env = environment(tmp_path / "image", image) | variables
    command = ["bash", SCRIPT, *arguments.split(), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and message in done.stderr


def test_commands_that_train_are_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also that the parts of a slot fit into it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    given = SimpleNamespace(parts=["x"], out=tmp_path, only=["test_a[b]", "test_c"], torchao=tmp_path)
    run = device.Run(given, "cuda", 0.0, [])
    found = {}
    for part, steps in device.PARTS.items():
        for step in steps:
            module, *arguments = run.command(part, step, 100.0)
            if module != "benchmarks.train":
                continue
            args = found[part] = train.parse(arguments)
            assert (args.size, args.torchao, args.caches) == ("full", tmp_path, device.CACHES)
            assert args.budget == (95 if part == "curve" else 80) and len(args.case) == 1
            assert "fp8" in {arm.kind for arm in args.arms}
    assert len(found) == 10 and found["curve"].seconds == 240
    assert run.command("tests", device.PARTS["tests"][0], 100.0)[-3:] == ["--only", "test_a[b]", "test_c"]
    seconds = {part: sum(step.seconds for step in steps) for part, steps in device.PARTS.items()}
    seconds |= {name: sum(seconds[part] for part in parts) for name, parts in device.GROUPS.items()}
    page = (ROOT / "benchmarks" / "README.md").read_text()
    assert {name: int(said) for name, said in re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.M)} == seconds
    # of 15 minutes, 1.5 go to the start of a machine; with `--only`, tests take a minute at most
    assert seconds["speed"] - 120 + device.ONLY + seconds["wider"] <= 800
    assert seconds["curve"] <= 580  # a command takes ten minutes at most


@pytest.mark.parametrize("part", [matmuls, kernels, blocks, gpu_tests])
def test_what_there_is_no_time_for_is_named(monkeypatch, tmp_path: Path, capsys, part: Any) -> None:
    """Two pieces of work are begun within 15 seconds of a clock, since each takes ten."""
    now, path = [0.0], tmp_path / "r.jsonl"
    tests = [SimpleNamespace(nodeid=f"test_{i}") for i in range(9)]

    def work(found: Any) -> Any:
        now[0] += 10
        return found

    def run(args: Any) -> None:  # of `gpu_tests`
        gpu_tests.pytest_collection_modifyitems(tests)
        while now[0] < args.budget:
            gpu_tests.pytest_runtest_logstart(work(tests.pop(0)).nodeid)

    def process(command: list[str]) -> SimpleNamespace:  # of `blocks`
        code = blocks.main(command[3:])
        return SimpleNamespace(wait=lambda: code, kill=lambda: None)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(matmuls, "row", lambda *_: work(dict.fromkeys(matmuls.WAYS, 1.0)))
    monkeypatch.setattr(kernels.Bench, "rows_of", lambda *_: work([]))
    monkeypatch.setattr(blocks, "measured", lambda name, block, *_: work({"family": name, "config": block}))
    monkeypatch.setattr(blocks, "subprocess", SimpleNamespace(Popen=process))
    monkeypatch.setattr(gpu_tests, "run", run)
    monkeypatch.setenv(gpu_tests.LINES, str(path))
    monkeypatch.setenv(gpu_tests.PART, "0/1")
    flags = [] if part in (matmuls, kernels) else ["--processes", "1"]
    part.main(["--device", "cpu", "--budget", "15", "--json", str(path), *flags])
    every = {
        matmuls: [f"{layer} {gemm} {m} x {n} x {k}" for layer, gemm, (m, n, k) in matmuls.matmuls("tiny")],
        kernels: [f"{name} {shape}" for shape in kernels.SHAPES["tiny"] for name in FAMILIES],
        blocks: [f"{name} {list(block)}" for name, block in blocks.points([*blocks.POINTS])],
        gpu_tests: [f"test_{i}" for i in range(9)],
    }[part]
    if part is matmuls:
        random.Random(0).shuffle(every)
    *done, last = lines.read(path)
    named = last["settings"]["skipped_points"] if part is kernels else last["not_done"]
    assert named == every[2:]
    if part is blocks:
        facts = [(row["device"], row["commit"]) for row in done]
        assert facts == [("cpu", machine.commit()["commit"])] * 2
    said = f"not done in time: {', '.join(named[:5])} and {len(named) - 5} more\n"
    assert said in capsys.readouterr().out


# -- tests --

ASKED = """
import os, time, pytest
@pytest.mark.parametrize("i", range(4))
def test_many(i):
    assert i != 2, "two is wrong"
def test_that_ends_its_process():
    os.kill(os.getpid(), 9)
def test_after():
    pass
def test_long():
    time.sleep(100)
def test_short():
    pass
"""


def outcomes(path: Path) -> dict[str, str]:
    found = gpu_tests.outcomes(path)
    return {name.rpartition("/")[2].rpartition("::")[2]: line["outcome"] for name, line in found.items()}


def test_only_tests_that_are_named(tmp_path: Path) -> None:
    """A name without a test is an error."""
    (tmp_path / "test_asked.py").write_text(ASKED)
    path = tmp_path / "tests.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu_tests", str(tmp_path), "--json", str(path)]
    command += ["--processes", "1", "--only", "test_many[1]", "short", "nothing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert outcomes(path) == {"test_many[1]": "passed", "test_short": "passed"}
    assert done.returncode == 1
    assert done.stdout.endswith("--only: no test is named 'nothing'\n2 passed of 2 tests\n")


@pytest.mark.slow
def test_tests_in_several_processes(tmp_path: Path) -> None:
    """One fails, one ends its process, one takes longer than there is time, one file cannot be imported. Of
    two processes, the first has nothing to wait for, and the second waits for the long one until it is
    interrupted."""
    (tmp_path / "test_asked.py").write_text(ASKED)
    (tmp_path / "test_broken.py").write_text("import no_such_package")
    path = tmp_path / "tests.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu_tests", str(tmp_path)]
    command += ["--processes", "2", "--budget", "200", "--json", str(path)]
    expected = dict.fromkeys(["test_many[0]", "test_after", "test_short"], "passed")
    expected |= dict.fromkeys(["test_many[2]", "test_broken.py"], "failed")
    expected |= dict.fromkeys(["test_long", "test_that_ends_its_process"], gpu_tests.BEGUN)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 200
        while outcomes(path) != expected:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=30)[0]
    assert outcomes(path) == expected and process.returncode == 1
    assert "test_many[2]: AssertionError: two is wrong" in said and "no_such_package" in said
    assert "another one goes on" in said
    left, last = said.splitlines()[-2:]
    assert left.startswith("not done in time: ") and left.endswith("test_many[3]") and left.count("::") == 2
    assert "2 failed" in last and f"2 {gpu_tests.BEGUN}" in last and last.endswith(" of 8 tests")
