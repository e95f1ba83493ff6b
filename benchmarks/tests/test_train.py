"""`python -m benchmarks.train`: its cases, tiny, on a CPU; its arms, errors, and what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks import arms, kernels, lines, results, train
from benchmarks.cases import CASES, loss
from benchmarks.cases.base import Fit, Task
from fp8compile.config import options
from fp8compile.config.policy import load
from fp8compile.optim import AdamW

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
    flags = (
        "--arms fp8-delayed --rounds 2 --steps 1 --warmup 1 --device cpu --interpreted --no-warm-compile"
    ).split()
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
    # a warm-up, and two rounds of one step with an untimed one before it, except at the start of `loss`;
    # `linear` has no loss
    assert len(row["losses"]) == {"linear": 0, "loss": 4}.get(name, 5)
    if name == "loss":  # its training goes on: steps since the start, warm-up and lead among them
        (first, before), (second, after) = row["validation"]
        assert (first, second) == (2, 4) and after < before


@pytest.mark.weekly
def test_variant(measured):
    result = measured["llama-8b-layers:ckpt=1,accum=8"]
    # two micro-batches of 64 when tiny
    assert result["variant"]["ckpt"] == 1 and result["rows"][0]["tokens"] == 128


@pytest.mark.weekly
def test_arms_in_turn_and_one_that_cannot_be_imported(tmp_path):
    """One arm runs at a time; an arm whose package cannot be imported becomes a row with an error."""
    broken = tmp_path / "broken" / "torchao"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('no such torchao')\n")
    path = tmp_path / "r.json"
    done = run(
        *(
            "--case ffn-half --arms eager-bf16,torchao-tensorwise,te-delayed --rounds 1 --steps "
            "1 --warmup 1 --device cpu"
        ).split(),
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
    "--case dit --rounds 0": "not a whole number of at least 1",
    "--case dit --torchao nowhere": "no such file or folder",
    "--case loss --rebuild": "goes on training",
    "--case loss --seconds 9 --rounds 2": "--seconds: instead of --rounds",
    "--case all --json one.json": "several cases need a folder",
}
KERNELS = {
    "--family gelu softmax": "no family 'softmax'",
    "--shape 4096": "written 32768x4096",
    "--shape 0x16": "written 32768x4096",
    "--runs 29": "at least 30",
}


@pytest.mark.parametrize("arguments", [*TRAIN, *KERNELS])
def test_errors_are_one_line(arguments, capsys):
    main = train.main if arguments in TRAIN else kernels.main
    with pytest.raises(SystemExit) as stopped:
        main([*arguments.split(), "--device", "cpu"])
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert (TRAIN | KERNELS)[arguments] in captured.err and captured.err.count("\n") == 1 and not captured.out


# -- cases and arms --


def test_full_points():
    """Full sizes can be listed anywhere: nothing is allocated before a point is built."""
    for name, case in CASES.items():
        points = case.points("full", case.variant({}), Fit(141 << 30, 7))
        assert points and all(point.tokens >= 8192 for point in points), name


def test_torchao_from_a_wheel(tmp_path):
    with zipfile.ZipFile(tmp_path / "torchao-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torchao/__init__.py", "")
    folder = arms.torchao_folder(tmp_path, tmp_path / "unpacked")
    assert (folder / "torchao" / "__init__.py").is_file()
    assert arms.torchao_folder(folder, tmp_path) == folder
    with pytest.raises(ValueError, match="neither a torchao wheel"):
        arms.torchao_folder(tmp_path / "unpacked", tmp_path)


# -- what is written while it runs --


class Answers:
    """Instead of all workers: each answer takes ten seconds of a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.asked, self.horizons = 0.0, list[str](), list[int]()
        monkeypatch.setattr(train.Bench, "attempt", self.attempt)
        monkeypatch.setattr(train.time, "monotonic", lambda: self.now)

    def attempt(self, run: train.ArmRun, do: str, horizon: int = -1, **_: object) -> dict | None:
        if run.error is not None:
            return None
        self.now += 10
        self.asked.append(f"{do} {run.arm.name}")
        self.horizons += [horizon] * (do == "turn")
        step = dict.fromkeys(("total", "forward", "backward", "optimizer"), 1.0)
        turn = {"tokens": 8, "span_ms": 5e3, "steps": [step], "losses": [], "validation": None}
        turn |= {"wall": [self.now - 5, self.now]}
        memory = {"allocated": 7, "reserved": 9}
        made = {"load": {"warmup_s": 1.0, "how": "", "first": {"allocated": 12, "reserved": 20}}}
        return {**made, "turn": {**turn, "memory": memory}}.get(do, {})


def benched(monkeypatch: pytest.MonkeyPatch, path: Path, *flags: str) -> tuple[list[str], list[dict]]:
    """What was asked of the workers, and the results that were written, one after the other."""
    answers = Answers(monkeypatch)
    flags = (
        *"--case gpt2-124m --arms bf16,fp8-delayed --rounds 2 --device cpu --no-warm-compile".split(),
        *flags,
    )
    assert train.main([*flags, "--json", str(path)]) == 0
    return answers.asked, lines.read(path)


@pytest.mark.parametrize("where", ["--resident", "--rebuild"])
def test_a_result_after_each_arm_and_round(monkeypatch, tmp_path, where):
    asked, written = benched(monkeypatch, tmp_path / "r.jsonl", where)
    assert len(written) == 1 + sum(not line.startswith("unload") for line in asked)  # and one at the end
    first, last = written[0]["rows"], written[-1]["rows"]
    assert [row["error"] for row in first] == ["no round was run"] * 2 and [row["error"] for row in last] == [
        None
    ] * 2
    assert all(len(row["tokens_per_s"]["rounds"]) == 2 for row in last)
    assert last[1]["memory"] == {"allocated": 7, "reserved": 9, "idle": 0, "first": 12}
    (tmp_path / "r.jsonl").open("a").write('{"schema": 1, "cut o')
    assert results.read([tmp_path / "r.jsonl"]) == [written[-1]]


def test_as_many_rounds_as_the_seconds_allow(monkeypatch, tmp_path):
    """Five of ten seconds a turn are timed steps: 32 seconds are six turns of an arm. With less time for
    everything there are fewer; after the second one, the arms know how many steps they will train."""
    for budget, rounds in ((1000, 6), (100, 4)):
        answers = Answers(monkeypatch)
        flags = f"--case loss --arms bf16,fp8-delayed --device cpu --seconds 32 --steps 3 --budget {budget}"
        assert train.main([*flags.split(), "--no-warm-compile", "--json", str(tmp_path / "r.jsonl")]) == 0
        made = results.read([tmp_path / "r.jsonl"])[0]
        assert [len(row["tokens_per_s"]["rounds"]) for row in made["rows"]] == [rounds] * 2
        # three steps of the warm-up, the rounds with a step before each but the first
        steps = 3 + 4 * rounds - 1
        assert answers.horizons == [0] * 4 + [steps] * 2 * (rounds - 2)
        assert made["settings"]["horizon"] == steps
        monkeypatch.undo()


def test_processes_start_at_the_same_time(monkeypatch, tmp_path):
    """Each waits for the other; one that fails is left to its arm."""
    both = threading.Barrier(2, timeout=20)

    class Process:
        def __init__(self, name: str, *_: object, **__: object) -> None:
            both.wait()
            if name == "fp8-delayed":
                raise train.WorkerFailed("no")

    monkeypatch.setattr(train, "Remote", Process)
    args = train.parse(["--case", "dit", "--device", "cpu"])
    bench = train.Bench(args, "dit", None, tmp_path, {})
    bench.start(["bf16", "fp8-delayed"])
    assert list(bench.workers) == ["bf16"]


def test_a_learning_rate_falls_where_the_end_is_known():
    rates = [loss.rate(step, 100) for step in (0, 49, 75, 100)]
    assert rates[0] == loss.LR / 50 and loss.rate(49, 0) == loss.rate(500, 0) == loss.LR
    assert rates[3] == pytest.approx(0.1 * loss.LR) and rates[1] > rates[2] > rates[3]


def test_what_a_gpu_runs(monkeypatch):
    """Rounds and steps that show half a percent; a CPU's only show that it works."""
    monkeypatch.setattr(train.torch.cuda, "is_available", lambda: True)
    for flags, expected in (("", (6, 20)), ("--rounds 2", (2, 20)), ("--device cpu", (5, 10))):
        args = train.parse(["--case", "dit", *flags.split()])
        assert (args.rounds, args.steps) == expected


def test_arms_that_change_one_thing():
    """Each option is the package's, and CUDA graphs refuse what they would do wrong."""
    for arm in arms.ARMS.values():
        if arm.kind == "fp8":
            options.parse(arm.how.get("options"), arm.how.get("mode"))
    kept, fast = (arms.ARMS[f"fp8-delayed-{name}"].how["options"] for name in ("kept", "fast-accum"))
    assert kept["recast_weights"] is False and all(fast["use_fast_accum"])
    changed = options.parse(arms.ARMS["fp8-delayed-swiglu-delayed"].how["options"]).policy
    assert {rule.name for rule in load(None).rules} - {rule.name for rule in changed.rules} == {
        "down projection"
    }
    for name in ("fp8-delayed-graphs", "fp8-delayed-by-step-graphs"):
        with pytest.raises(ValueError, match=f"{name}: a replay overwrites the gradients"):
            arms.settings(arms.ARMS[name], 2, interpreted=False)


def test_the_optimizer_of_an_arm():
    """torch's, or ours, which casts weights: with the same learning rate and betas."""
    dit = CASES["dit"]
    for name, kind in (("fp8-delayed", torch.optim.AdamW), ("fp8-delayed-by-step", AdamW)):
        task = Task(dit.points("tiny", dit.variants, Fit(0, 1))[0], "cpu")
        task.start(arms.ARMS[name].packed)
        (group,) = task.optimizer.param_groups
        assert type(task.optimizer) is kind and group["betas"] == (0.9, 0.95)
        assert group["lr"] == task.point.lr and getattr(task.optimizer, "fp8_weights", None) is not False


def test_no_arm_is_begun_when_it_is_late(monkeypatch, tmp_path):
    """The first arm takes the time; it gets its round, and the second arm says why it has none."""
    for where in ("--resident", "--rebuild"):
        asked, written = benched(monkeypatch, tmp_path / f"{where}.jsonl", where, "--budget", "5")
        assert {line.split()[1] for line in asked} == {"bf16"} and asked[:2] == ["load bf16", "turn bf16"]
        bf16, fp8 = written[-1]["rows"]
        assert bf16["error"] is None and fp8["error"] == "out of time: not begun"
