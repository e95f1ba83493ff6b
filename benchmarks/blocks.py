"""Which blocks and forms are fastest? `python -m benchmarks.blocks --json PATH.jsonl`.

Each family of [benchmarks.kernels](families.py), at a size of a Llama-3-8B or GPT layer, with each of several
blocks (BLOCK_R, BLOCK_C, warps). `codegen.blocks` has those that are chosen from: of a norm, a block of 4096
columns holds whole rows, and with others its kernel loops over columns. Several processes compile; one at a
time measures. A line for each: microseconds, GB/s of the bytes that must move, each kernel's microseconds,
the clock just after, device and commit; one more names those that were not done.

`--blocks 2` takes the first two of each family, what is chosen and what was chosen before. Other forms of
these kernels were slower on an H200 (notes/benchmarks.md). On a CPU (`--device cpu`), kernels of tiny sizes
run in Triton's interpreter, and nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import torch

from fp8compile.codegen import launch

from . import lines, machine, show
from .families import FAMILIES, Source, must_move
from .kernels import Device, Plan, compare, interpreter
from .options import Parser, count
from .pool import exit_on_sigterm
from .worker import one_line

Block = tuple[int, int, int]
HEAVY: list[Block] = [(32, 64, 4), (32, 128, 8), (64, 64, 8), (64, 64, 4), (64, 128, 16), (128, 32, 8)]
HEAVY += [(64, 32, 4), (32, 64, 8), (64, 128, 8), (32, 128, 4), (64, 32, 8), (128, 64, 16)]
TALL: list[Block] = [(64, 32, 8), (128, 64, 16), (64, 64, 16), (128, 32, 8), (64, 64, 8), (64, 32, 4)]
TALL += [(128, 64, 8), (64, 64, 4)]
NORMS: list[Block] = [(1, 4096, 4), (32, 128, 8), (1, 4096, 8), (32, 128, 16), (16, 128, 8), (16, 128, 4)]
NORMS += [(16, 256, 8), (32, 64, 8), (32, 64, 4), (16, 64, 4)]
BACKWARDS: list[Block] = [(1, 4096, 16), (32, 64, 8), (1, 4096, 32), (32, 128, 8), (16, 256, 8), (32, 64, 4)]
LONG: list[Block] = [(32, 64, 8), (1, 8192, 32), (32, 128, 8)]  # the second spills 32 to 72 bytes (sm_90)
PARTS: list[Block] = [(1, 4096, 4), (32, 128, 8), (1, 4096, 8), (16, 256, 8)]
PLAIN: list[Block] = [(64, 128, 8), (64, 64, 4), (32, 128, 4), (128, 64, 8), (128, 128, 16), (64, 64, 8)]
PLAIN += [(64, 128, 4), (128, 64, 4)]
POINTS = {
    "swiglu-backward-merged": ((8192, 14336), HEAVY),
    "swiglu": ((8192, 14336), HEAVY),
    "rms-norm-backward": ((8192, 4096), BACKWARDS),
    "layer-norm-backward": ((8192, 4096), BACKWARDS),
    "rms-norm-backward-long": ((8192, 8192), LONG),
    "layer-norm-backward-long": ((8192, 8192), LONG),
    "gelu-backward": ((16384, 16384), TALL),
    "rms-norm": ((8192, 4096), NORMS),
    "rms-norm-parts": ((8192, 4096), PARTS),
    "weight": ((14336, 4096), PLAIN),
    "attention": ((8192, 4096), PLAIN),
}
TINY = (40, 140)
RUNS = 11


def points(names: list[str], most: int | None = None) -> list[tuple[str, Block]]:
    """(family, block), the first block of each family before the second; at most `most` blocks."""
    most = min(filter(None, (most, max(len(POINTS[name][1]) for name in names))))
    return [(name, POINTS[name][1][i]) for i in range(most) for name in names if i < len(POINTS[name][1])]


def measured(name: str, block: Block, timer: Device | None, turn: TextIO) -> dict[str, Any]:
    """One line. `turn`: a file whose lock allows to measure."""
    family, device = FAMILIES[name.removesuffix("-long")], "cpu" if timer is None else "cuda"
    row: dict[str, Any] = {"family": name, "config": block, "clock": None}
    try:
        torch.manual_seed(0)
        inputs = family.inputs(Source(*(TINY if timer is None else POINTS[name][0]), device))
        with mock.patch.object(launch.blocks, "configurations", lambda group: (block,)):
            plan = Plan(family.function, fused=True, interpreted=timer is None)
            outputs = plan.first(*inputs)
        if timer is None:
            compare(family.function(*inputs), outputs)
            return row | {"us": None, "kernels": plan.generated}
        fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            ms = statistics.median(timer.milliseconds(lambda: plan(*inputs)))
            row["clock"] = (machine.clocks() or {}).get("clocks.sm")
            kernels = {kernel["name"][:60]: kernel["us"] for kernel in timer.kernels(lambda: plan(*inputs))}
        finally:
            fcntl.flock(turn, fcntl.LOCK_UN)
        size = must_move(family, inputs, outputs)
        return row | {"us": round(1e3 * ms, 1), "gb_s": round(size / ms / 1e6), "kernels": kernels}
    except Exception as error:
        return row | {"error": one_line(error)}


def processes(path: Path, given: list[str], chosen: list[tuple[str, Block]], count: int) -> int:
    """Start so many processes, and wait. What has no line at the end, or when SIGTERM comes, is named."""
    path.touch()
    before = len(lines.read(path))
    exit_on_sigterm()
    with tempfile.NamedTemporaryFile() as turn:
        command = [sys.executable, "-m", "benchmarks.blocks", *given, "--turn", turn.name, "--part"]
        made: list[subprocess.Popen[bytes]] = []
        try:
            for part in range(min(count, len(chosen))):
                made.append(subprocess.Popen([*command, str(part)]))
            return max(abs(process.wait()) for process in made)
        finally:
            for process in made:
                process.kill()
                process.wait()
            done = [(row["family"], tuple(row["config"])) for row in lines.read(path)[before:]]
            left = [f"{name} {list(block)}" for name, block in chosen if (name, block) not in done]
            if left:
                lines.add(path, {**machine.commit(), "not_done": left})
                print(*show.not_done(left), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="benchmarks.blocks", description=__doc__.split("\n")[0], allow_abbrev=False)
    add, here = parser.add_argument, "cuda" if torch.cuda.is_available() else "cpu"
    add("--family", nargs="+", choices=tuple(POINTS), metavar="NAME", help=f"of {', '.join(POINTS)}")
    add("--blocks", type=count(1), metavar="N", help="the first N of each family; default: all")
    add("--device", choices=("cuda", "cpu"), default=here)
    add("--processes", type=count(1), default=8)
    add("--budget", type=count(1), default=600, help="begin nothing new after so many seconds")
    add("--json", type=Path, required=True, metavar="PATH.jsonl", help="lines are added")
    add("--part", type=int, help=argparse.SUPPRESS)  # of these processes
    add("--turn", type=Path, help=argparse.SUPPRESS)
    given = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(given)
    chosen = points(args.family or [*POINTS], args.blocks)
    if args.part is None:
        return processes(args.json, given, chosen, args.processes)
    end = time.monotonic() + args.budget
    with args.turn.open("a") as turn, interpreter() if args.device == "cpu" else contextlib.nullcontext():
        timer = Device(RUNS) if args.device == "cuda" else None
        about = {"device": machine.describe_device(args.device)["name"], **machine.commit()}
        found = []
        for i in range(args.part, len(chosen), args.processes):
            if time.monotonic() > end:
                break
            found.append({**measured(*chosen[i], timer, turn), **about})
            lines.add(args.json, found[-1])
            print(found[-1], flush=True)
    return int(any("error" in row for row in found))


if __name__ == "__main__":
    sys.exit(main())
