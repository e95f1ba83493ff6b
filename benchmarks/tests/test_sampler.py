"""What is kept of a run on a GPU: samples of nvidia-smi, and the timeline of a step. No GPU is needed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

from benchmarks import sampler, timeline
from benchmarks.sampler import Sampler
from fp8compile.dryrun.kernel_classes import MeasuredKernel, launches

NVIDIA_SMI = """#!/bin/bash
for watts in 300.10 '[N/A]' 700.50; do
    echo "$(date '+%Y/%m/%d %H:%M:%S.%3N'), 1950, 3201, $watts, 60, 0x0000000000000004"
done
exec sleep 60
"""


def test_samples_of_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    began = time.time() - 0.01
    with Sampler(20) as running:
        while len(running.found) < 3:
            assert time.time() < began + 20, running.problem
            time.sleep(0.02)
    assert running.process is not None and running.process.poll() is not None and running.problem is None
    found = running.over([(began, time.time()), (0.0, 1.0)])
    assert found is not None and found["samples"] == 3 and found["rounds"][1] is None
    assert found["watts"] == {"median": pytest.approx(500.3), "min": 300.1, "max": 700.5}
    assert found["reasons"] == {"sw_power_cap": 1.0} and found["slowed"] == 1.0


def test_reasons_and_no_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    running = Sampler()
    running.thread.join(20)
    assert running.between(0.0, 1e12) is None and "nvidia-smi: No such file" in str(running.problem)
    sample = sampler.parse("2026/11/27 03:22:19.123, 1980, 3201, 99.5, 35, 0x0000000000000061")
    assert sample is not None and sample[2] == {"gpu_idle", "sw_thermal", "hw_thermal"}
    found = sampler.summary([sample, (*sample[:2], frozenset({"gpu_idle"}))])
    assert found is not None and found["slowed"] == 0.5  # an idle card is not slowed


# -- the timeline of a step --

FP8, BF16, CAST, COPY = "nvjet_sm90_qqtst_1", "nvjet_sm90_tst_2", "fp8_cast_3", "Memcpy DtoD"
STEP = ((FP8, 100.0, 0.0), (CAST, 20.0, 102.0), (FP8, 50.0, 132.0), (COPY, 30.0, 140.0), (BF16, 8.0, 240.0))


def steps(count: int, period: float = 1000.0) -> list[MeasuredKernel]:
    return [MeasuredKernel(name, us, 7.0 + i * period + at) for i in range(count) for name, us, at in STEP]


def test_gaps_and_matmuls_of_the_last_step() -> None:
    """A step begins where the one before ends; a copy beside a matmul is no gap."""
    sized = [
        timeline.Sized(FP8, "aten::_scaled_mm", 8192, 4096, 1024, 1, 1),
        timeline.Sized(FP8, "aten::_scaled_mm", 64, 32, 16, 1, 1),
        timeline.Sized(BF16, "aten::mm", 8, 16, 32, 1, 2),
    ]
    found = timeline.summarise(steps(3), 3, [*sized, *sized, *sized])
    assert found is not None and found["step"] == "the last of 3"
    # between the steps 1000 - 248; then 2, 10 and 58
    assert (found["span_ms"], found["busy_ms"], found["gap_ms"]) == (1.0, 0.178, 0.822)
    assert found["gaps"] == {
        "under 5 us": {"count": 1, "ms": 0.002},
        "5 to 50 us": {"count": 1, "ms": 0.01},
        "over 50 us": {"count": 2, "ms": 0.81},
    }
    assert found["longest_gaps"][:2] == [
        {"us": 752.0, "after": "the step before", "before": FP8},
        {"us": 58.0, "after": FP8, "before": BF16},
    ]
    assert [found["names"][launch[2]] for launch in found["launches"]] == [name for name, _, _ in STEP]
    assert found["launches"][1] == [854.0, 20.0, 1]
    first, second, third = found["matmuls"]
    assert (first["m"], first["n"], first["k"], first["us"]) == (8192, 4096, 1024, 100.0)
    assert first["tflops"] == pytest.approx(2e-12 * 8192 * 4096 * 1024 / 100e-6, rel=1e-3)
    assert (second["name"], second["m"], second["us"]) == (first["name"], 64, 50.0)  # of one name, not merged
    assert third["class"] == "bf16_gemm" and third["tflops"] is None  # one of two kernels of a matmul


def test_steps_that_differ_and_matmuls_that_the_host_does_not_know() -> None:
    """Here there are three bf16 matmuls in one profile and two in the other, and no FP8 ones in the other."""
    other = [timeline.Sized(BF16, "aten::mm", 8, 16, 32, 1, 1)]
    (one,) = (row for row in timeline.summarise(steps(3), 3, other * 3)["matmuls"] if row["m"])
    assert one["class"] == "bf16_gemm"
    found = timeline.summarise(steps(3)[:-1], 3, other)
    assert found is not None and found["step"] == "all 3, which differ" and len(found["matmuls"]) == 8
    assert found["launches"][0][0] == 0 and {row["m"] for row in found["matmuls"]} == {None}
    assert timeline.summarise([], 3) is None


def event(name: str, start: float, *kernels: str, shapes: Any = None, cuda: bool = False) -> FunctionEvent:
    kind = DeviceType.CUDA if cuda else DeviceType.CPU
    made = FunctionEvent(1, name, 1, start, start + 5.0, input_shapes=shapes, device_type=kind)
    for kernel in kernels:
        made.append_kernel(kernel, 0, 4.0)
    return made


def test_events_of_the_profiler() -> None:
    """By torch's own class of events: launches in order, and the sizes that operators had."""
    events = [
        event("aten::_scaled_mm", 50.0, FP8, shapes=[[64, 32], [32, 16], [], [], [16]]),
        event("aten::addmm", 10.0, BF16, "splitKreduce_kernel", shapes=[[128], [8, 24], [24, 128]]),
        event("aten::copy_", 20.0, COPY, shapes=[[8, 8], [8, 8]]),
        event("aten::bmm", 30.0, BF16, shapes=[[4, 8, 24], [4, 24, 16]]),
        event("aten::_scaled_grouped_mm", 40.0, "f8f8bf16_grouped", shapes=[[96, 24], [4, 24, 16], [4]]),
        event("cudaLaunchKernel", 45.0, FP8),
        event(FP8, 60.0, shapes=None, cuda=True),
        event(CAST, 58.0, shapes=None, cuda=True),
    ]
    profile = SimpleNamespace(events=lambda: events)
    assert launches(profile) == [MeasuredKernel(CAST, 5.0, 58.0), MeasuredKernel(FP8, 5.0, 60.0)]
    assert [one[1:] for one in timeline.sized_matmuls(profile)] == [
        ("aten::addmm", 8, 128, 24, 1, 2),
        ("aten::addmm", 8, 128, 24, 1, 2),
        ("aten::bmm", 8, 16, 24, 4, 1),
        ("aten::_scaled_grouped_mm", 96, 16, 24, 1, 1),
        ("aten::_scaled_mm", 64, 16, 32, 1, 1),
    ]


def test_sizes_of_real_operators() -> None:
    """Of the operators that Inductor calls; a CPU has no kernels, so nothing is listed."""
    a, b, bias = torch.ones(8, 24), torch.ones(24, 16), torch.ones(16)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profile:
        torch.mm(a, b)
        torch.addmm(bias, a, b, out=torch.empty(8, 16))
        torch.bmm(a.expand(3, 8, 24), b.expand(3, 24, 16))
        torch.relu(a)
    assert timeline.sized_matmuls(profile) == []
    found = {event.name: timeline.sizes(event.name, event.input_shapes or ()) for event in profile.events()}
    sized = {name.removeprefix("aten::"): sizes for name, sizes in found.items() if sizes}
    assert sized == {"mm": (8, 16, 24, 1), "addmm": (8, 16, 24, 1), "bmm": (8, 16, 24, 3)}
