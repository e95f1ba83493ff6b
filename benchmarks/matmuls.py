"""Measure what the cost model assumes: `python -m benchmarks.matmuls`.

Every matmul of a Llama-3-8B layer at 8192 and at 2048 tokens, apart and merged (q, k and v; gate and up): in
bf16, and in FP8 with and without fast accumulation, in a random order: the card gets hotter meanwhile. Each
row has its number in this order, the seed, and the clocks that were sampled. Beside each time stands the one
that `devices.cost` computes from the device's description.

    --json PATH    everything as JSON; `.jsonl`: what there is so far in each line, one after each matmul
    --budget N     begin no matmul after N seconds
    --seed N       another order
    --size tiny    small sizes, to try the command on a CPU, where nothing that it prints means anything
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fp8compile.devices import calibrate, catalog, cost
from fp8compile.devices.catalog import Device

from . import machine, results, show
from .options import Parser
from .sampler import Sampler

# n and k, in widths
LAYERS: dict[str, tuple[float, float]] = {"q, o": (1, 1), "k, v": (0.25, 1), "q+k+v": (1.5, 1)}
LAYERS |= {"gate, up": (3.5, 1), "gate+up": (7, 1), "down": (1, 3.5)}
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
            yield layer, "fprop", (tokens, n, k)
            yield layer, "dgrad", (tokens, k, n)
            yield layer, "wgrad", (n, k, tokens)


def row(
    timer: calibrate.Timer | Clock, device: torch.device, known: Device | None, sizes: tuple[int, int, int]
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
    names = [f"{layer} {gemm} {m} x {n} x {k}" for layer, gemm, (m, n, k) in order]
    known = catalog.of(device) if cuda else None
    timer: calibrate.Timer | Clock = Clock()
    if cuda:
        timer = calibrate.Timer(device, known.l2 if known is not None else None)
    found: dict[str, Any] = {
        **machine.commit(),
        "device": machine.describe_device(device.type),
        "versions": machine.versions(),
        "described": known.name if known is not None else None,
        "clocks": machine.clocks(),
        "matmuls": [],
        "not_done": names,
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
            found["not_done"] = names[number + 1 :]
            ready(found)
    if sampler is not None:
        found["sampling"] = sampler.about()
    return found


def table(found: dict[str, Any]) -> str:
    """The matmuls: microseconds, in brackets the model's; and what FP8 gains."""

    def shown(row: dict[str, Any], way: str) -> str:
        if row[way] is None:
            return "refused"
        model = row.get(f"model {way}")
        return f"{row[way]:.0f}" if model is None else f"{row[way]:.0f} ({model:.0f})"

    made = []
    for row in sorted(found["matmuls"], key=lambda row: (row["layer"], row["gemm"], row["m"])):
        cells = [row["layer"], row["gemm"], f"{row['m']} x {row['n']} x {row['k']}"]
        cells += [shown(row, way) for way in WAYS]
        cells += [f"{row['bf16'] / row[way]:.2f}" if row[way] else "" for way in WAYS[1:]]
        made.append([*cells, f"{row['clocks']['sm_mhz']['median']:.0f}" if row["clocks"] else ""])
    head = ["layer", "gemm", "m x n x k", "bf16", "fp8, fast", "fp8, precise", "fast", "precise", "MHz"]
    title = "microseconds, in brackets the model's; how many times as fast as bf16"
    return "\n".join([title, show.table(made, head), *show.not_done(found["not_done"])])


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    parser = Parser(prog="benchmarks.matmuls", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order (default: 0)")
    args = parser.parse(sys.argv[1:] if argv is None else argv, static=False)
    cuda = args.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    def write(found: dict[str, Any]) -> None:
        if args.json:
            results.store(found, args.json)

    found = measure(device, args.size, began + (args.budget or math.inf), args.seed, write)
    print(table(found), flush=True)
    return 0 if any(row["bf16"] for row in found["matmuls"]) else 1


if __name__ == "__main__":
    sys.exit(main())
