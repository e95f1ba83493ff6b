"""Which blocks are fastest? `python -m benchmarks.blocks --json benchmarks/results/nvidia-h200/blocks.jsonl`.

Each family of [benchmarks.kernels](families.py), at a size of a Llama-3-8B or GPT layer, with each of several
blocks (BLOCK_R, BLOCK_C, warps). `codegen.launch` has those that are chosen from. Several processes compile;
one at a time measures. A line for each: microseconds, GB/s of the bytes that must move, and each kernel's
microseconds.

`--persistent 0 2` also measures kernels of one tile a program as so many programs an SM that walk over tiles
(0: as they are written).

`--stages 0 2 3 4` also measures kernels that loop over columns with so many loads of a loop under way (0: as
they are written, one after the other): do norms, at half the rate of a copy, wait for memory? `--blocks 2`
takes the first two of each family.

On a CPU (`--device cpu`), kernels of tiny sizes run in Triton's interpreter, and nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import sympy
import torch

from fp8compile import compat
from fp8compile.codegen import launch

from . import lines, todo
from .families import FAMILIES, Source, must_move
from .kernels import Device, Plan, compare, interpreter
from .options import Parser, count
from .worker import one_line

Block = tuple[int, int, int]
HEAVY: list[Block] = [(64, 64, 8), (32, 128, 8), (64, 64, 4), (64, 128, 16), (32, 64, 4), (128, 32, 8)]
HEAVY += [(64, 32, 4), (32, 64, 8), (64, 128, 8), (32, 128, 4), (64, 32, 8), (128, 64, 16)]
TALL: list[Block] = [(128, 64, 16), (128, 32, 8), (64, 64, 8), (64, 32, 4), (128, 64, 8), (64, 64, 4)]
ROWS: list[Block] = [(32, 64, 8), (32, 128, 8), (16, 128, 8), (16, 128, 4), (16, 256, 8), (32, 64, 4)]
ROWS += [(32, 128, 16), (16, 64, 4)]
PLAIN: list[Block] = [(64, 128, 8), (64, 64, 4), (32, 128, 4), (128, 64, 8), (128, 128, 16), (64, 64, 8)]
PLAIN += [(64, 128, 4), (128, 64, 4)]
POINTS = {
    "swiglu-backward": ((8192, 14336), HEAVY),
    "swiglu-backward-merged": ((8192, 14336), HEAVY),
    "swiglu-backward-merged-four": ((8192, 14336), HEAVY),
    "swiglu": ((8192, 14336), HEAVY),
    "layer-norm-backward": ((8192, 4096), ROWS),
    "gelu-backward": ((16384, 16384), TALL),
    "rms-norm": ((8192, 4096), ROWS),
    "weight": ((14336, 4096), PLAIN),
    "attention": ((8192, 4096), PLAIN),
}
LOOPS = ("layer-norm-backward", "rms-norm")  # families whose kernels loop over columns
TINY = (40, 48)
RUNS = 11


Point = tuple[str, Block, int, int]


def points(
    names: list[str], stages: list[int], persistent: list[int], most: int | None = None
) -> list[Point]:
    """(family, block, stages, programs an SM), the first block of each family before the second of any; at
    most `most` blocks."""
    most = min(filter(None, (most, max(len(POINTS[name][1]) for name in names))))
    every = [
        (name, POINTS[name][1][i], s, programs)
        for i in range(most)
        for s in stages
        for programs in persistent
        for name in names
        if i < len(POINTS[name][1])
    ]
    return [x for x in every if not (x[3] if x[0] in LOOPS else x[2])]


def pipelined(stages: int) -> contextlib.AbstractContextManager[Any]:
    """Inside, loops over columns of generated kernels have so many loads under way."""
    load = compat.triton.load_kernel

    def loaded(name: str, source: str) -> Any:
        written = re.sub(
            r"in range\((.*), BLOCK_C\):", rf"in tl.range(\1, BLOCK_C, num_stages={stages}):", source
        )
        return load(f"{name}_{stages}", written.replace(name, f"{name}_{stages}"))

    return mock.patch.object(compat.triton, "load_kernel", loaded) if stages else contextlib.nullcontext()


@contextlib.contextmanager
def walking(programs: int) -> Iterator[None]:
    """Inside, so many programs of a kernel walk over its tiles, and raise each amax once."""
    load = compat.triton.load_kernel

    def loaded(name: str, source: str) -> Any:
        head, _, code = source.partition(f"def {name}(")
        parameters, *body = code.replace(name, f"{name}_walking").splitlines()
        rows = re.findall(r"# x0: \w+ \[(\d+)", source)[0]
        first = [line for line in body if re.match(r" +(tiles|s\d+_value) = |.*#", line)]
        last = [line for line in body if "tl.atomic_max(amax" in line]
        inner = [line for line in body if line not in (*first, *last) and " pid = " not in line]
        inner = [re.sub(r"^ +(largest\d+) = (.*)", r"    \1 = tl.maximum(\1, \2)", line) for line in inner]
        names = re.findall(r"largest\d+", " ".join(last))
        zeros = [f"    {name} = tl.zeros([BLOCK_R, BLOCK_C], tl.int32)" for name in names]
        tiles = f"tiles * (({rows} + BLOCK_R - 1) // BLOCK_R)"
        loop = f"    for pid in tl.range(tl.program_id(0).to(tl.int64), {tiles}, {programs}, num_stages=1):"
        lines = [f"{head}def {name}_walking({parameters}", *first, *zeros, loop]
        return load(f"{name}_walking", "\n".join([*lines, *(f"    {line}" for line in inner), *last, ""]))

    with (
        mock.patch.object(compat.triton, "load_kernel", loaded),
        mock.patch.object(launch, "grid", lambda group, block: sympy.Integer(programs)),
    ):
        yield


def measured(
    name: str, block: Block, stages: int, persistent: int, timer: Device | None, turn: TextIO
) -> dict[str, Any]:
    """One line. `turn`: a file whose lock allows to measure."""
    family, device = FAMILIES[name], "cpu" if timer is None else "cuda"
    row: dict[str, Any] = {"family": name, "config": block, "stages": stages, "persistent": persistent}
    processors = torch.cuda.get_device_properties(0).multi_processor_count if timer else 1
    form = walking(persistent * processors) if persistent else pipelined(stages)
    try:
        torch.manual_seed(0)
        inputs = family.inputs(Source(*(TINY if timer is None else POINTS[name][0]), device))
        with mock.patch.object(launch, "configurations", lambda group: (block,)), form:
            plan = Plan(family.function, fused=True, interpreted=timer is None)
            outputs = plan.first(*inputs)
        if timer is None:
            compare(family.function(*inputs), outputs)
            return row | {"us": None, "kernels": plan.generated}
        fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            ms = statistics.median(timer.milliseconds(lambda: plan(*inputs)))
            kernels = {kernel["name"][:60]: kernel["us"] for kernel in timer.kernels(lambda: plan(*inputs))}
        finally:
            fcntl.flock(turn, fcntl.LOCK_UN)
        size = must_move(family, inputs, outputs)
        return row | {"us": round(1e3 * ms, 1), "gb_s": round(size / ms / 1e6), "kernels": kernels}
    except Exception as error:
        return row | {"error": one_line(error)}


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="benchmarks.blocks", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--family",
        nargs="+",
        choices=tuple(POINTS),
        metavar="NAME",
        help=f"default: all: {', '.join(POINTS)}",
    )
    parser.add_argument(
        "--stages", nargs="+", type=count(0), default=[0], metavar="N", help="of loops; default: 0"
    )
    parser.add_argument(
        "--persistent", nargs="+", type=count(0), default=[0], metavar="N", help="programs an SM; default: 0"
    )
    parser.add_argument(
        "--blocks", type=count(1), metavar="N", help="the first N of each family; default: all"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--processes", type=count(1), default=8)
    parser.add_argument(
        "--budget", type=count(1), default=600, metavar="SECONDS", help="begin nothing new after this time"
    )
    parser.add_argument("--json", type=Path, required=True, metavar="PATH.jsonl", help="lines are added")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)  # of these processes
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    given = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(given)
    chosen = points(args.family or [*POINTS], args.stages, args.persistent, args.blocks)
    names = [
        f"{name} {block}{f', {s} stages' if s else ''}{f', {programs} programs' if programs else ''}"
        for name, block, s, programs in chosen
    ]
    if args.part is None:
        todo.plan(names)
        with tempfile.NamedTemporaryFile() as turn:
            more = [
                [*given, "--turn", turn.name, "--part", str(part)]
                for part in range(min(args.processes, len(chosen)))
            ]
            made = [subprocess.Popen([sys.executable, "-m", "benchmarks.blocks", *each]) for each in more]
            return max(process.wait() for process in made)
    end = time.monotonic() + args.budget
    with args.turn.open("a") as turn, interpreter() if args.device == "cpu" else contextlib.nullcontext():
        timer = Device(RUNS) if args.device == "cuda" else None
        found = []
        for i in range(args.part, len(chosen), args.processes):
            if time.monotonic() > end:
                break
            found.append(measured(*chosen[i], timer, turn))
            lines.add(args.json, found[-1])
            todo.done(names[i], found[-1].get("error"))
            print(found[-1], flush=True)
    return int(any("error" in row for row in found))


if __name__ == "__main__":
    sys.exit(main())
