"""Which blocks and forms are fastest? `python -m benchmarks.blocks --json PATH.jsonl`.

Each family of [benchmarks.kernels](families.py), at a size of a Llama-3-8B or GPT layer, with each of several
blocks (BLOCK_R, BLOCK_C, warps). `codegen.blocks` has those that are chosen from: of a norm, a block of 4096
columns holds whole rows, and with others its kernel loops over columns. Several processes compile; one at a
time measures. A line for each: microseconds, GB/s of the bytes that must move, each kernel's microseconds.

`--form` also measures kernels in other forms than the one that is written (`now`), where they have them:

    forward        loops over columns: each from the first column on, without hints to the cache
    stages-3       loops over columns: three loads of the loop are under way
    still          a program takes one block of rows, and reduces its column sums there
    persistent-2   two programs an SM walk over the tiles
    guarded        a program raises an amax only if it has found a larger one

`--blocks 2` takes the first two of each family, what is chosen and what was chosen before. On a CPU
(`--device cpu`), kernels of tiny sizes run in Triton's interpreter, and nothing is timed.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO
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
HEAVY: list[Block] = [(32, 64, 4), (32, 128, 8), (64, 64, 8), (64, 64, 4), (64, 128, 16), (128, 32, 8)]
HEAVY += [(64, 32, 4), (32, 64, 8), (64, 128, 8), (32, 128, 4), (64, 32, 8), (128, 64, 16)]
TALL: list[Block] = [(64, 32, 8), (128, 64, 16), (64, 64, 16), (128, 32, 8), (64, 64, 8), (64, 32, 4)]
TALL += [(128, 64, 8), (64, 64, 4)]
NORMS: list[Block] = [(1, 4096, 4), (32, 128, 8), (1, 4096, 8), (32, 128, 16), (16, 128, 8), (16, 128, 4)]
NORMS += [(16, 256, 8), (32, 64, 8), (32, 64, 4), (16, 64, 4)]
BACKWARDS: list[Block] = [(1, 4096, 16), (32, 64, 8), (1, 4096, 32), (32, 128, 8), (16, 256, 8), (32, 64, 4)]
PLAIN: list[Block] = [(64, 128, 8), (64, 64, 4), (32, 128, 4), (128, 64, 8), (128, 128, 16), (64, 64, 8)]
PLAIN += [(64, 128, 4), (128, 64, 4)]
POINTS = {
    "swiglu-backward": ((8192, 14336), HEAVY),
    "swiglu-backward-merged": ((8192, 14336), HEAVY),
    "swiglu-backward-merged-four": ((8192, 14336), HEAVY),
    "swiglu": ((8192, 14336), HEAVY),
    "rms-norm-backward": ((8192, 4096), BACKWARDS),
    "layer-norm-backward": ((8192, 4096), BACKWARDS),
    "gelu-backward": ((16384, 16384), TALL),
    "rms-norm": ((8192, 4096), NORMS),
    "weight": ((14336, 4096), PLAIN),
    "attention": ((8192, 4096), PLAIN),
}
LOOPS = (
    "rms-norm",
    "rms-norm-backward",
    "layer-norm-backward",
)  # families whose kernels may loop over columns
ONE_TILE = ("swiglu", "swiglu-backward", "swiglu-backward-merged", "swiglu-backward-merged-four")
TINY = (40, 140)
RUNS = 11

Point = tuple[str, Block, str]
Form = contextlib.AbstractContextManager[Any]


def points(names: list[str], forms: list[str], most: int | None = None) -> list[Point]:
    """(family, block, form), the first block of each family before the second; at most `most` blocks."""
    most = min(filter(None, (most, max(len(POINTS[name][1]) for name in names))))
    every = [
        (name, POINTS[name][1][i], form)
        for i in range(most)
        for form in forms
        for name in names
        if i < len(POINTS[name][1])
    ]
    return [x for x in every if x[2] == "now" or FORMS[x[2]].of(x[0], x[1])]


def rewritten(suffix: str, change: Callable[[str, str], str]) -> Form:
    """Inside, generated kernels are of a changed source and have a longer name. `change(source, name)`."""
    load = compat.triton.load_kernel

    def loaded(name: str, source: str) -> Any:
        return load(name + suffix, change(source, name).replace(name, name + suffix))

    return mock.patch.object(compat.triton, "load_kernel", loaded)


def forward(source: str, _name: str) -> str:
    return re.sub(r', eviction_policy="\w+"', "", re.sub(r"start = .* - done\b", "start = done", source))


def pipelined(source: str, _name: str) -> str:
    return re.sub(r"in range\((.*), BLOCK_C\):", r"in tl.range(\1, BLOCK_C, num_stages=3):", source)


def guarded(source: str, _name: str) -> str:
    """The source of programs that read each amax first: most find nothing larger, and spare the atomic."""
    return re.sub(
        r"^( +)tl.atomic_max\((amax\d+), (tl.max\(largest\d+\)), (.*)\)$",
        r"\1\2_here = \3\n\1if \2_here > tl.load(\2):\n\1    tl.atomic_max(\2, \2_here, \4)",
        source,
        flags=re.MULTILINE,
    )


def persistent(source: str, name: str) -> str:
    """The source of programs that walk over tiles, and raise each amax once."""
    head, _, code = source.partition(f"def {name}(")
    parameters, *body = code.splitlines()
    rows = re.findall(r"# x0: \w+ \[(\d+)", source)[0]
    first = [line for line in body if re.match(r" +(tiles|s\d+_value) = |.*#", line)]
    last = [line for line in body if "tl.atomic_max(amax" in line]
    inner = [line for line in body if line not in (*first, *last) and " pid = " not in line]
    inner = [re.sub(r"^ +(largest\d+) = (.*)", r"    \1 = tl.maximum(\1, \2)", line) for line in inner]
    names = re.findall(r"largest\d+", " ".join(last))
    zeros = [f"    {name} = tl.zeros([BLOCK_R, BLOCK_C], tl.int32)" for name in names]
    tiles = f"tiles * (({rows} + BLOCK_R - 1) // BLOCK_R)"
    loop = (
        f"    for pid in tl.range(tl.program_id(0).to(tl.int64), {tiles}, tl.num_programs(0), num_stages=1):"
    )
    lines = [f"{head}def {name}({parameters}", *first, *zeros, loop]
    return "\n".join([*lines, *(f"    {line}" for line in inner), *last, ""])


@contextlib.contextmanager
def walking() -> Iterator[None]:
    """Inside, two programs an SM walk over the tiles of a kernel."""
    found = torch.cuda.is_available()
    programs = 2 * (torch.cuda.get_device_properties(0).multi_processor_count if found else 1)
    grid = mock.patch.object(launch.blocks, "grid", lambda group, block: sympy.Integer(programs))
    with rewritten("_persistent", persistent), grid:
        yield


class Other(NamedTuple):
    """A form: a context in which kernels have it, and whether a family's kernel with a block may have it."""

    made: Callable[[], Form]
    of: Callable[[str, Block], bool]


def _loops(name: str, block: Block) -> bool:
    return name in LOOPS and block[1] < POINTS[name][0][1]


FORMS = {
    "forward": Other(lambda: rewritten("_forward", forward), _loops),
    "stages-3": Other(lambda: rewritten("_stages", pipelined), _loops),
    "still": Other(
        lambda: mock.patch.object(launch.blocks, "walk", lambda group: 1),
        lambda name, _: name == "gelu-backward",
    ),
    "guarded": Other(lambda: rewritten("_guarded", guarded), lambda name, _: name in ONE_TILE),
    "persistent-2": Other(walking, lambda name, _: name in ONE_TILE),
}


def measured(name: str, block: Block, form: str, timer: Device | None, turn: TextIO) -> dict[str, Any]:
    """One line. `turn`: a file whose lock allows to measure."""
    family, device = FAMILIES[name], "cpu" if timer is None else "cuda"
    row: dict[str, Any] = {"family": name, "config": block, "form": form}
    made = contextlib.nullcontext() if form == "now" else FORMS[form].made()
    try:
        torch.manual_seed(0)
        inputs = family.inputs(Source(*(TINY if timer is None else POINTS[name][0]), device))
        with mock.patch.object(launch.blocks, "configurations", lambda group: (block,)), made:
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
    forms = ("now", *FORMS)
    parser.add_argument(
        "--form", nargs="+", choices=forms, default=["now"], metavar="NAME", help=f"of {', '.join(forms)}"
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
    chosen = points(args.family or [*POINTS], args.form, args.blocks)
    names = [f"{name} {block}{f', {form}' if form != 'now' else ''}" for name, block, form in chosen]
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
