"""Measure cases: `python -m benchmarks.train --case gpt2-124m --arms bf16,fp8-delayed`.

Every arm has its own process, so that compile caches, memory and crashes stay apart. All arms share one
device and take turns, round by round, so that drifts of clocks and temperature affect all arms equally.
Waiting arms keep their weights, gradients and optimizer state on the device (the `idle` memory in the
results). If that needs too much memory, `--rebuild` rebuilds each arm for its turn, and no arm waits on the
device. The result so far is written after each compilation and turn. `--static` estimates the same cases
without a device.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fp8compile.dryrun.measure import in_turn, summarise

from . import machine, results, tables
from .arms import ARMS, DEFAULT, Arm, parse_arms, torchao_folder
from .cases import CASES
from .cases.base import Case, Fit, Point, parse_case
from .options import Parser, count, destination
from .pool import Remote, WorkerFailed
from .show import Progress


@dataclass
class ArmRun:
    """The measurements of one arm at one point."""

    arm: Arm
    turns: list[dict[str, Any]] = field(default_factory=list)
    warmups: list[float] = field(default_factory=list)  # seconds of the warm-up in each load, in order
    how: str = ""
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
    ):
        self.args, self.text, self.torchao, self.scratch, self.workers = args, text, torchao, scratch, workers
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
        self.began, self.clocks, self.date, self.commit = (
            time.monotonic(),
            machine.clocks(),
            machine.now(),
            machine.commit(),
        )

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
            self.workers[name] = Remote(name, folder / f"cache-{name}", log, self.args.timeout, **start)
        return self.workers[name]

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
            run.error = run.error or "out of time: not begun"
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
            self.device = self.worker("probe").ask("probe")
            self.end("probe")
        else:
            self.device = machine.describe_device(args.device)
        self.fit = [self.device["memory"], 1 if self.rebuild else len(args.arms)]
        points = self.case.points(args.size, self.variant, Fit(*self.fit))
        progress = Progress(len(points) * args.rounds * len(args.arms), self.name)
        for index, point in enumerate(points):
            if index and self.late():
                self.skipped = len(points) - index
                break
            self.point, self.runs = point, [ArmRun(arm) for arm in args.arms]
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
            self.rows, self.runs = self.all_rows(), []
        progress.close()
        for arm in args.arms:
            self.end(arm.name)

    def all_rows(self) -> list[dict[str, Any]]:
        """The rows so far, those of the point that is measured now among them."""
        return [
            *self.rows,
            *(row_of(run, self.point, self.args.warmup) for run in self.runs if self.point is not None),
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
        made = self.attempt(run, "turn", steps=self.args.steps, lead=lead)
        if made is not None:
            run.turns.append(made)
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
        for number in range(self.args.rounds):
            if number and self.late():
                break
            for run in in_turn(runs, number):
                progress(run.arm.name)
                self.turn(run, lead=0 if self.case.continues and number == 0 else 1)
        for run in runs:
            self.profile(run)
            self.attempt(run, "unload")

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
            "clocks": {"before": self.clocks, "after": machine.clocks()},
            "settings": {
                "rounds": args.rounds,
                "steps": args.steps,
                "warmup": args.warmup,
                "rebuild": self.rebuild,
                "interpreted": args.interpreted,
                "skipped_points": self.skipped,
                "instructions": args.instructions,
                "seconds": round(time.monotonic() - self.began, 1),
            },
            "goal": self.case.goal(self.variant),
            "rows": rows,
        }


def kill(workers: dict[str, Remote]) -> None:
    for name in list(workers):
        workers.pop(name).kill()


def row_of(run: ArmRun, point: Point, warmup: int) -> dict[str, Any]:
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
    row["compile_s"] = {"cold": compiled[0] if compiled else None, "warm": min(compiled[1:], default=None)}
    seen = run.profile.get("kernels")
    decided = run.profile.get("decisions")
    row["kernels"] = seen
    row["busy_ms"] = seen["busy_ms"] if seen else None
    count = seen["classes"]["fp8_gemm"]["count"] if seen else None
    row["fp8"] = {"gemm_kernels": count, "proof": proof(count, decided), "decisions": decided}
    return row


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
    add("--rounds", type=count(1), default=5, help="turns of each arm (default: 5)")
    add("--steps", type=count(1), default=10, help="timed steps a turn (default: 10)")
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
        if args.torchao and not args.torchao.exists():
            raise ValueError(f"--torchao {args.torchao}: no such file or folder")
    except ValueError as error:
        parser.error(str(error))
    args.case = names
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not args.static and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    args.size = args.size or ("full" if args.device == "cuda" or args.static else "tiny")
    if len(args.case) > 1 and args.json and args.json.suffix == ".json":
        parser.error("--json: several cases need a folder")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    scratch = args.keep or Path(tempfile.mkdtemp(prefix="benchmarks-"))
    worked, workers = False, {}
    try:
        try:
            torchao = str(torchao_folder(args.torchao.resolve(), scratch)) if args.torchao else None
        except ValueError as error:
            sys.exit(f"benchmarks.train: error: {error}")
        for name in args.case:
            bench = Bench(args, name, torchao, scratch.resolve(), workers)
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
        if not args.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    return 0 if worked else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
