"""Are the cost model's matmul times those that were measured? `python -m benchmarks.matmul_fit`.

`devices.cost` has constants: tiles and their rates, what filling a pipeline costs, when a kernel starts. They
are right if they give what an H200 took, at the rates of its description:

    in a step    matmuls of two Llama-3-8B layers at 8192 tokens, as the profiler saw them in training steps
                 (benchmarks/results/nvidia-h200/llama-8b-layers-layers-2-*.json). The sums of fprops, dgrads
                 and wgrads are compared, which cuBLAS's names tell apart. The constants are fitted to the
                 runs of 27 November 2026, and not to later ones
    alone        `benchmarks.matmuls`: each with a cold L2 and between two events, whose time is taken off.
                 The sizes were in a fixed order, on a card that got hotter: "down" at 8192 tokens and what
                 came after it, "q, o" and "k, v" at 2048, took up to a third longer than neighbours of as
                 many FLOP. These rows are "hot", and nothing is fitted to them

A ratio over 1 is a model that is too slow. `--update PAGE` writes the tables into a page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fp8compile.devices import catalog, cost

from . import results, tables
from .show import table

FOLDER = results.RESULTS / "nvidia-h200"
H200 = catalog.find("h200")
EVENTS = 3.3e-6  # of two events: with a launch of 1.7 us between them they take 4 to 6 (notes/cost-model.md)
WIDTH, LAYERS = 4096, 2
# out and in features of a layer's linears, as parts of the width: as they are written, and merged
LINEARS = ((1, 1), (0.25, 1), (0.25, 1), (1, 1), (3.5, 1), (3.5, 1), (1, 3.5))
MERGED = ((1.5, 1), (1, 1), (7, 1), (1, 3.5))
Sizes = tuple[int, int, int]


class Group(NamedTuple):
    """Launches whose time is known together: of one kind, in one arm."""

    arm: str
    gemms: str
    way: str
    sizes: list[Sizes]
    seconds: float


def model(way: str, sizes: list[Sizes]) -> float:
    return sum(cost.compute(H200, *size, way) + cost.start(H200, way) for size in sizes)


def of_layer(gemms: str, merged: bool, tokens: int = 8192) -> list[Sizes]:
    found: list[Sizes] = []
    for sides in MERGED if merged else LINEARS:
        n, k = (int(side * WIDTH) for side in sides)
        each = {"fprop": (tokens, n, k), "dgrad": (tokens, k, n), "wgrad": (n, k, tokens)}
        found += [each[gemm] for gemm in gemms.split(", ")]
    return found


def kind(name: str) -> tuple[str, str]:
    """(which gemms, the way they are computed) of a kernel of cuBLAS in a step: in bf16 by its last letters,
    T or N for each operand, in FP8 by its first, q for E4M3 and r for E5M2, which only gradients have."""
    letters = name.removeprefix("nvjet_sm90_")
    if letters[0] == "q":
        return ("fprop", "fp8") if letters[1] == "q" else ("dgrad, wgrad", "fp8_precise")
    return {"TN": "fprop", "NN": "dgrad", "NT": "wgrad"}[letters.rsplit("_", 1)[1][:2]], "bf16"


def in_steps() -> Iterator[Group]:
    for path in sorted(FOLDER.glob("llama-8b-layers-layers-2-*.json")):
        for row in json.loads(path.read_text())["rows"]:
            took: dict[tuple[str, str], float] = {}
            for kernel in (row.get("kernels") or {}).get("longest", ()):
                if kernel["class"] in ("fp8_gemm", "bf16_gemm"):
                    took[kind(kernel["name"])] = took.get(kind(kernel["name"]), 0) + kernel["ms"] / 1e3
            for (gemms, way), seconds in sorted(took.items()):
                way = "fp8" if row["arm"].endswith("-fast-accum") else way
                sizes = of_layer(gemms, merged=row["kind"] == "fp8") * LAYERS
                yield Group(row["arm"], gemms, way, sizes, seconds)


def alone() -> Iterator[tuple[int, bool, str, float]]:
    """(tokens, was the card throttled, way, the model's time over the measured one) of each matmul."""
    for row in json.loads((FOLDER / "matmuls.jsonl").read_text().splitlines()[-1])["matmuls"]:
        size = row["m"], row["n"], row["k"]
        tokens = row["k"] if row["gemm"] == "wgrad" else row["m"]
        hot = row["layer"] in (("down",) if tokens == 8192 else ("q, o", "k, v"))
        for way in ("bf16", "fp8", "fp8_precise"):
            yield tokens, hot, way, model(way, [size]) / (1e-6 * row[way] - EVENTS)


def tables_of() -> str:
    steps: dict[tuple[str, str, str], list[Group]] = {}
    for group in in_steps():
        steps.setdefault((group.arm, group.gemms, group.way), []).append(group)
    lines = []
    for (arm, gemms, way), groups in steps.items():
        took, made = statistics.fmean(x.seconds for x in groups), model(way, groups[0].sizes)
        tflops = sum(2 * m * n * k for m, n, k in groups[0].sizes) / took / 1e12
        lines.append([arm, gemms, way, len(groups), f"{1e3 * took:.2f}", f"{1e3 * made:.2f}"])
        lines[-1] += [f"{made / took:.3f}", f"{tflops:.0f}"]
    first = table(lines, ["arm", "gemms", "way", "runs", "measured, ms", "model", "ratio", "TFLOP/s"], True)
    cells: dict[tuple[int, bool, str], list[float]] = {}
    for tokens, hot, way, ratio in alone():
        cells.setdefault((tokens, hot, way), []).append(ratio)
    lines = [
        [f"{tokens} tokens{', hot' if hot else ''}", way, len(found), f"{statistics.median(found):.2f}"]
        + [f"{min(found):.2f} to {max(found):.2f}"]
        for (tokens, hot, way), found in sorted(cells.items())
    ]
    return f"{first}\n\n{table(lines, ['alone', 'way', 'matmuls', 'ratio, median', 'each'], True)}\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.matmul_fit", description=__doc__.split("\n")[0])
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the tables into this page")
    args = parser.parse_args(argv)
    if args.update:
        tables.update(args.update, "matmul fit", tables_of())
    else:
        print(tables_of(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
