"""`benchmarks/device.sh`: parts on a CPU, with packages of a GPU image; limits, failures, what it leaves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from benchmarks import corpus, device, gpu_tests, lines, matmuls, probe, results, todo, train
from fp8compile.devices import catalog
from fp8compile.ir import ops
from fp8compile.ir.grouped import grouped_mm

ROOT = Path(__file__).resolve().parents[2]
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
    made = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "DEVICE": "cpu",
    }
    return {**made, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HYPOTHESIS_NO_PLUGINS": "1", **more}


def unpacked(out: Path, to: Path) -> dict[str, Path]:
    """The files of the one archive in a folder that has nothing else."""
    (archive,) = out.iterdir()
    with tarfile.open(archive) as tar:
        tar.extractall(to, filter="data")
    return {str(file.relative_to(to)): file for file in to.rglob("*") if file.is_file()}


def statuses(files: dict[str, Path]) -> dict[str, Any]:
    return {said["part"]: said["status"] for said in lines.read(files["parts.jsonl"])}


# -- the whole --


@pytest.mark.skipif(not torch.__version__.startswith("2.11."), reason="a rented image has torch 2.11")
@pytest.mark.slow
def test_first_with_the_packages_of_a_bare_image(tmp_path: Path) -> None:
    """Every part ends within the limit, and has results. OUT names the folder `--out`."""
    out = tmp_path / "out"
    out.mkdir()
    env = environment(tmp_path / "image", OUT=str(out))
    command = f'bash "{SCRIPT}" first --limit 540 --out "$OUT"'
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=570
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    files = unpacked(out, tmp_path / "got")
    expected = dict.fromkeys(device.GROUPS["first"], 0) | {"calibrate": "needs a GPU: not begun"}
    assert statuses(files) == expected
    facts, kernel, *rows = lines.read(files["probe.jsonl"])
    assert facts["packages"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert facts["packages"]["transformer_engine"].startswith("PackageNotFoundError")
    assert kernel["generated"] and kernel["fine"] and not kernel["wrong"]
    plain = [row for row in rows if row["kind"] == "per-tensor"]
    assert len(plain) == 12 * 3 * 6 and {row["found"] for row in plain} == {"exact"}
    assert any(row["error"] for row in rows if row["kind"] == "grouped")  # what cannot run on a CPU says so
    assert "calls were made" in files["probe.log"].read_text()
    tests = {line["outcome"] for line in lines.read(files["tests.jsonl"]) if "test" in line}
    assert tests == {gpu_tests.BEGUN, "passed", "skipped"}
    assert ElementTree.parse(files["tests.xml"]).getroot().findall(".//testcase")
    measured = lines.read(files["matmuls.jsonl"])
    assert len(measured[-1]["matmuls"]) == len(list(matmuls.matmuls("tiny")))
    assert measured[-1]["attention"]["kernels"]
    kernels, layers = (results.read([files[f"{name}.jsonl"]])[0] for name in ("kernels", "layers"))
    assert {row["arm"]: row["error"] for row in kernels["rows"]} == {"fp8": None, "inductor": None}
    assert [row["arm"] for row in layers["rows"] if not row["error"]] == ["fp8-delayed"]
    assert any(name.startswith("logs/llama") for name in files)


def made_tokens(path: Path, megabytes: int) -> int:
    pytest.importorskip("tokenizers")
    return corpus.write(path, [ROOT / "benchmarks", ROOT / "benchmarks" / "tests"], megabytes)


@pytest.mark.slow
def test_tokens_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file once and always in the same order, each with an end; what is read is what was written."""
    monkeypatch.setenv(corpus.VARIABLE, str(tmp_path / "a"))
    with pytest.raises(ValueError, match="no tokens in .*/a: python -m benchmarks.corpus makes them"):
        corpus.read()
    number = made_tokens(tmp_path / "a", 1)
    read = corpus.read()
    assert len(read) == number and 50_000 < number < 500_000
    assert int(read.max()) == corpus.END < corpus.VOCABULARY
    files = corpus.files([ROOT / "benchmarks"])
    assert int((read == corpus.END).sum()) == len(files) == len({file.read_bytes() for file in files})
    made_tokens(tmp_path / "b", 1)
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    monkeypatch.setattr(corpus, "MILLION", 1000)  # instead of a million bytes
    assert made_tokens(tmp_path / "a", 3) == len(corpus.read()) == 1500


@pytest.mark.weekly
def test_a_curve_on_real_tokens(tmp_path: Path) -> None:
    """Both arms train on the tokens of a file, from the same weights: losses, tokens/s, and a picture."""
    tokens = tmp_path / "tokens.bin"
    made_tokens(tokens, 1)
    env = environment(tmp_path / "image", FP8COMPILE_TOKENS=str(tokens))
    command = ["bash", SCRIPT, "curve", "--limit", "300", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=320)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    files = unpacked(tmp_path / "out", tmp_path / "got")
    assert statuses(files) == {"curve": 0} and files["loss-cpu.png"].stat().st_size > 10_000
    (found,) = results.read([files["curve.jsonl"]])
    assert [row["arm"] for row in found["rows"]] == ["eager-bf16", "fp8-delayed"]
    for row in found["rows"]:
        assert row["note"].endswith("tokens") and row["tokens_per_s"]["median"] > 0
        assert len(row["losses"]) == found["settings"]["horizon"] and len(row["validation"]) >= 2
        assert row["losses"][0] == pytest.approx(10.8, abs=0.2)  # log(50304): of so many tokens


@pytest.mark.weekly
def test_every_part_on_a_cpu(tmp_path: Path) -> None:
    """Each ends by itself, and has done everything."""
    parts = [part for part in device.PARTS if part not in (*device.GROUPS["first"], "curve", "memory")]
    command = ["bash", SCRIPT, *parts, "--limit", "1500", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        command, env=environment(tmp_path / "image"), capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0 and "missing" not in done.stdout, done.stdout[-4000:] + done.stderr
    assert set(statuses(unpacked(tmp_path / "out", tmp_path / "got")).values()) == {0}


@pytest.mark.weekly
def test_layers_that_are_stopped(tmp_path: Path) -> None:
    """Endless rounds, and no deadline that the command knows of: what was measured stays, nothing else."""
    more = "--arms eager-bf16 --rounds 100000 --budget 100000".split()
    command = ["bash", SCRIPT, "layers", "--limit", "500", "--out", str(tmp_path / "out"), "--", *more]
    with subprocess.Popen(
        command, env=environment(tmp_path / "image"), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = next(line for line in process.stdout if line.startswith("== layers"))
        work = Path(said.split("--keep ")[1].split()[0])
        written = work.with_name("results") / "layers.jsonl"
        waits(process, lambda: written.exists() and len(lines.read(written)) > 3)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    files = unpacked(tmp_path / "out", tmp_path / "got")
    assert process.returncode == 143 and statuses(files) == {"layers": "stopped by SIGTERM"}
    (found,) = results.read([files["layers.jsonl"]])
    (row,) = found["rows"]
    assert row["error"] is None and len(row["tokens_per_s"]["rounds"]) > 1
    assert "eager-bf16  " in files["layers.log"].read_text()  # a table of it
    assert not [process for process in Path("/proc").glob("[0-9]*") if str(work) in environment_of(process)]
    assert not work.exists()


def waits(process: subprocess.Popen[str], until: Callable[[], bool], limit: float = 200) -> None:
    """Until something is so; meanwhile the process runs."""
    end = time.monotonic() + limit
    while not until():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)


def environment_of(process: Path) -> str:
    try:
        return (process / "environ").read_text(errors="replace")
    except OSError:
        return ""


# -- parts of this test --

PARTS = {
    "raises": "raise ValueError('this part is broken')",
    "deaf": (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "for i in range(999):\n    say(i)\n    time.sleep(0.05)"
    ),
    "endless": (
        "todo.plan(['a', 'b'])\ntodo.done('a')\nfor i in range(999):\n    say(i)\n    time.sleep(0.05)"
    ),
    "good": "todo.plan(['a'])\nsay(1)\ntodo.done('a')\nprint('done', '--budget' in sys.argv)",
}
SAYS = """
import signal, sys, time
from benchmarks import todo

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


@pytest.mark.slow
def test_a_part_that_raises_and_one_that_does_not_stop(tmp_path: Path) -> None:
    process = started(tmp_path, "raises", "deaf", "good", "--limit", "12", GIT_DIR="/nowhere")
    said = process.communicate(timeout=60)[0]
    files = unpacked(tmp_path / "out", tmp_path / "got")
    assert statuses(files) == {"raises": 1, "deaf": "stopped at its limit", "good": 0}
    assert process.returncode == 1 and "missing: the git checkout" in said
    assert "missing of deaf: deaf: stopped at its limit" in said and "missing of good" not in said
    assert "ValueError: this part is broken" in files["raises.log"].read_text()
    assert len(files["deaf.jsonl"].read_text().splitlines()) > 10
    assert files["good.jsonl"].read_text() == "1\n" and "done True" in said


def test_stopping_the_whole(tmp_path: Path) -> None:
    process = started(tmp_path, "endless", "good", "--limit", "60")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("== endless"):
            break
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=20)[0]
    files = unpacked(tmp_path / "out", tmp_path / "got")
    expected = {"endless": "stopped by SIGTERM", "good": "stopped by SIGTERM: not begun"}
    assert process.returncode == 143 and statuses(files) == expected
    assert files["endless.jsonl"].read_text().startswith("0\n1\n")
    assert "missing of endless: b\nmissing of good: good: stopped by SIGTERM: not begun" in said


def test_what_was_not_done_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "todo.jsonl"
    todo.plan(["nobody asks"])  # no variable, no file
    monkeypatch.setenv(todo.VARIABLE, str(path))
    todo.plan({"rounds": 2, "later": 1, "broken": 1})
    for name in ("rounds", "rounds"):
        todo.done(name)
    todo.plan({"rounds": 5})  # now it is known how many
    todo.done("broken", "ValueError: no")
    assert todo.missing(path) == ["rounds (2 of 5)", "later", "broken: ValueError: no"]
    assert todo.missing(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (
            "everything",
            {},
            "'everything' is none of probe, tests, matmuls, kernels, layers, settings, blocks, short, ",
        ),
        ("probe", {"DEVICE": "tpu"}, "'tpu' is none of cuda, cpu"),
        ("probe", {"PYTHON": "no-python"}, "missing: no-python"),
        ("gpt2", {}, "missing: triton (a Python package)\nmissing: tqdm (a Python package)"),
        (
            "curve",
            {"DEVICE": "cuda", "FP8COMPILE_TOKENS": "/nowhere"},
            "missing: /nowhere: python -m benchmarks.corpus makes it",
        ),
        pytest.param(
            "probe", {"DEVICE": "cuda", "PYTHONPATH": ""}, "missing: a GPU", marks=pytest.mark.weekly
        ),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, arguments: str, variables: dict[str, str], message: str
) -> None:
    if "GPU" in message and torch.cuda.is_available():
        pytest.skip("there is one")
    env = (
        environment(tmp_path / "image", [name for name in IMAGE if name not in ("triton", "tqdm")])
        | variables
    )
    command = ["bash", SCRIPT, *arguments.split(), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and message in done.stderr


def test_commands_that_train_are_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also that the parts of a slot fit into it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    run = device.Run("x", tmp_path, "cuda", 0.0, [], ["test_a[b]", "test_c"], tmp_path)
    found = {}
    for part, steps in device.PARTS.items():
        for step in steps:
            module, *arguments = run.command(part, step, 100.0)
            if module != "benchmarks.train":
                continue
            args = found[part] = train.parse(arguments)
            assert (args.size, args.torchao, args.caches) == ("full", tmp_path, device.CACHES)
            assert args.budget == (95 if part == "curve" else 80) and len(args.case) == 1
            assert "fp8-delayed" in {arm.name for arm in args.arms}
    assert len(found) == 8 and found["curve"].seconds == 240
    others = [args for part, args in found.items() if part not in ("memory", "curve")]
    assert {(args.rounds, args.steps) for args in others} == {(6, 20)}
    assert run.command("tests", device.PARTS["tests"][0], 100.0)[-3:] == ["--only", "test_a[b]", "test_c"]
    seconds = {
        name: sum(step.seconds for part in parts for step in device.PARTS[part])
        for name, parts in device.GROUPS.items()
    }
    seconds |= {part: sum(step.seconds for step in steps) for part, steps in device.PARTS.items()}
    page = (ROOT / "benchmarks" / "README.md").read_text()
    assert {name: int(said) for name, said in re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.M)} == seconds
    # of 15 minutes, 1.5 go to the start of a machine; with `--only`, tests take a minute at most
    assert seconds["speed"] - 120 + device.ONLY + seconds["wider"] <= 800
    assert seconds["curve"] <= 580  # a command takes ten minutes at most


def test_flags_go_to_the_commands_that_take_them(tmp_path: Path) -> None:
    run = device.Run("x", tmp_path, "cpu", 0.0, ["--rounds", "1"])
    commands = {step.command.split()[0]: run.command("graphs", step, 9.0) for step in device.PARTS["graphs"]}
    assert commands["benchmarks.train"][-2:] == ["--rounds", "1"]
    assert "--rounds" not in commands["benchmarks.gpu_tests"]


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


@pytest.mark.slow
def test_tests_in_several_processes(tmp_path: Path) -> None:
    """One fails, one ends its process, one takes longer than there is time, one file cannot be imported. Of
    two processes, the first has nothing to wait for, and the second waits for the long one until it is
    interrupted."""
    (tmp_path / "test_asked.py").write_text(ASKED)
    (tmp_path / "test_broken.py").write_text("import no_such_package")
    path, junit = tmp_path / "tests.jsonl", tmp_path / "tests.xml"
    command = [sys.executable, "-m", "benchmarks.gpu_tests", str(tmp_path)]
    command += ["--processes", "2", "--budget", "200"]
    command += ["--json", str(path), "--junit", str(junit)]

    def outcomes() -> dict[str, str]:
        return {
            name.rpartition("/")[2].rpartition("::")[2]: line["outcome"]
            for name, line in gpu_tests.outcomes(path).items()
        }

    passed, failed = ["test_many[0]", "test_after", "test_short"], ["test_many[2]", "test_broken.py"]
    begun = ["test_long", "test_that_ends_its_process"]
    expected = (
        dict.fromkeys(passed, "passed")
        | dict.fromkeys(failed, "failed")
        | dict.fromkeys(begun, gpu_tests.BEGUN)
    )
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        waits(process, lambda: outcomes() == expected)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=30)[0]
    assert outcomes() == expected and process.returncode == 1
    assert "test_many[2]: AssertionError: two is wrong" in said and "no_such_package" in said
    assert "another one goes on" in said
    last = said.splitlines()[-1]
    assert "2 failed" in last and f"2 {gpu_tests.BEGUN}" in last and last.endswith(" of 8 tests")
    names = {case.get("name") for case in ElementTree.parse(junit).getroot().iter("testcase")}
    assert {"test_many[2]", "test_after"} <= names  # of processes that were interrupted, too


class Item:
    def __init__(self, nodeid: str):
        self.nodeid = nodeid


def test_only_tests_that_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = [f"tests/a/test_x.py::test_one{end}" for end in ("[p]", "[q]", "_more")]
    names += ["tests/b/test_y.py::test_two[r/test_one]", "tests/b/test_y.py::test_three"]
    asked = {"test_one": [0, 1], "test_one[q]": [1], "test_y.py": [3, 4], "a/test_x.py::test_one_more": [2]}
    asked |= {names[4]: [4], "one": []}
    for name, expected in asked.items():
        assert [i for i, test in enumerate(names) if gpu_tests.named(test, name)] == expected, name
    monkeypatch.setenv(gpu_tests.PART, "0/1")
    monkeypatch.setenv(gpu_tests.LINES, str(tmp_path / "tests.jsonl"))
    monkeypatch.setenv(gpu_tests.ONLY, "test_one[q]\ntest_tree")
    items: list[Any] = [Item(name) for name in names]
    gpu_tests.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == [names[1]]
    assert lines.read(tmp_path / "tests.jsonl")[0] == {"unknown": {"test_tree": "test_three"}}


# -- the matrix of matmuls --


def test_what_the_package_would_call() -> None:
    """On a described H100: scales of rows everywhere, blocks where cuBLASLt takes them. On a B200 also MX."""
    h100, b200 = (catalog.find(name).gpu for name in ("h100", "b200"))
    chosen = {
        (x.kind.name, x.gemm, x.m, x.n, x.k): x.chosen(h100, torch.bfloat16)
        for x in probe.matmuls("full", h100)
    }
    assert len(chosen) == 12 * 3 * 3 + 11 * 3 + 12 * 3 and all(
        chosen[key] for key in chosen if key[0] == "per-tensor"
    )
    assert chosen["blockwise", "fprop", 256, 3072, 9216] and not chosen["blockwise", "fprop", 1024, 1536, 640]
    assert ("rowwise", "wgrad", 768, 768, 8192) in chosen and chosen[
        "grouped, one expert empty", "fprop", 8192, 768, 768
    ]
    assert sum(x.kind.name == "mxfp8" for x in probe.matmuls("full", b200)) == 12 * 3
    empty = [x for x in probe.matmuls("full", h100) if "empty" in x.kind.name and x.gemm == "wgrad"]
    assert all(x.ends[0] == x.ends[1] and x.ends[-1] == x.k and x.k % 16 == 0 for x in empty)


def ours(kind: probe.Kind) -> Any:
    """The package's reference operators, instead of ATen's matmuls, most of which no CPU has."""

    def call(x: Any) -> Tensor:
        if kind.form == "grouped":
            return grouped_mm(
                x.a, x.b, x.a_inv, x.b_inv, x.offs, x.out_dtype, x.fast_accum, [*x.a_block], [*x.b_block]
            )
        return ops.block_product(x.a, x.b, x.a_inv, x.b_inv, x.bias, x.out_dtype, False, x.a_block, x.b_block)

    return call


def one_scale_is_wrong(kind: probe.Kind) -> Any:
    def call(x: Any) -> Tensor:
        wrong = x.a_inv.clone()
        wrong.view(-1)[0] *= 2
        return ours(kind)(x._replace(a_inv=wrong))

    return call


def not_all_is_written(kind: probe.Kind) -> Any:
    def call(x: Any) -> Tensor:
        made = ours(kind)(x)
        made.view(-1)[-1] = torch.nan
        return made

    return call


@pytest.mark.parametrize(
    ("instead", "fine"), [(ours, True), (one_scale_is_wrong, False), (not_all_is_written, False)]
)
def test_matmuls_are_judged(monkeypatch: pytest.MonkeyPatch, instead: Any, fine: bool) -> None:
    monkeypatch.setattr(probe, "KINDS", tuple(kind._replace(call=instead(kind)) for kind in probe.KINDS))
    monkeypatch.setitem(probe.SIZES, "tiny", [(48, 64, 96), (100, 272, 144)])
    monkeypatch.setattr(probe.support, "has_mx", lambda gpu: True)
    rows = list(probe.rows("tiny", "cpu", 0))
    assert len(rows) == 2 * 3 * (4 * 6 + 2)
    assert all(row["fine"] == fine for row in rows), [row for row in rows if row["fine"] != fine][:3]
    assert [row["error"] for row in rows] == [None] * len(rows)
    assert list(probe.rows("tiny", "cpu", 20)) == rows[20:]  # as another process goes on
    table = probe.table(rows)
    assert "per-tensor wgrad" in table and ("wrong results" in table) != fine


@pytest.mark.weekly
def test_the_probe_goes_on_in_another_process(tmp_path: Path) -> None:
    """After an error that leaves the device unusable."""
    path = tmp_path / "probe.jsonl"
    program = (
        "from benchmarks import probe; probe.kernel = probe.facts; probe.unusable = lambda "
        "device: True; probe.main()"
    )
    command = [sys.executable, "-c", program, "--device", "cpu", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    rows = [row for row in lines.read(path) if row["what"] == "matmul"]
    of = sum(len(matmul.kind.outputs) for matmul in probe.matmuls("tiny", None))
    assert "the device is unusable to this process" in done.stdout
    assert f"{of} of {of} calls were made" in done.stdout
    names = [
        tuple(map(str, (row[key] for key in ("kind", "gemm", "m", "n", "k", "out", "bias")))) for row in rows
    ]
    assert len(names) == len(set(names)) == of
