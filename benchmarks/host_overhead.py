"""What a call costs the host, over Inductor's own: `python -m benchmarks.host_overhead`.

Tiny matrices on a CPU with one thread, so that the host's work is most of a call. Microseconds of forward and
backward, apart, of the same model compiled with `backend="inductor"`, and by us, with each recipe:

    1, 2, 4, 32    a graph of so many linears
    32 blocks      of two linears each, compiled one by one: one graph, called 32 times a step, each time with
                   other weights

All arms of a case are in one process and take turns. A figure of a turn is a median of its steps; a row has
the median over turns of the difference to Inductor's own in the same turn, and its quartiles. `code` is the
part of it within compiled code: other kernels (casts, amaxes, the update of the state) are no host's work,
but on a CPU they take the same thread's time. The rest is ours to keep small. Times are the thread's CPU
time, because a machine may be shared.

`--trees A,B` compares checkouts: a process for each, which take turns, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from .options import count
from .pool import ROOT, environment
from .show import table

CASES, RECIPES = "1,2,4,32,32 blocks", "tensorwise,delayed"
WIDTH, ROWS, STEPS = 16, 16, 30
PARTS = ("forward", "backward")


class Chain(nn.Module):
    def __init__(self, linears: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(linears))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Arm:
    """A model, compiled; and the time of its compiled code so far, in ns."""

    code = 0

    def __init__(self, case: str, recipe: str | None):
        torch.manual_seed(0)
        number, *blocks = case.split()
        how: dict[str, Any] = {"backend": "inductor"}
        if recipe is not None:
            how = {"backend": "fp8", "options": {"policy": {"rules": [{"fp8": "on"}]}, "recipe": recipe}}
        graphs, linears = (int(number), 2) if blocks else (1, int(number))
        parts = [Chain(linears) for _ in range(graphs)]
        for part in parts:
            part.compile(**how)
        self.model = nn.Sequential(*parts)
        self.x, self.grad = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
        for _ in range(4):  # compiles, and leaves cold calls behind
            self.step()

    def step(self) -> tuple[int, int, int, int]:
        """ns of forward and backward, and of the compiled code in each."""
        times, code = [time.thread_time_ns()], [Arm.code]
        y = self.model(self.x)
        times.append(time.thread_time_ns())
        code.append(Arm.code)
        y.backward(self.grad)
        times.append(time.thread_time_ns())
        code.append(Arm.code)
        self.model.zero_grad()
        self.x.grad = None
        return times[1] - times[0], times[2] - times[1], code[1] - code[0], code[2] - code[1]

    def turn(self) -> list[float]:
        """Medians, in microseconds."""
        steps = [self.step() for _ in range(STEPS)]
        return [median(column) / 1e3 for column in zip(*steps, strict=True)]


def time_code() -> None:
    """Let `Arm.code` count the time within code that Inductor has compiled."""
    from torch._inductor.output_code import CompiledFxGraph

    stock = CompiledFxGraph.__call__

    def timed(self: Any, inputs: Any) -> Any:
        began = time.thread_time_ns()
        try:
            return stock(self, inputs)
        finally:
            Arm.code += time.thread_time_ns() - began

    CompiledFxGraph.__call__ = timed  # type: ignore[method-assign]


def prepare(tree: str) -> None:
    """Import the package of this checkout."""
    sys.path.insert(0, tree)
    import fp8compile

    assert Path(fp8compile.__file__).is_relative_to(Path(tree).resolve()), fp8compile.__file__
    torch.set_num_threads(1)


# -- measuring --


def worker(tree: str, recipes: list[str]) -> None:
    """Answers each line of stdin: a case is made, an empty line is a turn of all its arms."""
    prepare(tree)
    time_code()
    arms: list[Arm] = []
    for line in sys.stdin:
        if case := line.strip():
            arms.clear()
            torch._dynamo.reset()
            arms += [Arm(case, recipe) for recipe in (None, *recipes)]
            gc.collect()
            gc.disable()
            print(json.dumps(None), flush=True)
        else:
            print(json.dumps([arm.turn() for arm in arms]), flush=True)


class Process:
    def __init__(self, tree: str, recipes: str):
        self.tree = tree
        command = [sys.executable, "-m", "benchmarks.host_overhead", "--worker", tree, "--recipes", recipes]
        env = environment(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: str = "") -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.tree}: the process ended with status {self.process.wait()}")
        return json.loads(answer)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return {"median": round(middle, 1), "low": round(low, 1), "high": round(high, 1)}


def rows_of(case: str, recipes: list[str], turns: list[list[list[float]]]) -> Iterator[dict[str, Any]]:
    """A row for Inductor's own times, and one for what each recipe adds."""
    for number, recipe in enumerate(("inductor", *recipes)):
        row: dict[str, Any] = {"case": case, "arm": recipe}
        for place, part in enumerate(PARTS):
            took, code = ([turn[number][place + shift] for turn in turns] for shift in (0, 2))
            if number:
                took, code = (
                    [x - turn[0][place + shift] for x, turn in zip(values, turns, strict=True)]
                    for values, shift in ((took, 0), (code, 2))
                )
            rest = [a - b for a, b in zip(took, code, strict=True)]
            row[part] = {"us": spread(took), "code": spread(code), "host": spread(rest)}
        yield row


def measured(
    trees: list[str], cases: list[str], recipes: list[str], turns: int
) -> dict[str, list[dict[str, Any]]]:
    processes = [Process(tree, ",".join(recipes)) for tree in trees]
    found: dict[str, list[dict[str, Any]]] = {tree: [] for tree in trees}
    for case in cases:
        for process in processes:
            process.ask(case)
            process.ask()  # warm
        seen: dict[str, list[Any]] = {tree: [] for tree in trees}
        for turn in range(turns):
            for process in processes[:: 1 if turn % 2 else -1]:
                seen[process.tree].append(process.ask())
        for tree in trees:
            found[tree] += rows_of(case, recipes, seen[tree])
        print(f"measured: {case}", file=sys.stderr, flush=True)
    for process in processes:
        process.end()
    return found


def shown(tree: str, rows: list[dict[str, Any]]) -> None:
    def cell(one: dict[str, float]) -> str:
        return f"{one['median']:.0f} ({one['low']:.0f}-{one['high']:.0f})"

    keys = [(part, key) for part in PARTS for key in ("us", "code", "host")]
    head = ["case", "arm", *(f"{part}, {key}" for part, key in keys)]
    cells = [[row["case"], row["arm"], *(cell(row[part][key]) for part, key in keys)] for row in rows]
    print(f"### {tree}\n\n{table(cells, head, markdown=True)}\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.host_overhead", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--cases", default=CASES, help=f"default: {CASES}")
    add("--recipes", default=RECIPES, help=f"default: {RECIPES}")
    add("--turns", type=count(2), default=20, help=f"of {STEPS} steps for each arm (default: 20)")
    add("--trees", default=str(ROOT), help="checkouts to compare (default: this one)")
    add("--json", type=Path, help="also add a line for each checkout to this file")
    add("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    cases, recipes = given.cases.split(","), given.recipes.split(",")
    if given.worker:
        return worker(given.worker, recipes)
    trees = [str(Path(tree).resolve()) for tree in given.trees.split(",")]
    found = measured(trees, cases, recipes, given.turns)
    from . import lines, machine

    for tree, rows in found.items():
        shown(Path(tree).name, rows)
        if given.json is not None:
            about = {"date": machine.now(), **machine.commit(Path(tree)), "versions": machine.versions()}
            lines.add(given.json, {"name": Path(tree).name, **about, "turns": given.turns, "rows": rows})


if __name__ == "__main__":
    main()
