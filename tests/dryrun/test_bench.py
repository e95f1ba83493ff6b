"""bench: turns, rows, verdict and table on made-up times; sharing of weights."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from fp8compile.dryrun import bench, measure
from fp8compile.errors import Fp8CompileError, OptionError
from fp8compile.ir.records import GraphReport, MatmulRecord
from fp8compile.reporting.report import Report

GEMMS = (("fprop", 512, 256, 128), ("dgrad", 512, 128, 256), ("wgrad", 256, 128, 512))


def turn(ms: float) -> dict[str, Any]:
    """One of two steps, each of which takes so long."""
    step = {"total": ms, "forward": 0.3 * ms, "backward": 0.6 * ms, "optimizer": 0.1 * ms}
    nothing = {"losses": [], "validation": None, "memory": None}
    return {"tokens": 2, "span_ms": 2 * ms, "steps": [step, step], **nothing}


def row(
    arm: str, *times: float, fp8: float | None = 8.0, busy: float = 12.0, error: str | None = None
) -> dict[str, Any]:
    """`fp8`: how many FP8 matmuls the profiler saw; None without a GPU."""
    if error:
        return {"arm": arm, "error": error}
    classes = {"fp8_gemm": {"count": fp8, "ms": 3.0 if fp8 else 0.0}}
    kernels = None if fp8 is None else {"classes": classes, "busy_ms": busy}
    peaks = {"first": {"allocated": 5 * 10**9}, "peak": {"allocated": 4 * 10**9}}
    measured = measure.summarise([turn(ms) for ms in times])
    return {"arm": arm, "error": None, **peaks, **measured, "kernels": kernels}


def layer(name: str, bf16: float, fp8: float | None, cast: float = 1.0) -> list[MatmulRecord]:
    """The gemms of a layer, with estimated microseconds; in high precision, if it has none in FP8."""
    made = {"decision": "fp8", "recipe": "delayed"}
    if fp8 is None:
        made = {"decision": "high_precision", "reason": "output head"}
    times = {"bf16_us": bf16, "fp8_us": fp8, "cast_us": cast}
    return [MatmulRecord(name, gemm, m, n, k, **made, **times) for gemm, m, n, k in GEMMS]  # type: ignore[arg-type]


UPS = (*layer("h.0.up", 40.0, 20.0), *layer("h.1.up", 40.0, 20.0))
LAYERS = (*UPS, *layer("h.0.down", 9.0, 9.0, 0.5), *layer("head", 70.0, None))
NO_GAIN = tuple(layer("h", 9.0, 9.0))


def made(
    *rows: dict[str, Any], matmuls: tuple[MatmulRecord, ...] = LAYERS, emulated: bool = False
) -> bench.Bench:
    return bench.Bench("NVIDIA H100", rows, Report([GraphReport(0, "Net", matmuls)]), emulated, ("a note",))


BF16 = row("bf16", 10.0, 10.2, 9.9, fp8=0.0)
SPREAD = "the rounds of an arm differ by up to 3.0%"
NO_DIFFERENCE = "no difference that these rounds can show: 1.02x as fast as bf16"
GAINS = "\nestimated gain a step: h.0-1.up (x2) 114 µs\n9 of 12 matmuls, "


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (made(BF16, row("fp8", 8.0, 8.1, 8.0)), f"FP8 pays: 1.25x as fast as bf16; {SPREAD}{GAINS}"),
        (made(BF16, row("fp8", 12.5, 12.6, 12.5)), "FP8 does not pay: 0.80x as fast as bf16"),
        (made(BF16, row("fp8", 9.9, 9.8, 9.7)), NO_DIFFERENCE),
        (made(BF16, row("fp8", 8.0, 8.0), matmuls=NO_GAIN), "by the estimate, no layer gains"),
        (made(BF16, row("fp8", 8.0, 8.0), matmuls=()), "no estimate for this device says which layers gain"),
        (made(BF16, row("fp8", 8.0, 8.0, fp8=0.0)), "FP8 does not pay: no FP8 matmul ran (9 of 12 matmuls"),
        (made(BF16, row("fp8", 8.0, 8.0, fp8=0.0, busy=0.0)), "FP8 pays"),
        (made(BF16, row("fp8", error="MemoryError: much")), "no answer: FP8 failed: MemoryError: much"),
        (made(BF16, row("fp8", 8.0, 8.0, fp8=None), emulated=True), "no answer: FP8 is emulated on a CPU"),
    ],
    ids="pays,costs,within the spread,no gain,not described,not in FP8,not seen,failed,a CPU".split(","),
)
def test_the_verdict(found: bench.Bench, says: str) -> None:
    assert says in found.verdict and str(found).endswith(found.verdict)
    assert found.to_dict()["verdict"] == found.verdict


def test_the_table() -> None:
    broken = row("torchao-tensorwise", error="ImportError: it is broken")
    found = made(BF16, broken, row("fp8", 8.0, 8.1, 7.9))
    head, arms, _ = str(found).split("\n\n")
    assert head.splitlines()[1] == "* a note"
    bf16, torchao, fp8, why = arms.splitlines()[2:]
    assert bf16.split() == "bf16 10.00 3.0% 1.00x 3.00 6.00 1.00 4.00 5.00 0, 0% of the time".split()
    assert fp8.split() == "fp8 8.00 2.5% 1.25x 2.40 4.80 0.80 4.00 5.00 8, 25% of the time".split()
    assert torchao.split() == ["torchao-tensorwise", "failed"]
    assert why == "torchao-tensorwise: ImportError: it is broken"
    layers = json.loads(json.dumps(found.to_dict()))["layers"]
    gains = {one["name"]: one["estimated_gain_us"] for one in layers}
    assert gains == {"h.0-1.up (x2)": 114.0, "head": 0.0, "h.0.down": -1.5}


class Made:
    """Instead of an arm's runner."""

    def __init__(self, name: str, seen: list[str], fails: Exception | None = None):
        self.name, self.seen, self.fails = name, seen, fails

    def warm_up(self, steps: int) -> dict[str, Any]:
        self.seen.append(f"{self.name} warms up {steps}")
        if self.fails:
            raise self.fails
        return {"first": None, "peak": None}

    def turn(self, steps: int) -> dict[str, Any]:
        self.seen.append(self.name)
        return turn(float(len(self.seen)))

    def profile(self, steps: int) -> None:
        return None


def test_arms_take_turns_and_one_that_fails_takes_no_part() -> None:
    seen: list[str] = []
    arms = {name: Made(name, seen) for name in ("bf16", "torchao", "fp8")}
    arms["torchao"].fails = torch.OutOfMemoryError("CUDA out of memory")
    runners = {name: lambda arm=arm: arm for name, arm in arms.items()}
    rows = bench._measured(runners, 3, 2, 9, lambda what: None)
    assert seen[:3] == ["bf16 warms up 9", "torchao warms up 9", "fp8 warms up 9"]
    assert seen[3:] == ["bf16", "fp8", "fp8", "bf16", "bf16", "fp8"]
    assert [one["error"] for one in rows][::2] == [None, None] and "--no-optimizer" in rows[1]["error"]
    assert rows[0]["step_ms"]["total"] == 7.0 and len(rows[2]["tokens_per_s"]["rounds"]) == 3
    arms["bf16"].fails = ValueError("a bad batch")
    with pytest.raises(Fp8CompileError, match="the step fails in bf16: ValueError: a bad batch"):
        bench._measured({"bf16": lambda: arms["bf16"]}, 1, 1, 2, lambda what: None)


def test_a_runner_times_the_parts_of_steps() -> None:
    weight, updates = nn.Parameter(torch.ones(2)), list[torch.Tensor]()
    runner = measure.Runner(
        "cpu", lambda: weight.sum(), lambda: updates.append(weight.grad.clone()), accumulate=3, tokens=5
    )
    warm = runner.warm_up(2)
    assert warm["first"] is warm["peak"] is None and warm["warmup_s"] > 0 and len(updates) == 2
    found = runner.turn(4, lead=1)
    assert len(found["steps"]) == 4 and found["tokens"] == 4 * 3 * 5 and len(found["losses"]) == 3 * 7
    assert [grads[0].item() for grads in updates] == [3.0 * i for i in range(1, 8)]
    for step in found["steps"]:
        assert step["total"] >= step["forward"] + step["backward"] + step["optimizer"] > 0
    assert runner.profile(steps=1) is None


@pytest.mark.slow  # torchao takes seconds to import
def test_arms_share_weights_and_torchao_gets_modules_of_its_own() -> None:
    pytest.importorskip("torchao")
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 24), nn.BatchNorm1d(24))
    model.lm_head = nn.Linear(24, 32)
    part = bench._sharing(model)
    measure.by_torchao(part, "tensorwise")
    kinds = [type(module).__name__ for module in (*part, *model)]
    assert kinds == "Float8Linear Linear BatchNorm1d Linear Linear Linear BatchNorm1d Linear".split()
    assert [*map(id, part.parameters())] == [*map(id, model.parameters())]
    assert [*map(id, part.buffers())] == [*map(id, model.buffers())]


def test_what_cannot_be_timed() -> None:
    for model, why in (
        (nn.Linear(8, 8).requires_grad_(False), "no parameter of the model requires gradients"),
        (nn.Linear(8, 8, device="meta"), "weight is on the meta device"),
    ):
        with pytest.raises(OptionError, match=why):
            bench.bench(model, torch.ones(2, 8), device="cpu")


@pytest.mark.slow
def test_a_model_without_a_loss() -> None:
    with pytest.raises(OptionError, match="needs a scalar loss, but .*: give loss="):
        bench.bench(nn.Linear(8, 8), torch.ones(2, 8), device="cpu", torchao=False)
