"""Clocks, power and throttle reasons of the GPU, sampled by nvidia-smi while something runs.

    with Sampler() as sampler:
        began = time.time(); ...; sampler.between(began, time.time())

A sample has nvidia-smi's own time, so it does not matter when it is read. Without nvidia-smi there are no
samples, and `problem` says why. It imports nothing that may be missing.
"""

from __future__ import annotations

import contextlib
import os
import pty
import statistics
import subprocess
import threading
from collections.abc import Sequence
from datetime import datetime
from typing import Any

NUMBERS = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem"}
NUMBERS |= {"watts": "power.draw.instant", "celsius": "temperature.gpu"}
REASONS = "clocks_event_reasons.active"  # of drivers since 535
# bits of `REASONS`, by NVML's names
BITS = (
    "gpu_idle applications_clocks sw_power_cap hw_slowdown sync_boost sw_thermal hw_thermal hw_power_brake "
    "display_clocks"
).split()
SLOWING = {"sw_power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"}
INTERVAL_MS = 50

Sample = tuple[float, dict[str, float | None], frozenset[str]]


class Sampler:
    """Samples from its start to `stop`. `found`: (seconds since the epoch, numbers, reasons), in order."""

    def __init__(self, interval_ms: int = INTERVAL_MS):
        self.interval_ms = interval_ms
        self.found: list[Sample] = []
        self.problem: str | None = None
        self.stopped = False
        self.process: subprocess.Popen[bytes] | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None:
            self.process.terminate()
        self.thread.join(5.0)

    def _run(self) -> None:
        try:
            said = self._read()
        except OSError as error:
            self.problem = f"nvidia-smi: {error.strerror or error}"
            return
        if not self.found and not self.stopped:
            self.problem = f"nvidia-smi: {said or 'no output'}"

    def _read(self) -> str:
        """Add samples until nvidia-smi ends. Returns the last line that is no sample."""
        fields = ["timestamp", *NUMBERS.values(), REASONS]
        # The first card that this process sees. A terminal, since output into a pipe may come in blocks
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
        command = ["nvidia-smi", "-i", card, f"--query-gpu={','.join(fields)}"]
        command += ["--format=csv,noheader,nounits", f"--loop-ms={self.interval_ms}"]
        ours, theirs = pty.openpty()
        said = ""
        with open(ours, "rb", buffering=0) as terminal:
            try:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.STDOUT
                )
            finally:
                os.close(theirs)
            if self.stopped:  # meanwhile
                self.process.terminate()
            rest = b""
            with contextlib.suppress(OSError):  # the end of a terminal
                while chunk := terminal.read(4096):
                    *complete, rest = (rest + chunk).split(b"\n")
                    for line in complete:
                        text = line.decode(errors="replace").strip()
                        sample = parse(text)
                        if sample is not None:
                            self.found.append(sample)
                        elif text:
                            said = text
            self.process.wait()
        return said

    def about(self) -> dict[str, Any]:
        return {"interval_ms": self.interval_ms, "samples": len(self.found), "problem": self.problem}

    def between(self, start: float, end: float) -> dict[str, Any] | None:
        """The samples of a time; None if there are none."""
        return summary([sample for sample in self.found if start <= sample[0] <= end])

    def over(self, spans: Sequence[Sequence[float]]) -> dict[str, Any] | None:
        """The samples of several times together, and of each ("rounds"); None if there are none at all."""
        each = [[sample for sample in self.found if start <= sample[0] <= end] for start, end in spans]
        whole = summary([sample for samples in each for sample in samples])
        return None if whole is None else {**whole, "rounds": [summary(samples) for samples in each]}


def parse(line: str) -> Sample | None:
    """A line of nvidia-smi; None if it is no sample."""
    when, *values = (part.strip() for part in line.split(","))
    if len(values) != len(NUMBERS) + 1:
        return None
    try:
        at = datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f").timestamp()
    except ValueError:
        return None
    numbers = {name: _number(value) for name, value in zip(NUMBERS, values, strict=False)}
    try:
        bits = int(values[-1], 16)
    except ValueError:  # "[N/A]"
        bits = 0
    return at, numbers, frozenset(name for i, name in enumerate(BITS) if bits >> i & 1)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def summary(samples: Sequence[Sample]) -> dict[str, Any] | None:
    """Median, least and most of each number; of each reason, the share of the samples that have it."""
    if not samples:
        return None
    made: dict[str, Any] = {"samples": len(samples)}
    for name in NUMBERS:
        values = [value for _, numbers, _ in samples if (value := numbers[name]) is not None]
        made[name] = None
        if values:
            made[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    shares = {name: sum(name in reasons for _, _, reasons in samples) / len(samples) for name in BITS}
    made["reasons"] = {name: round(share, 3) for name, share in shares.items() if share}
    made["slowed"] = round(sum(bool(reasons & SLOWING) for _, _, reasons in samples) / len(samples), 3)
    return made
