"""Measure cases: `python -m benchmarks.train --case gpt2-124m --arms bf16,fp8-delayed`.

Every arm has its own process, so that compile caches, memory and crashes stay apart. All arms share one
device and take turns, round by round, so that drifts of clocks and temperature affect all arms equally.
Waiting arms keep their weights, gradients and optimizer state on the device (the `idle` memory in the
results): where that is too much, name fewer arms. The result so far is written after each compilation and
turn. Meanwhile nvidia-smi samples clocks and power. `--static` estimates the same cases without a device.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8compile.dryrun.measure import in_turn, summarise

from . import machine, results, tables
from .arms import ARMS, DEFAULT, Arm, parse_arms, torchao_folder
from .cases import CASES
from .cases.base import Point, parse_case
from .options import Parser, count, destination
from .pool import Remote, WorkerFailed, exit_on_sigterm
from .sampler import Sampler

TIMEOUT = 1800.0  # seconds for one compilation or turn
PLANNED = 1  # the round after which `--seconds` becomes a number of rounds: the first one compiles validation


@dataclass
class ArmRun:
    """The measurements of one arm."""

    arm: Arm
    turns: list[dict[str, Any]] = field(default_factory=list)
    warmup: float | None = None  # seconds of the warm-up
    how: str = ""
    cached: bool = False  # compile caches of an earlier run were there: nothing is compiled cold
    first: dict[str, int] | None = None  # peak memory of the first step
    profile: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


class Bench:
    """One case: starts workers, gives them turns, collects rows."""

    def __init__(
        self,
        args: argparse.Namespace,
        text: str,
        torchao: str | None,
        scratch: Path,
        workers: dict[str, Remote],
        sampler: Sampler | None = None,
    ):
        self.args, self.text, self.torchao, self.scratch, self.workers = args, text, torchao, scratch, workers
        self.sampler = sampler
        self.case, self.variant, self.name = parse_case(text, CASES)
        self.deadline = time.monotonic() + (args.budget or float("inf"))
        self.end_of_all = time.monotonic() + 1.25 * (args.budget or float("inf"))
        self.device: dict[str, Any] = {"name": args.device}
        self.rounds = args.rounds  # with `--seconds`, as many as are planned
        self.rows: list[dict[str, Any]] = []  # of an estimate
        self.runs: list[ArmRun] = []  # of a measurement
        self.point = self.case.point(args.size, self.variant)
        self.session = results.Session("benchmarks.train", args.given)
        self.horizon = 0  # steps that each arm will train; 0: not known

    # -- workers --

    def worker(self, name: str) -> Remote:
        """The live worker of an arm (or of "probe", "static")."""
        if name not in self.workers:
            folder = self.scratch / machine.slug(self.name)
            folder.mkdir(parents=True, exist_ok=True)
            args = self.args
            start = {"device": args.device, "interpreted": args.interpreted, "torchao": self.torchao}
            log = folder / f"{name}.log"
            self.workers[name] = Remote(name, self.cache(name), log, TIMEOUT, **start)
        return self.workers[name]

    def cache(self, name: str) -> Path:
        """The compile caches of an arm. Each has its own, so that no arm finds what another has compiled."""
        return (self.args.caches or self.scratch).resolve() / machine.slug(self.name) / f"cache-{name}"

    def end(self, name: str) -> None:
        """End the process of an arm. Tests (`--interpreted`), which time nothing, keep it for the next
        case."""
        if name in self.workers and not self.args.interpreted:
            self.workers.pop(name).close()

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def attempt(self, run: ArmRun, do: str, **arguments: Any) -> dict[str, Any] | None:
        """Ask the arm's worker. If that fails, the error is recorded, the arm takes no further part, and the
        answer is None."""
        if run.error is not None:
            return None
        try:
            worker = self.worker(run.arm.name)
            worker.timeout = max(1.0, min(TIMEOUT, self.end_of_all - time.monotonic()))
            return worker.ask(do, **arguments)
        except WorkerFailed as failure:
            run.error = str(failure)
            if run.arm.name in self.workers:  # free the memory that it holds on the device
                self.workers.pop(run.arm.name).kill()
            return None

    # -- measuring --

    def measure(self) -> None:
        args = self.args
        if args.device == "cuda":
            for name in ("probe", *(arm.name for arm in args.arms)):
                self.worker(name)  # all import at the same time
            self.device = self.worker("probe").ask("probe")
            self.end("probe")
        else:
            self.device = machine.describe_device(args.device)
        self.runs = [ArmRun(arm, cached=any(self.cache(arm.name).rglob("*.py"))) for arm in args.arms]
        self.by_turns(self.runs)
        for arm in args.arms:
            self.end(arm.name)
        self.session.clocks["after"] = machine.clocks()

    def load(self, run: ArmRun) -> None:
        say(f"{self.name} {run.arm.name}: compiling")
        how = {"size": self.args.size, "warmup": self.args.warmup}
        made = self.attempt(run, "load", case=self.text, arm=run.arm.name, **how)
        if made is not None:
            run.warmup, run.how, run.first = made["warmup_s"], made["how"], made["first"]
        self.write()

    def turn(self, run: ArmRun, lead: int) -> None:
        if run.error is None:
            say(f"{self.name} {run.arm.name}: round {len(run.turns) + 1}")
        began = time.monotonic()
        made = self.attempt(run, "turn", steps=self.args.steps, lead=lead, horizon=self.horizon)
        if made is not None:
            run.turns.append({**made, "took_s": time.monotonic() - began})
        self.write()

    def profile(self, run: ArmRun) -> None:
        run.profile = self.attempt(run, "profile") or {}
        self.write()

    def by_turns(self, runs: list[ArmRun]) -> None:
        """All arms stay on the device. Late ones are not loaded, but the first."""
        for run in runs:
            if self.late() and any(other.warmup for other in runs):
                run.error = "out of time: not begun"
            else:
                self.load(run)
        for number in itertools.count():
            if number == self.rounds or number and self.late():
                break
            for run in in_turn(runs, number):
                self.turn(run, lead=0 if self.case.continues and number == 0 else 1)
            if self.args.seconds and number == PLANNED:
                self.rounds = self.plan(runs)
        for run in runs:
            self.profile(run)
            self.attempt(run, "unload")

    def plan(self, runs: list[ArmRun]) -> int:
        """How many rounds `--seconds` of timed steps allow the slowest arm, and the rest of the time all of
        them. The arms hear how many steps that makes."""
        lasts = [run.turns[-1] for run in runs if run.error is None and run.turns]
        rounds = PLANNED + 1
        if lasts:
            longest = max(turn["span_ms"] / 1e3 for turn in lasts)
            left = (self.deadline - time.monotonic()) / sum(turn["took_s"] for turn in lasts)
            rounds = max(rounds, int(min(self.args.seconds / longest, rounds + left)))
        self.horizon = self.args.warmup + rounds * (self.args.steps + 1) - self.case.continues
        return rounds

    # -- estimating --

    def estimate(self) -> None:
        from .static import DEVICE

        self.device = {"name": DEVICE, "memory": None, "capability": "9.0"}
        for arm in self.args.arms:
            say(f"{self.name} {arm.name}")
            row: dict[str, Any] = {**arm.labels, "error": None}
            row |= {"tokens": self.point.tokens}
            try:
                made = self.worker("static").ask("static", case=self.text, arm=arm.name)
                row |= {"static": made["figures"], "note": made["note"]}
            except WorkerFailed as failure:
                row["error"] = str(failure)
                self.workers.pop("static").kill()
            self.rows.append(row)
        self.end("static")

    # -- results --

    def run(self) -> None:
        """Measure or estimate everything."""
        (self.estimate if self.args.static else self.measure)()
        self.write()

    def write(self) -> None:
        result = self.result()
        results.write(result, destination(self.args, result))

    def result(self) -> dict[str, Any]:
        """The result so far."""
        args = self.args
        rows = [*self.rows, *(row_of(run, self.point, args.warmup, self.sampler) for run in self.runs)]
        results.add_ratios(rows)
        return {
            **self.session.common,
            "case": self.case.name,
            "name": self.name,
            "title": self.case.title,
            "variant": self.variant,
            "size": args.size,
            "static": args.static,
            "device": self.device,
            "settings": {
                "rounds": self.rounds,
                "steps": args.steps,
                "warmup": args.warmup,
                "interpreted": args.interpreted,
                "sampling": None if self.sampler is None else self.sampler.about(),
                "horizon": self.horizon,
                "seconds": self.session.seconds(),
            },
            "goal": self.case.goal(self.variant),
            "rows": rows,
        }


def say(what: str) -> None:
    """What happens now."""
    print(what, file=sys.stderr, flush=True)


def kill(workers: dict[str, Remote]) -> None:
    for name in list(workers):
        workers.pop(name).kill()


def row_of(run: ArmRun, point: Point, warmup: int, sampler: Sampler | None = None) -> dict[str, Any]:
    """One row of the results."""
    row: dict[str, Any] = {**run.arm.labels, "error": run.error}
    row |= {"note": point.note, "tokens": point.tokens * point.accumulate, "how": run.how}
    if run.error is None and not run.turns:
        row["error"] = "no round was run"
    if row["error"]:
        return row
    row |= summarise(run.turns)
    if row["memory"] is not None and run.first is not None:
        row["memory"]["first"] = run.first["allocated"]
    row["compile_s"] = {"cold": None, "warm": None}
    if run.arm.how is not None and run.warmup is not None:
        seconds = max(0.0, run.warmup - warmup * row["step_ms"]["total"] / 1e3)
        row["compile_s"]["warm" if run.cached else "cold"] = seconds
    row["clocks"] = clocks(run, sampler)
    row["timeline"] = run.profile.get("timeline")
    seen = run.profile.get("kernels")
    decided = run.profile.get("decisions")
    row["kernels"] = seen
    row["busy_ms"] = seen["busy_ms"] if seen else None
    count = seen["classes"]["fp8_gemm"]["count"] if seen else None
    proven = proof(count, decided) if run.profile else "no profile"
    row["fp8"] = {"gemm_kernels": count, "proof": proven, "decisions": decided}
    return row


def clocks(run: ArmRun, sampler: Sampler | None) -> dict[str, Any] | None:
    """What was sampled in the arm's turns, in each of them ("rounds"), and in its profile."""
    spans = [turn["wall"] for turn in run.turns if "wall" in turn]
    found = sampler.over(spans) if sampler is not None else None
    if found is None or sampler is None:
        return None
    return {**found, "profile": sampler.between(*run.profile["wall"]) if "wall" in run.profile else None}


def proof(count: float | None, decided: dict[str, Any] | None) -> str:
    """The evidence that FP8 ran, as text."""
    if count is not None:
        return f"{count:g} FP8 GEMM kernels a step seen by the profiler"
    if decided is None:
        return "not applicable: emulated"
    of = decided["fp8"] + decided["high_precision"]
    return f"not applicable: emulated; {decided['fp8']} of {of} matmuls of the graphs are FP8"


# -- command line --


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="benchmarks.train", description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--case", action="append", required=True, metavar="NAME[:KEY=VALUE,...]", help=", ".join(CASES))
    add("--arms", default=DEFAULT, help=f"comma-separated: {', '.join(ARMS)}")
    add("--rounds", type=count(1), help="turns of each arm (default: 6 on cuda, 5 on cpu)")
    add("--steps", type=count(1), help="timed steps a turn (default: 20 on cuda, 10 on cpu)")
    add("--seconds", type=count(1), help="as many rounds as give each arm so much time for its timed steps")
    add("--warmup", type=count(1), default=3, help="steps after compilation starts, untimed (default: 3)")
    add("--torchao", type=Path, metavar="PATH", help="its wheel, or a folder that has it, packed or not")
    add("--keep", type=Path, metavar="FOLDER", help="leave logs and compile caches there")
    add("--caches", type=Path, metavar="FOLDER", help="of compile caches, which stay for later runs")
    # no Inductor: for tests of this program
    add("--interpreted", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse(argv)
    try:
        args.arms = parse_arms(args.arms)
        for name in args.case:
            parse_case(name, CASES)
        if args.seconds and args.rounds:
            raise ValueError("--seconds: instead of --rounds")
        if args.torchao and not args.torchao.exists():
            raise ValueError(f"--torchao {args.torchao}: no such file or folder")
    except ValueError as error:
        parser.error(str(error))
    args.rounds = PLANNED + 1 if args.seconds else args.rounds or (6 if args.device == "cuda" else 5)
    args.steps = args.steps or (20 if args.device == "cuda" else 10)
    if len(args.case) > 1 and args.json and args.json.suffix == ".json":
        parser.error("--json: several cases need a folder")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    exit_on_sigterm()
    scratch = args.keep or Path(tempfile.mkdtemp(prefix="benchmarks-"))
    worked, workers = False, dict[str, Any]()
    sampler = Sampler() if args.device == "cuda" and not args.static else None
    try:
        try:
            torchao = str(torchao_folder(args.torchao.resolve(), scratch)) if args.torchao else None
        except ValueError as error:
            sys.exit(f"benchmarks.train: error: {error}")
        for name in args.case:
            bench = Bench(args, name, torchao, scratch.resolve(), workers, sampler)
            try:
                bench.run()
            except (WorkerFailed, ValueError) as failure:
                print(f"{name}: {failure}", file=sys.stderr)
                kill(workers)
                continue
            except SystemExit:  # stopped: what there is was written
                print(f"\n{tables.text(bench.result())}", flush=True)
                raise
            result = bench.result()
            print(f"\n{tables.text(result)}\n{destination(args, result)}", flush=True)
            worked = worked or any(not row["error"] for row in result["rows"]) or not result["rows"]
    finally:
        kill(workers)
        if sampler is not None:
            sampler.stop()
        if not args.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    return 0 if worked else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
