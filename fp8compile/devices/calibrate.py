"""Measure this machine's GPU for the cost model: `fp8compile calibrate`.

A rate is the median over a few large sizes. For each size, the time is the median of several runs. Each run
has a cold cache: a buffer larger than L2 is written before it. The other properties of the device (units,
memory, architecture) come from its shipped description, or from torch.

The time of a call (`Timer.seconds`) contains a constant: events are recorded in a few microseconds. So the
time of a launch is a slope, that of many launches over that of fewer, and is measured after work that keeps
the device busy: else the host, which launches more slowly than the device runs, would be measured.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import Fp8CompileError
from ..logs import get_logger
from . import catalog, cost, formats
from .catalog import Device, Rates

logger = get_logger(__name__)

# m, n, k of the forward, dgrad and wgrad of large layers; none is a power of two in all sizes
SIZES = (
    (8192, 4096, 4096),
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (4096, 14336, 8192),
    (16384, 8192, 8192),
)
COPY_BYTES = 1 << 30
RUNS, WARMUP = 15, 5
LAUNCHES, PAIRS = 64, 5  # of a pair of times, one is of 64 launches, one of 4 * 64
# buffers that are written meanwhile: at least 30 us each, and 256 launches take 1 to 3 ms of the host
AHEAD = 100
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class NoDevice(Fp8CompileError, RuntimeError):
    """There is no GPU to measure."""


class Timer:
    """Times calls on a CUDA or ROCm device by events, each after writing a buffer larger than its cache."""

    def __init__(self, device: torch.device, cache_bytes: int | None):
        self.device = device
        self.flushed = torch.empty(max(cache_bytes or 0, 1 << 26) * 2, dtype=torch.int8, device=device)

    def seconds(self, function: Callable[[], Any], ahead: int = 1) -> float:
        """The median time of a call, in seconds. `ahead`: how often the buffer is written before it."""
        for _ in range(WARMUP):
            function()
        times = []
        for _ in range(RUNS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(ahead):
                self.flushed.zero_()
            start.record()
            function()
            end.record()
            times.append((start, end))
        torch.cuda.synchronize(self.device)
        return statistics.median(start.elapsed_time(end) for start, end in times) * 1e-3


def calibrate(device: torch.device | str | None = None, write: bool = True) -> Device:
    """Measure `device` (default: the current GPU), print the description, and store it if `write`.

    Raises NoDevice without a CUDA or ROCm device. Takes about half a minute; nothing else should run on the
    device meanwhile.
    """
    if not torch.cuda.is_available():
        raise NoDevice("calibrate measures a CUDA or ROCm GPU, and torch sees none on this machine.")
    chosen = torch.device(device) if device is not None else torch.device("cuda", torch.cuda.current_device())
    if chosen.type != "cuda":
        raise NoDevice(f"calibrate measures a CUDA or ROCm GPU; {chosen} is not one.")
    with torch.cuda.device(chosen):
        properties = torch.cuda.get_device_properties(chosen)
        known = catalog.unmeasured(properties)
        made = measured(known, Timer(chosen, known.l2), chosen)
    print(catalog.to_toml(made), end="")
    if write:
        print(f"# stored in {catalog.store(made)}")
    return made


def measured(
    known: Device, timer: Timer, device: torch.device, sizes=SIZES, copy_bytes: int = COPY_BYTES
) -> Device:
    """`known`, with the sustained rates and the launch time that `timer` measures on `device`."""
    alone = timer.seconds(_launches(1, device))  # what the time of one kernel has beside its work
    rates = dict.fromkeys(cost.FP8, 0.0)
    for name in (*DTYPES, *cost.FP8) if known.has_fp8 else DTYPES:
        rates[name] = matmul_rate(timer, device, name, sizes, alone, known)
    rates["bandwidth"] = copy_rate(timer, device, copy_bytes)
    few, many = _launches(LAUNCHES, device), _launches(4 * LAUNCHES, device)
    pairs = [(timer.seconds(few, AHEAD), timer.seconds(many, AHEAD)) for _ in range(PAIRS)]
    launch = slope(pairs, LAUNCHES)
    return dataclasses.replace(known, sustained=Rates(**rates), launch=launch, origin="calibrated")


def matmul_rate(timer: Timer, device: torch.device, dtype: str, sizes, alone: float, known: Device) -> float:
    """FLOP/s of matmuls in "bf16", "fp16", "fp32" (torch's float32 precision "high"), "fp8" or "fp8_precise".

    The median over `sizes` (m, n, k), of whole waves of full tiles, as the cost model counts them on the
    device that `known` describes. `alone`: seconds of a kernel without work, which are taken off. 0.0 for FP8
    if the device or its library refuses FP8.
    """
    found = []
    for m, n, k in sizes:
        try:
            run = matmul(m, n, k, dtype, device)
            run()
        except torch.cuda.OutOfMemoryError:
            continue  # a card with little memory is measured with the smaller sizes only
        except RuntimeError as error:
            if dtype not in cost.FP8:
                raise
            logger.warning("no FP8 matmul here: %s", str(error).splitlines()[0])
            return 0.0
        seconds = timer.seconds(run) - alone - (cost.FP8_START_S if dtype in cost.FP8 else 0)
        # the cost model's time has ramps, and unfilled waves and tiles, as the measured one has
        found.append(known.flops.of(dtype) * cost.compute(known, m, n, k, dtype) / max(seconds, 1e-9))
    if not found:
        raise NoDevice(f"{device} has not enough free memory to measure a matmul.")
    return statistics.median(found)


def copy_rate(timer: Timer, device: torch.device, size: int) -> float:
    """Bytes/s of a copy of `size` bytes; bytes read and bytes written both count."""
    try:
        source, target = (torch.empty(size // 2, dtype=torch.bfloat16, device=device) for _ in range(2))
    except torch.cuda.OutOfMemoryError:
        return copy_rate(timer, device, size // 4)
    return 2 * size / max(timer.seconds(lambda: target.copy_(source)), 1e-9)


def slope(times: Sequence[tuple[float, float]], count: int) -> float:
    """Seconds that a kernel which does almost no work adds to others of its kind in a stream, from pairs of
    times: of `count` launches, and of four times as many. What each time has beside its launches falls out;
    the median leaves out pairs in which one was disturbed."""
    return max(statistics.median((many - few) / (3 * count) for few, many in times), 1e-7)


def _launches(count: int, device: torch.device) -> Callable[[], Any]:
    number = torch.zeros(1, device=device)

    def run() -> None:
        for _ in range(count):
            number.add_(1.0)

    return run


def matmul(m: int, n: int, k: int, dtype: str, device: torch.device) -> Callable[[], Any]:
    """A call that multiplies [m, k] by [k, n] in a way of `matmul_rate`. FP8: both K-major, bf16 output."""
    own = formats.pick(False, formats.fnuz()).dtype if dtype in cost.FP8 else DTYPES[dtype]
    a, b = (torch.randn(rows, k, device=device).to(own) for rows in (m, n))
    if dtype in cost.FP8:
        scale = torch.ones((), device=device)
        how: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": dtype == "fp8"}
        return lambda: torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=scale, **how)
    out = torch.empty(m, n, dtype=own, device=device)

    def run() -> Any:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            return torch.mm(a, b.t(), out=out)
        finally:
            torch.set_float32_matmul_precision(before)

    return run
