"""Measure what the cost model assumes: `python -m benchmarks.matmuls`.

Every matmul of a Llama-3-8B layer at 8192 and at 2048 tokens, apart and merged (q, k and v; gate and up): in
bf16, and in FP8 with and without fast accumulation, in a random order: the card gets hotter meanwhile. Each
row has its number in this order, the seed, and the clocks that were sampled. Beside each time stands the one
that `devices.cost` computes from the device's description. First attention: the backends that torch may
take, in their order, cuDNN's version, and the kernels that ran.

    --json PATH    everything as JSON; `.jsonl`: what there is so far in each line, one after each matmul
    --budget N     begin no matmul after N seconds
    --seed N       another order
    --size tiny    small sizes, to try the command on a CPU, where nothing that it prints means anything
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from fp8compile.devices import calibrate, catalog, cost
from fp8compile.devices.catalog import Device

from . import machine, results, show, todo
from .sampler import Sampler

LAYERS = {
    "q, o": (1, 1),
    "k, v": (0.25, 1),
    "q+k+v": (1.5, 1),
    "gate, up": (3.5, 1),
    "gate+up": (7, 1),
    "down": (1, 3.5),
}
WIDTH = {"full": 4096, "tiny": 64}
TOKENS = {"full": (8192, 2048), "tiny": (64,)}
WAYS = ("bf16", "fp8", "fp8_precise")
INTERVAL_MS = 20  # a row takes about 100


class Clock:
    """Times calls on a CPU."""

    def __init__(self, runs: int = 3):
        self.runs = runs

    def seconds(self, function: Callable[[], Any], ahead: int = 1) -> float:
        times = []
        for _ in range(self.runs):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def matmuls(size: str) -> Iterator[tuple[str, str, tuple[int, int, int]]]:
    """(layer, gemm, (m, n, k))."""
    for tokens in TOKENS[size]:
        for layer, sides in LAYERS.items():
            n, k = (int(side * WIDTH[size]) for side in sides)
            for gemm, sizes in (
                ("fprop", (tokens, n, k)),
                ("dgrad", (tokens, k, n)),
                ("wgrad", (n, k, tokens)),
            ):
                yield layer, gemm, sizes


def row(
    timer: calibrate.Timer, device: torch.device, known: Device | None, sizes: tuple[int, int, int]
) -> dict[str, Any]:
    """Microseconds of one matmul, measured and by the model; None where the device refuses."""
    found: dict[str, Any] = {}
    for way in WAYS:
        try:
            found[way] = 1e6 * timer.seconds(calibrate.matmul(*sizes, way, device))
        except RuntimeError as error:
            found[way], found["error"] = None, str(error).splitlines()[0]
        if known is not None and known.flops.of(way):
            found[f"model {way}"] = 1e6 * (cost.compute(known, *sizes, way) + cost.start(known, way))
    return found


def attention(device: torch.device, size: str) -> dict[str, Any]:
    """Which backend SDPA takes for a Llama layer, forward and backward, by the kernels that ran."""
    from torch.profiler import ProfilerActivity, profile

    heads, tokens = (32, 8192) if size == "full" else (2, 64)
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
    q, k, v = (
        torch.randn(1, count, tokens, 128, **how) for count in (heads, max(1, heads // 4), max(1, heads // 4))
    )

    def step() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()

    step()
    kinds = [ProfilerActivity.CUDA] if device.type == "cuda" else [ProfilerActivity.CPU]
    with profile(activities=kinds) as seen:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    shown = "device_time_total" if device.type == "cuda" else "cpu_time_total"
    longest = sorted(seen.key_averages(), key=lambda event: -getattr(event, shown))[:5]
    order = getattr(torch._C, "_get_sdp_priority_order", lambda: [])()
    return {
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "priority": [SDPBackend(int(backend)).name for backend in order],
        "kernels": {event.key: round(getattr(event, shown), 1) for event in longest},
    }


def measure(
    device: torch.device,
    size: str,
    deadline: float = math.inf,
    seed: int = 0,
    ready: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Everything. `ready` gets what there is so far. No matmul is begun after the deadline."""
    cuda = device.type == "cuda"
    order = list(matmuls(size))
    random.Random(seed).shuffle(order)
    names = [f"{layer} {gemm}, {m} x {n} x {k}" for layer, gemm, (m, n, k) in order]
    todo.plan(names)
    known = catalog.of(device) if cuda else None
    timer: calibrate.Timer = (
        calibrate.Timer(device, known.l2 if known is not None else None) if cuda else Clock()
    )
    found: dict[str, Any] = {
        "device": machine.describe_device(device.type),
        "versions": machine.versions(),
        "described": known.name if known is not None else None,
        "clocks": machine.clocks(),
        "attention": attention(device, size),
        "matmuls": [],
    }
    ready(found)
    with Sampler(INTERVAL_MS) if cuda else contextlib.nullcontext() as sampler:
        for number, (layer, gemm, (m, n, k)) in enumerate(order):
            if time.monotonic() > deadline:
                break
            began = time.time()
            made = {"layer": layer, "gemm": gemm, "m": m, "n": n, "k": k, "order": number, "seed": seed}
            made |= row(timer, device, known, (m, n, k))
            made["clocks"] = sampler.between(began, time.time()) if sampler is not None else None
            found["matmuls"].append(made)
            todo.done(names[number])
            ready(found)
    if sampler is not None:
        found["sampling"] = {"samples": len(sampler.found), "problem": sampler.problem}
    return found


def table(found: dict[str, Any]) -> str:
    """The matmuls: microseconds, in brackets the model's; TFLOP/s; and what FP8 gains."""

    def shown(row: dict[str, Any], way: str) -> str:
        if row[way] is None:
            return "refused"
        model = row.get(f"model {way}")
        rate = 2e-6 * row["m"] * row["n"] * row["k"] / row[way]
        return f"{row[way]:.0f}{'' if model is None else f' ({model:.0f})'} us, {rate:.0f}"

    order = [(layer, gemm, *sizes) for size in WIDTH for layer, gemm, sizes in matmuls(size)]

    def place(row: dict[str, Any]) -> int:
        return order.index(tuple(row[key] for key in ("layer", "gemm", "m", "n", "k")))

    lines = [
        [
            row["layer"],
            row["gemm"],
            f"{row['m']} x {row['n']} x {row['k']}",
            *(shown(row, way) for way in WAYS),
        ]
        + [f"{row['bf16'] / row[way]:.2f}" if row[way] else "" for way in WAYS[1:]]
        + [f"{row['clocks']['sm_mhz']['median']:.0f}" if row["clocks"] else ""]
        for row in sorted(found["matmuls"], key=place)
    ]
    head = ["layer", "gemm", "m x n x k", "bf16", "fp8, fast", "fp8, precise", "fast", "precise", "MHz"]
    said = found["attention"]
    kernels = "\n".join(
        f"  {microseconds:10.1f} us  {name}" for name, microseconds in said["kernels"].items()
    )
    return (
        "microseconds (in brackets the model's), TFLOP/s; how many times as fast as "
        f"bf16\n{show.table(lines, head)}\n\n"
        f"attention: cuDNN {said['cudnn']}, order of backends {said['priority'] or 'unknown'}\n{kernels}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.matmuls", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--size", choices=tuple(WIDTH), help="default: full on cuda, tiny on cpu")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there")
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no matmul after this time"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order (default: 0)")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    device = (
        torch.device(args.device, torch.cuda.current_device())
        if args.device == "cuda"
        else torch.device("cpu")
    )

    def write(found: dict[str, Any]) -> None:
        if args.json:
            results.store(found, args.json)

    began = time.monotonic()
    found = measure(
        device,
        args.size or ("full" if args.device == "cuda" else "tiny"),
        began + args.budget,
        args.seed,
        write,
    )
    print(table(found), flush=True)
    return 0 if any(row["bf16"] for row in found["matmuls"]) else 1


if __name__ == "__main__":
    sys.exit(main())
