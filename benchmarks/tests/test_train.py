"""`python -m benchmarks.train`: its cases, tiny, on a CPU; its arms, errors, and what it writes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from benchmarks import arms, kernels, lines, pool, results, train
from benchmarks.cases import CASES
from fp8compile.config import options


@pytest.mark.weekly
@pytest.mark.timeout(600)
def test_every_case(tmp_path):
    """Once, tiny and interpreted; an arm whose package cannot be imported becomes a row with an error."""
    broken = tmp_path / "torchao"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('no such torchao')\n")
    cases = [part for name in [*CASES, "llama-8b-layers:ckpt=1,accum=8"] for part in ("--case", name)]
    flags = "--arms fp8-delayed,torchao-rowwise --rounds 2 --steps 1 --warmup 1 --device cpu --interpreted"
    more = ["--torchao", str(tmp_path), "--json", str(tmp_path / "r.jsonl")]
    assert train.main([*cases, *flags.split(), *more]) == 0
    found = {result["name"]: result["rows"] for result in results.read([tmp_path / "r.jsonl"])}
    assert len(found) == len(CASES) + 1
    for name, (row, torchao) in found.items():
        assert row["error"] is None and torchao["error"] == "ImportError: no such torchao"
        assert row["tokens_per_s"]["median"] > 0 and len(row["tokens_per_s"]["rounds"]) == 2
        assert row["step_ms"]["total"] >= row["step_ms"]["forward"] > 0 and row["step_ms"]["backward"] > 0
        assert row["fp8"]["decisions"]["fp8"] >= 2 and row["kernels"] is None and row["memory"] is None
        # a warm-up, and two rounds of one step with an untimed one before it, except at the start of `loss`
        assert len(row["losses"]) == (4 if name == "loss" else 10 if "accum" in name else 5)
    (first, before), (second, after) = found["loss"][0]["validation"]
    assert (first, second) == (2, 4) and after < before
    assert found["llama-8b-layers:ckpt=1,accum=8"][0]["tokens"] == 128  # two micro-batches of 64 when tiny


TRAIN = {
    "--case gpt5": "no case 'gpt5'",
    "--case dit --arms bf16,fp4": "no arm 'fp4'",
    "--case dit:depth=3": "case dit has no variant 'depth'",
    "--case dit:compile=twice": "one of whole, block",
    "--case dit --rounds 0": "not a whole number of at least 1",
    "--case dit --torchao nowhere": "no such file or folder",
    "--case loss --seconds 9 --rounds 2": "--seconds: instead of --rounds",
}
KERNELS = {"--family gelu softmax": "no family 'softmax'", "--shape 0x16": "written 32768x4096"}


@pytest.mark.parametrize("arguments", [*TRAIN, *KERNELS])
def test_errors_are_one_line(arguments, capsys):
    main = train.main if arguments in TRAIN else kernels.main
    with pytest.raises(SystemExit) as stopped:
        main([*arguments.split(), "--device", "cpu"])
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert (TRAIN | KERNELS)[arguments] in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_arms_have_options_of_the_package():
    """And CUDA graphs refuse what they would do wrong."""
    for arm in arms.ARMS.values():
        if arm.kind == "fp8":
            options.parse(arm.how.get("options"), arm.how.get("mode"))
    with pytest.raises(ValueError, match="fp8-delayed-graphs: a replay overwrites the gradients"):
        arms.settings(arms.ARMS["fp8-delayed-graphs"], 2, interpreted=False)


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
        turn["memory"] = {"allocated": 7, "reserved": 9}
        load = {"warmup_s": 1.0, "how": "", "first": {"allocated": 12, "reserved": 20}}
        return {"load": load, "turn": turn}.get(do, {})


def benched(monkeypatch: pytest.MonkeyPatch, path: Path, flags: str) -> tuple[Answers, list[dict]]:
    """What was asked of the workers, and the results that were written, one after the other."""
    answers = Answers(monkeypatch)
    assert train.main([*f"--arms bf16,fp8-delayed --device cpu {flags} --json".split(), str(path)]) == 0
    return answers, lines.read(path)


def test_defaults_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = train.parse(["--case", "dit"])
    assert (args.device, args.rounds, args.steps) == ("cuda", 6, 20)


def test_another_arm_begins_each_round(monkeypatch, tmp_path):
    flags = "--case dit --rounds 4 --arms bf16,fp8-delayed,fp8-rowwise"
    asked = benched(monkeypatch, tmp_path / "r.jsonl", flags)[0].asked
    a, b, c = (f"turn {arm}" for arm in ("bf16", "fp8-delayed", "fp8-rowwise"))
    turns = [line for line in asked if line.startswith("turn")]
    assert turns == [a, b, c, b, c, a, c, a, b, a, b, c]


def test_a_result_after_each_arm_and_round(monkeypatch, tmp_path):
    answers, written = benched(monkeypatch, tmp_path / "r.jsonl", "--case gpt2-124m --rounds 2")
    assert len(written) == 1 + sum(not line.startswith("unload") for line in answers.asked)  # one at the end
    assert [row["error"] for row in written[0]["rows"]] == ["no round was run"] * 2
    last = written[-1]["rows"]
    assert all(row["error"] is None and len(row["tokens_per_s"]["rounds"]) == 2 for row in last)
    assert last[1]["memory"] == {"allocated": 7, "reserved": 9, "idle": 0, "first": 12}
    (tmp_path / "r.jsonl").open("a").write('{"schema": 1, "cut o')
    assert results.read([tmp_path / "r.jsonl"]) == [written[-1]]


def test_no_arm_is_begun_when_it_is_late(monkeypatch, tmp_path, capsys):
    """The first arm takes the time; it gets its round, and the second arm says why it has none."""
    answers, written = benched(monkeypatch, tmp_path / "r.jsonl", "--case gpt2-124m --budget 5")
    assert answers.asked == ["load bf16", "turn bf16", "profile bf16", "unload bf16"]
    assert [row["error"] for row in written[-1]["rows"]] == [None, "out of time: not begun"]
    assert "\nnot done in time: 4 of 5 rounds of bf16\n" in capsys.readouterr().out


def test_workers_that_start_are_ended_when_train_is(monkeypatch, tmp_path):
    """SIGTERM comes while a probe and an arm start."""
    ended, kill = [], pool.Remote.kill
    monkeypatch.setattr(pool.Remote, "answer", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(pool.Remote, "kill", lambda worker: ended.append(worker) or kill(worker))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit, match="terminated"):
        train.main(f"--case dit --arms bf16 --device cuda --json {tmp_path}/r.json".split())
    assert [worker.name for worker in ended] == ["probe", "bf16"]
    assert all(worker.process.returncode == -signal.SIGKILL for worker in ended)


@pytest.mark.parametrize("budget, rounds", [(1000, 6), (100, 4)])
def test_as_many_rounds_as_the_seconds_allow(monkeypatch, tmp_path, budget, rounds):
    """Five of ten seconds a turn are timed steps: 32 seconds are six turns of an arm. With less time for
    everything there are fewer; after the second one, the arms know how many steps they will train."""
    flags = f"--case loss --seconds 32 --steps 3 --budget {budget}"
    answers, written = benched(monkeypatch, tmp_path / "r.jsonl", flags)
    assert [len(row["tokens_per_s"]["rounds"]) for row in written[-1]["rows"]] == [rounds] * 2
    # three steps of the warm-up, the rounds with a step before each but the first
    assert answers.horizons == [0] * 4 + [3 + 4 * rounds - 1] * 2 * (rounds - 2)
