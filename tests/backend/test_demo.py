"""The demo: its model trains to the same loss in FP8 and in bf16, and its command line works.

The training is the demo's, with a smaller GPT and fewer steps, so that a run takes ten seconds on one core.
The bf16 runs are eager; the FP8 runs are interpreted: rewritten and lowered as usual, but without Inductor's
time to compile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import parallel
import pytest
import torch
import train_gpt
from torch import Tensor

import fp8compile
from fp8compile.backend import fp8
from fp8compile.config.recipe import RECIPES
from tests.support.demo import TINY as SMALL
from tests.support.harness import interpreted

pytestmark = pytest.mark.slow

TINY = train_gpt.Config(layers=2, width=128, heads=2, context=64, vocabulary=256, steps=60, batch_size=8)


@pytest.fixture(scope="module")
def text() -> Tensor:
    return train_gpt.load_text()


@pytest.mark.weekly
@pytest.mark.parametrize(("recipe", "experts"), [("delayed", 0), ("tensorwise", 0), ("delayed", 4)])
def test_fp8_trains_to_the_same_loss_as_bf16(text: Tensor, recipe: str, experts: int) -> None:
    config = dataclasses.replace(TINY, experts=experts)
    bf16 = train_gpt.train(config, text, evaluations=1)
    assert bf16.val_loss < 0.6 * bf16.train_losses[0], "the baseline has not learned enough to compare with"
    torch._dynamo.reset()
    with interpreted():
        run = train_gpt.train(config, text, backend=fp8, options={"recipe": recipe}, evaluations=1)
    training = fp8compile.report(run.model).graphs[0].matmuls
    kept = [m.reason for m in training if m.decision != "fp8" and not m.groups]
    if experts:
        grouped = [m.decision for m in training if m.groups]
        assert len(grouped) == 6 * config.layers and {*grouped} == {"fp8"}
    else:
        assert len(training) == 3 * (4 * config.layers + 1) and len(kept) == 3
        assert all(reason.startswith("output head") for reason in kept)
    gap = run.val_loss / bf16.val_loss - 1
    assert abs(gap) < 0.01, f"{recipe}: {run.val_loss:.4f} against bf16's {bf16.val_loss:.4f}, {gap:+.2%}"
    assert run.train_losses != bf16.train_losses  # the run was not bf16


def test_the_demo_runs_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name in train_gpt.CONFIGS:
        monkeypatch.setitem(train_gpt.CONFIGS, name, TINY)
    precision = torch.get_float32_matmul_precision()
    train = train_gpt.train

    def without_inductor(*args: Any, backend: str, **kwargs: Any) -> train_gpt.Run:
        with interpreted() if backend == "fp8" else contextlib.nullcontext():
            return train(*args, backend="fp8" if backend == "fp8" else None, **kwargs)

    monkeypatch.setattr(train_gpt, "train", without_inductor)
    try:
        train_gpt.main(["--steps", "3", "--out", str(tmp_path)])
    finally:
        torch.set_float32_matmul_precision(precision)
    printed = capsys.readouterr().out
    last = 0
    for expected in (
        "tokens/s", "gap of the validation losses", "blocks.0-1.attn.qkv (x2) ", "strict=True",
        "FP8 on a CPU is an emulation", "small, 512 tokens: 1.00x on NVIDIA H200", "0 of 27 matmuls",
        "gpt2-124m, 512 tokens: 1.00x",
    ):  # fmt: skip
        assert expected in printed[last:]
        last += printed[last:].index(expected)
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    weights = torch.load(tmp_path / "gpt_fp8.pt", weights_only=True)
    vanilla = train_gpt.build_model(TINY).state_dict()
    kinds = [{k: (v.shape, v.dtype) for k, v in tensors.items()} for tensors in (weights, vanilla)]
    assert kinds[0] == kinds[1]


def test_the_demo_takes_every_recipe(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        train_gpt.main(["--help"])
    assert f"--recipe {{{','.join(RECIPES)}}}" in " ".join(capsys.readouterr().out.split())


# -- several processes --

ROOT = Path(train_gpt.__file__).parents[1]
# Nats. Sums have another order, and with tp amaxes are of parts. Where processes see other data, losses
# differ by 0.04 to 0.25
CLOSE = {"bf16": 1e-3, "fp8": 1e-2}


def run_demo(folder: Path, name: str, *flags: str, processes: int = 1) -> tuple[str, list[dict[str, Any]]]:
    """What the demo printed, and the losses of each process."""
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*start, str(ROOT / "tests/support/demo.py"), str(folder / name)]
    command += ["--out", str(folder / f"{name}-out"), *flags]
    path = f"{ROOT}{os.pathsep}{ROOT / 'examples'}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, [json.loads((folder / f"{name}.{rank}").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    printed, (losses,) = run_demo(tmp_path_factory.mktemp("alone"), "one")
    return printed, losses


@pytest.mark.weekly
@pytest.mark.parametrize("kind", parallel.KINDS)
def test_two_processes_train_as_one(kind: str, alone: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """Losses of every step, what is printed, and the checkpoint, which is that of one process."""
    printed, found = run_demo(tmp_path, kind, "--parallel", kind, processes=2)
    reference, losses = alone
    assert found[0] == found[1]  # every process knows the loss of the whole batch
    for name, most in CLOSE.items():
        (train, validation), (expected, at_end) = found[0][name], losses[name]
        assert expected[0] - expected[-1] > 0.3 and len(train) == len(expected) == SMALL.steps
        assert max(abs(a - b) for a, b in zip(train, expected, strict=True)) < most
        assert [step for step, _ in validation] == [step for step, _ in at_end]
        assert max(abs(a - b) for (_, a), (_, b) in zip(validation, at_end, strict=True)) < most
    assert found[0]["fp8"] != found[0]["bf16"]
    results = "final", "token", "compi", "train", "total"
    heads = [line[:22].strip() for line in reference.splitlines() if line.startswith(results)]
    assert len(heads) == 6 and f"{kind} on 2 processes (gloo)" in printed
    others = "gap of the validation losses", "loss curves", "estimate of small", "everything took"
    for line in (*heads, *others):
        # by the first process, once
        assert sum(text.startswith(line) for text in printed.splitlines()) == 1, line
    assert printed.count("blocks.") + printed.count("attn.qkv") > 0
    weights = torch.load(tmp_path / f"{kind}-out" / "gpt_fp8.pt", weights_only=True)
    model = train_gpt.build_model(SMALL)
    model.load_state_dict(weights, strict=True)
    _, text = train_gpt.split_text(train_gpt.load_text(), SMALL.context)
    compiled = found[0]["fp8"][1][-1][1]
    eager = train_gpt.evaluate(model, text, SMALL, SMALL.batch_size, "cpu")
    assert eager == pytest.approx(compiled, abs=5e-4)


DDP = ["--parallel", "ddp"]


@pytest.mark.parametrize(
    ("flags", "count", "says"),
    [
        (["--steps", "0"], None, "--steps"),
        (["--lr", "nan"], None, "--lr"),
        (["--recipe", "hybrid"], None, "--recipe"),
        (["--top-k", "3", "--experts", "2"], None, "--top-k"),
        (["--data", "no/such/file"], None, "--data"),
        (["--out", "/dev/null/out"], None, "--out"),
        (DDP, None, "--parallel ddp needs torchrun: torchrun --nproc-per-node 2 examples/train_gpt.py"),
        (["--parallel", "fsdp"], 1, "--parallel fsdp on one process has nothing to share"),
        (["--parallel", "tp"], 3, "--parallel tp: 3 processes cannot divide 4 heads equally"),
        (DDP, 3, "--parallel ddp: 3 processes cannot divide a batch of 8 equally; give another --batch-size"),
        ([], 2, "torchrun started 2 processes: say how they share the work, --parallel ddp|fsdp|tp"),
    ],
)
def test_wrong_use_gets_one_line(
    flags: list[str],
    count: int | None,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """`count`: of torchrun's processes. One says it, the others wait until torchrun ends them."""
    monkeypatch.setattr(train_gpt, "train", lambda *args, **kwargs: pytest.fail(f"{flags} were taken"))
    waits: list[float] = []
    monkeypatch.setattr(parallel.time, "sleep", waits.append)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for rank in range(count or 1):
        if count is not None:
            monkeypatch.setenv("WORLD_SIZE", str(count))
            monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit) as stop:
            train_gpt.main(flags)
        assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and says in captured.err and captured.out == ""
    assert len(waits) == (count or 1) - 1


def test_load_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"spam " * 100)
    (tmp_path / "picture.bin").write_bytes(b"\xff\xfe\x00" * 100)
    # in a folder, files that are not text are skipped
    assert bytes(train_gpt.load_text(tmp_path)) == b"spam " * 100
    with pytest.raises(ValueError, match="too few"):
        train_gpt.split_text(train_gpt.load_text(tmp_path), context=128)


def test_the_runs_see_the_same_batches_and_the_schedule_ends_low() -> None:
    text = torch.arange(256, dtype=torch.uint8).repeat(20)
    first, second = (train_gpt.batches(text, TINY, batch_size=2, seed=7, device="cpu") for _ in range(2))
    for _ in range(3):
        (inputs, targets), (again, _) = next(first), next(second)
        assert torch.equal(inputs, again)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
    rates = [train_gpt.learning_rate(step, 100, 1.0) for step in range(100)]
    assert max(rates) == 1.0 and rates[0] == 0.1 and math.isclose(rates[-1], 0.1, abs_tol=1e-2)
