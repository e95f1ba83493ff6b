"""Measure cases: `python -m benchmarks.train --case gpt2-124m --arms bf16,fp8-delayed`.

Every arm has its own process, so that compile caches, memory and crashes stay apart. All arms share one
device and take turns, round by round, so that drifts of clocks and temperature affect all arms equally.
Waiting arms keep their weights, gradients and optimizer state on the device (the `idle` memory in the
results). If that needs too much memory, `--rebuild` rebuilds each arm for its turn, and no arm waits on the
device. The result so far is written after each compilation and turn. Meanwhile nvidia-smi samples clocks and
power. `--static` estimates the same cases without a device.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shlex
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fp8compile.dryrun.measure import in_turn, summarise

from . import machine, results, tables, todo
from .arms import ARMS, DEFAULT, Arm, parse_arms, torchao_folder
from .cases import CASES
from .cases.base import Case, Fit, Point, parse_case
from .options import Parser, count, destination
from .pool import Remote, WorkerFailed
from .sampler import Sampler
from .show import Progress

LATE = "out of time: not begun"
NO_PROFILE = "no profile"
PLANNED = 1  # the round after which `--seconds` becomes a number of rounds: the first one compiles validation


@dataclass
class ArmRun:
    """The measurements of one arm at one point."""

    arm: Arm
    turns: list[dict[str, Any]] = field(default_factory=list)
    warmups: list[float] = field(default_factory=list)  # seconds of the warm-up in each load, in order
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
        self.rebuild = bool(
            args.rebuild if args.rebuild is not None else self.case.rebuild and args.size == "full"
        )
        self.fit = [0, 1]
        self.device: dict[str, Any] = {}
        self.skipped = 0
        self.rows: list[dict[str, Any]] = []  # of the points that are finished
        self.runs: list[ArmRun] = []  # of the point that is measured now
        self.point: Point | None = None
        self.began, self.date, self.commit = time.monotonic(), machine.now(), machine.commit()
        self.clocks: dict[str, Any] = {"before": machine.clocks(), "after": None}
        self.horizon = 0  # steps that each arm will train; 0: not known

    # -- workers --

    def worker(self, name: str) -> Remote:
        """The live worker of an arm (or of "probe", "static")."""
        if name not in self.workers:
            folder = self.scratch / machine.slug(self.name)
            folder.mkdir(parents=True, exist_ok=True)
            start = {
                "device": self.args.device,
                "interpreted": self.args.interpreted,
                "torchao": self.torchao,
            }
            log = folder / f"{name}.log"
            self.workers[name] = Remote(name, self.cache(name), log, self.args.timeout, **start)
        return self.workers[name]

    def cache(self, name: str) -> Path:
        """The compile caches of an arm. Each has its own, so that no arm finds what another has compiled."""
        return (self.args.caches or self.scratch).resolve() / machine.slug(self.name) / f"cache-{name}"

    def start(self, names: list[str]) -> None:
        """Start processes at the same time: most of that is imports. One that fails is started again when
        its arm is loaded, and fails there."""

        def one(name: str) -> None:
            with contextlib.suppress(WorkerFailed):
                self.worker(name)

        with ThreadPoolExecutor() as threads:
            list(threads.map(one, names))

    def end(self, name: str) -> None:
        """End the process of an arm. Tests (`--interpreted`), which time nothing, keep it for the next
        case."""
        if name in self.workers and not self.args.interpreted:
            self.workers.pop(name).close()

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def too_late(self, run: ArmRun) -> bool:
        """Whether an arm is not loaded (again), because the time is over. The first arm of a case is loaded
        in any case."""
        if not self.late() or not any(other.warmups for other in self.runs):
            return False
        if not run.warmups:
            run.error = run.error or LATE
        return True

    def attempt(self, run: ArmRun, do: str, **arguments: Any) -> dict[str, Any] | None:
        """Ask the arm's worker. If that fails, the error is recorded, the arm takes no further part, and the
        answer is None."""
        if run.error is not None:
            return None
        try:
            worker = self.worker(run.arm.name)
            worker.timeout = max(1.0, min(self.args.timeout, self.end_of_all - time.monotonic()))
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
            self.start(["probe", *(arm.name for arm in args.arms if not self.rebuild)])
            self.device = self.worker("probe").ask("probe")
            self.end("probe")
        else:
            self.device = machine.describe_device(args.device)
        self.fit = [self.device["memory"], 1 if self.rebuild else len(args.arms)]
        points = self.case.points(args.size, self.variant, Fit(*self.fit))
        todo.plan({self.item(arm): len(points) * args.rounds for arm in args.arms})
        cached = [arm for arm in args.arms if any(self.cache(arm.name).rglob("*.py"))]
        progress = Progress(len(points) * args.rounds * len(args.arms), self.name)
        for index, point in enumerate(points):
            if index and self.late():
                self.skipped = len(points) - index
                break
            self.point, self.runs = point, [ArmRun(arm, cached=arm in cached) for arm in args.arms]
            runs = self.runs
            (self.by_turns if self.rebuild else self.together)(index, runs, progress)
            if args.warm_compile and not self.rebuild and len(points) == 1 and not self.late():
                for run in runs:
                    self.end(run.arm.name)
                for run in runs:  # a second process uses the caches that the first one filled
                    if run.arm.how is not None and run.error is None:
                        progress(f"{run.arm.name}: warm compilation", 0)
                        self.load(run, index)
                        self.end(run.arm.name)
            for run in runs:
                if run.error and not run.error.startswith(LATE):
                    todo.done(self.item(run.arm), failed=run.error)
            self.rows, self.runs = self.all_rows(), []
        progress.close()
        for arm in args.arms:
            self.end(arm.name)
        self.clocks["after"] = machine.clocks()

    def item(self, arm: Arm) -> str:
        return f"{self.name} {arm.name}"

    def all_rows(self) -> list[dict[str, Any]]:
        """The rows so far, those of the point that is measured now among them."""
        return [
            *self.rows,
            *(
                row_of(run, self.point, self.args.warmup, self.sampler)
                for run in self.runs
                if self.point is not None
            ),
        ]

    def load(self, run: ArmRun, index: int) -> None:
        made = self.attempt(
            run,
            "load",
            case=self.text,
            size=self.args.size,
            fit=self.fit,
            index=index,
            arm=run.arm.name,
            warmup=self.args.warmup,
        )
        if made is not None:
            run.warmups.append(made["warmup_s"])
            run.how = made["how"]
            run.first = run.first or made["first"]
        self.write()

    def turn(self, run: ArmRun, lead: int) -> None:
        began = time.monotonic()
        made = self.attempt(run, "turn", steps=self.args.steps, lead=lead, horizon=self.horizon)
        if made is not None:
            run.turns.append({**made, "took_s": time.monotonic() - began})
            todo.done(self.item(run.arm))
        self.write()

    def profile(self, run: ArmRun) -> None:
        run.profile = self.attempt(run, "profile") or {}
        self.write()

    def together(self, index: int, runs: list[ArmRun], progress: Progress) -> None:
        """All arms stay on the device."""
        for run in runs:
            if not self.too_late(run):
                progress(f"{run.arm.name}: compiling", 0)
                self.load(run, index)
        rounds = self.args.rounds
        for number in itertools.count():
            if number == rounds or number and self.late():
                break
            for run in in_turn(runs, number):
                progress(run.arm.name)
                self.turn(run, lead=0 if self.case.continues and number == 0 else 1)
            if self.args.seconds and number == PLANNED:
                rounds = self.plan(runs)
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
        todo.plan({self.item(run.arm): rounds for run in runs})
        return rounds

    def by_turns(self, index: int, runs: list[ArmRun], progress: Progress) -> None:
        """One arm on the device at a time."""
        for number in range(self.args.rounds):
            for run in runs:
                if self.too_late(run):
                    continue
                progress(run.arm.name)
                self.load(run, index)
                self.turn(run, lead=1)
                if number == 0:
                    self.profile(run)
                self.end(run.arm.name)

    # -- estimating --

    def estimate(self) -> None:
        from .static import DEVICE

        self.device = {"name": DEVICE, "memory": None, "capability": "9.0"}
        statics = self.case.static(self.variant)
        progress = Progress(len(statics) * len(self.args.arms), f"{self.name}, static")
        for index, static in enumerate(statics):
            if index and self.late():
                self.skipped = len(statics) - index
                break
            point = static.point(static.layers)
            for arm in self.args.arms:
                progress(f"{point.label} {arm.name}")
                row: dict[str, Any] = {"arm": arm.name, "kind": arm.kind, "point": point.label, "error": None}
                row |= {"meta": dict(point.meta), "tokens": point.tokens}
                try:
                    made = self.worker("static").ask(
                        "static",
                        case=self.text,
                        index=index,
                        arm=arm.name,
                        instructions=self.args.instructions,
                    )
                    row |= {"static": made["figures"], "note": made["note"]}
                except WorkerFailed as failure:
                    row["error"] = str(failure)
                    self.workers.pop("static").kill()
                self.rows.append(row)
        progress.close()
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
        args, rows = self.args, self.all_rows()
        results.add_ratios(rows)
        return {
            "schema": results.SCHEMA,
            "case": self.case.name,
            "name": self.name,
            "title": self.case.title,
            "variant": self.variant,
            "size": args.size,
            "static": args.static,
            "date": self.date,
            "command": shlex.join(["python", "-m", "benchmarks.train", *args.given]),
            **self.commit,
            "device": self.device,
            "versions": machine.versions(),
            "clocks": self.clocks,
            "settings": {
                "rounds": args.rounds,
                "steps": args.steps,
                "warmup": args.warmup,
                "rebuild": self.rebuild,
                "interpreted": args.interpreted,
                "skipped_points": self.skipped,
                "instructions": args.instructions,
                "sampling": None
                if self.sampler is None
                else {
                    "interval_ms": self.sampler.interval_ms,
                    "samples": len(self.sampler.found),
                    "problem": self.sampler.problem,
                },
                "horizon": self.horizon,
                "seconds": round(time.monotonic() - self.began, 1),
            },
            "goal": self.case.goal(self.variant),
            "rows": rows,
        }


def kill(workers: dict[str, Remote]) -> None:
    for name in list(workers):
        workers.pop(name).kill()


def row_of(run: ArmRun, point: Point, warmup: int, sampler: Sampler | None = None) -> dict[str, Any]:
    """One row of the results."""
    row: dict[str, Any] = {
        "arm": run.arm.name,
        "kind": run.arm.kind,
        "point": point.label,
        "error": run.error,
    }
    row |= {
        "note": point.note,
        "meta": dict(point.meta),
        "tokens": point.tokens * point.accumulate,
        "how": run.how,
    }
    if run.error is None and not run.turns:
        row["error"] = "no round was run"
    if row["error"]:
        return row
    row |= summarise(run.turns)
    if row["memory"] is not None and run.first is not None:
        row["memory"]["first"] = run.first["allocated"]
    steady = warmup * row["step_ms"]["total"] / 1e3
    compiled = [max(0.0, seconds - steady) for seconds in run.warmups] if run.arm.how is not None else []
    cold = None if run.cached or not compiled else compiled.pop(0)
    row["compile_s"] = {"cold": cold, "warm": min(compiled, default=None)}
    row["clocks"] = clocks(run, sampler)
    row["timeline"] = run.profile.get("timeline")
    seen = run.profile.get("kernels")
    decided = run.profile.get("decisions")
    row["kernels"] = seen
    row["busy_ms"] = seen["busy_ms"] if seen else None
    count = seen["classes"]["fp8_gemm"]["count"] if seen else None
    proven = proof(count, decided) if run.profile else NO_PROFILE
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
    text = "not applicable: emulated"
    if decided is not None:
        text += (
            f"; {decided['fp8']} of {decided['fp8'] + decided['high_precision']} "
            "matmuls of the graphs are FP8"
        )
    return text


# -- command line --


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="benchmarks.train", description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add(
        "--case",
        action="append",
        required=True,
        metavar="NAME[:KEY=VALUE,...]",
        help=f"{', '.join(CASES)}; or all",
    )
    add("--arms", default=DEFAULT, help=f"comma-separated: {', '.join(ARMS)}")
    add("--size", choices=("full", "tiny"), help="default: full on cuda, tiny on cpu")
    add("--rounds", type=count(1), help="turns of each arm (default: 6 on cuda, 5 on cpu)")
    add("--steps", type=count(1), help="timed steps a turn (default: 20 on cuda, 10 on cpu)")
    add(
        "--seconds",
        type=count(1),
        metavar="SECONDS",
        help="as many rounds as give each arm so much time for its timed steps",
    )
    add("--warmup", type=count(1), default=3, help="steps after compilation starts, untimed (default: 3)")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--static", action="store_true", help="estimate for a described GPU instead of measuring")
    add(
        "--instructions",
        action="store_true",
        help="with --static: count the instructions of generated kernels, too",
    )
    add("--json", type=Path, metavar="PATH", help="file, or folder (default: benchmarks/results/<device>/)")
    add(
        "--torchao", type=Path, metavar="PATH", help="torchao's wheel, or a folder that has it, packed or not"
    )
    add(
        "--rebuild",
        action="store_true",
        default=None,
        help="make each arm anew every round: one on the device at a time",
    )
    add(
        "--resident",
        action="store_false",
        dest="rebuild",
        help="keep all arms on the device (default for what fits)",
    )
    add(
        "--no-warm-compile",
        action="store_false",
        dest="warm_compile",
        help="do not time compilation on warm caches",
    )
    add(
        "--budget",
        type=count(1),
        metavar="SECONDS",
        help="begin nothing new after this time, end after 1.25 of it",
    )
    add(
        "--timeout",
        type=count(1),
        default=1800,
        metavar="SECONDS",
        help="for one compilation or turn (default: 1800)",
    )
    add("--keep", type=Path, metavar="FOLDER", help="leave logs and compile caches there")
    add(
        "--caches",
        type=Path,
        metavar="FOLDER",
        help="use the compile caches there, and leave them: later runs compile warm",
    )
    # no Inductor: for tests of this program
    add("--interpreted", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.given = argv
    try:
        args.arms = parse_arms(args.arms)
        names = [*CASES] if args.case == ["all"] else args.case
        parsed: list[tuple[Case, dict[str, Any], str]] = [parse_case(name, CASES) for name in names]
        if args.rebuild and any(case.continues for case, _, _ in parsed):
            raise ValueError("--rebuild: the case `loss` goes on training from round to round")
        if args.seconds and (args.rounds or any(case.rebuild for case, _, _ in parsed) or args.rebuild):
            raise ValueError("--seconds: instead of --rounds, where all arms stay on the device")
        if args.torchao and not args.torchao.exists():
            raise ValueError(f"--torchao {args.torchao}: no such file or folder")
    except ValueError as error:
        parser.error(str(error))
    args.case = names
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not args.static and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    args.rounds = PLANNED + 1 if args.seconds else args.rounds or (6 if args.device == "cuda" else 5)
    args.steps = args.steps or (20 if args.device == "cuda" else 10)
    args.size = args.size or ("full" if args.device == "cuda" or args.static else "tiny")
    if len(args.case) > 1 and args.json and args.json.suffix == ".json":
        parser.error("--json: several cases need a folder")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    scratch = args.keep or Path(tempfile.mkdtemp(prefix="benchmarks-"))
    worked, workers = False, {}
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
