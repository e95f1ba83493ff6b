"""What a guard and a switch cost: CPU time of the steps of a small model, through Inductor, on one thread.

    python -m benchmarks.guard_cost --update notes/accuracy.md

The model is that of `benchmarks.guard`. Three trainings: with a guard that measures each 500th step, and
nothing planted; with a rule that is in force in some steps (`WINDOWS`); and with outlier tokens from the
first step on, so that a move is tried, and its graph compiled, which is timed by the clock on the wall (it
compiles in other processes). A step's time is compared with the median of steps that neither measure nor
switch. It is that of the whole step, with the optimizer.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fp8compile

from . import guard, machine, tables
from .options import Parser
from .results import RESULTS
from .show import table

PATH = RESULTS / "guard-cost.jsonl"
EVERY, STEPS = 500, 501
WINDOWS = [(i, i + 5) for i in range(10, 110, 10)]  # the first step in it, and the first one after it
DELAYED = guard.ARMS["delayed"]
MOVED = {"module": "blocks.*.down", "gemm": ["fprop", "wgrad"], "recipe": "rowwise"}
Clock = Callable[[], float]
GUARD = {"every": EVERY, "patience": 2}


def seconds(
    policy: dict[str, Any], steps: int, case: guard.Case, guarded: bool, clock: Clock = time.process_time
) -> list[float]:
    """Seconds of each step, of one training."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, (text, _) = guard.Model(case), guard.load_text()
    options: dict[str, Any] = {"policy": policy}
    run: Any = torch.compile(model, backend="fp8", options=options, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=guard.LR, fused=True)
    fp8compile.set_step(0, model)
    watching = fp8compile.guard(run) if guarded else None
    found = []
    for given in guard.inputs_of(case, text, 0, steps):
        began = clock()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(*given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(clock() - began)
    if watching is not None:
        watching.close()
    return found


def measure() -> dict[str, Any]:
    guarded = {**DELAYED, "guard": GUARD}
    settings = fp8compile.Policy.load(guarded).guard
    assert settings is not None
    cases, measures = guard.CASES, settings.measures
    times = seconds(guarded, STEPS, cases["healthy"], True)
    looked = {i: t for i, t in enumerate(times, 1) if measures(i)}
    usual = median(t for i, t in enumerate(times, 1) if i > 1 and not measures(i))
    windows = [f"{first}..{end}" for first, end in WINDOWS]
    rule = {**MOVED, "name": "window", "during": windows}
    switching = seconds({**DELAYED, "rules": [rule]}, WINDOWS[-1][1] + 5, cases["healthy"], False)
    into, out = [first for first, _ in WINDOWS], [end for _, end in WINDOWS]
    inside = [i for first, end in WINDOWS for i in range(first + 1, end)]
    outside = [i for i in range(4, len(switching)) if i not in {*inside, *into, *out}]

    def typical(steps: list[int]) -> float:
        return median(switching[i] for i in steps)

    moving = seconds(guarded, 7, cases["tokens"], True, time.perf_counter)
    return {
        "step": usual,
        "measured": median(looked.values()),
        "early": sum(looked.values()) - looked[EVERY] - usual * (len(looked) - 1),
        "into": typical(into) - typical(inside),
        "out": typical(out) - typical(outside),
        "tried": moving[2],
        "compiled": moving[5],
        "date": machine.now(),
        **machine.commit(),
        "versions": machine.versions(),
    }


def shown(found: dict[str, Any], markdown: bool = False) -> str:
    one = found["step"]
    measured = found["measured"] - one
    cells = [
        ("a step", f"{1e3 * one:.0f} ms", ""),
        (
            f"a measured step, each {EVERY}",
            f"{measured / one:.1f} steps more",
            f"{100 * measured / one / EVERY:.2f}%",
        ),
        ("the measured steps before the first of these", f"{found['early'] / one:.0f} steps more, once", ""),
        (
            "the first step in a window, the first after it",
            f"{found['into'] / one:+.2f} and {found['out'] / one:+.2f} steps",
            "",
        ),
        ("a measured step with a move that is tried", f"{found['tried']:.0f} s, by the clock", ""),
        (
            "the first step after a move: its graph is compiled",
            f"{found['compiled']:.0f} s, by the clock",
            "",
        ),
    ]
    return table(cells, ("what", "CPU time", "of a training"), markdown)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="benchmarks.guard_cost", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=PATH)
    parser.add_argument("--show", action="store_true", help="only print the table")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table into this page")
    args = parser.parse_args(argv)
    if not args.show:
        torch.set_num_threads(1)
        args.out.write_text(json.dumps(measure()) + "\n", encoding="utf-8")
    found = json.loads(args.out.read_text(encoding="utf-8"))
    if args.update:
        tables.update(args.update, "guard_cost", shown(found, True) + "\n")
    else:
        print(shown(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
