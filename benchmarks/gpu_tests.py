"""Run tests in several processes within a time limit: `python -m benchmarks.gpu_tests --budget 100`.

Without names, the tests that need a GPU (on a CPU: a few that show that this program works). Each of n
processes takes each n-th test; the first case of each test comes first, so that a run that is stopped has
seen something of each. After a test that kills its process, or leaves the device unusable to it, another
process goes on. Shortly before the limit pytest is interrupted, so that it still writes its summary.

    --only NAME ...      of these tests only those with one of these texts in their names, as pytest has them
    --json PATH.jsonl    a line when a test begins, and one when it ends

This module is also the plugin of those processes. It needs no plugin of others, and none that pyproject.toml
asks for.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from . import lines, show
from .pool import ROOT, environment

BOTH = ("tests/codegen/test_scaled_mm.py", "tests/devices/test_catalog.py")
FILES = {"cuda": ["-m", "gpu", "tests/backend/test_gpu.py", *BOTH]}
FILES["cpu"] = ["-k", "emulation_is or calibrate_this", *BOTH]
LINES, PART = "FP8COMPILE_TEST_LINES", "FP8COMPILE_TEST_PART"  # variables: the file of lines; "0/8"
ONLY = "FP8COMPILE_TEST_ONLY"  # a name a line
UNUSABLE = 77  # exit status of a process that the device no longer serves
RESTARTS = 5  # of each process
GRACE = 10.0  # seconds between an interrupt and the end, at most
BEGUN = "begun, and did not end"


# -- in a process of pytest --


def _said(**record: Any) -> None:
    if LINES in os.environ:
        lines.add(Path(os.environ[LINES]), record)


@pytest.hookimpl(trylast=True)  # after marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PART not in os.environ:
        return
    part, parts = map(int, os.environ[PART].split("/"))
    only = os.environ.get(ONLY, "").splitlines()
    unknown = [name for name in only if not any(name in item.nodeid for item in items)]
    if unknown:
        _said(unknown=unknown)
    items[:] = [item for item in items if not only or any(name in item.nodeid for name in only)]
    seen: Counter[str] = Counter()
    order = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        order.append((seen[name], item))
        seen[name] += 1
    every = [item for _, item in sorted(order, key=lambda pair: pair[0])]
    before = outcomes(Path(os.environ[LINES]))
    _said(tests=[item.nodeid for item in every])  # of all parts: some may come to no test
    items[:] = [item for item in every[part::parts] if item.nodeid not in before]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:  # a file that cannot be imported
        _said(test=report.nodeid, outcome="failed", why=str(report.longrepr).strip().rpartition("\n")[2])


def pytest_runtest_logstart(nodeid: str) -> None:
    _said(test=nodeid, outcome=BEGUN)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    skip = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    why = (crash.message if crash else skip).strip()[:2000]
    _said(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), why=why)
    if report.failed and unusable():
        pytest.exit("the device is unusable to this process", UNUSABLE)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """An interrupt now would only lose the summary."""
    if PART in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def unusable() -> bool:
    torch = sys.modules.get("torch")  # an import would take seconds, in which an interrupt loses the failure
    try:
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


# -- the processes --


def outcomes(path: Path) -> dict[str, dict[str, Any]]:
    """The last line of each test."""
    return {line["test"]: line for line in lines.read(path) if "test" in line} if path.exists() else {}


class Part:
    """The process that takes each n-th test, and those that take its place."""

    def __init__(self, args: argparse.Namespace, number: int):
        self.args, self.number, self.starts, self.interrupted = args, number, 0, False
        self.start()

    def start(self) -> None:
        self.starts += 1
        flags = "-q --tb=short -o addopts= -W ignore -p no:cacheprovider --continue-on-collection-errors"
        command = [sys.executable, "-m", "pytest", *flags.split(), "-p", "benchmarks.gpu_tests"]
        part = f"{self.number}/{self.args.processes}"
        # parallel are the processes
        env = environment(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
        env |= {LINES: str(self.args.json), PART: part, ONLY: "\n".join(self.args.only)}
        command += self.args.tests
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL)

    def running(self) -> bool:
        code = self.process.poll()
        died = code is not None and (code < 0 or code == UNUSABLE)
        if died and not self.interrupted and self.starts <= RESTARTS:
            print(f"process {self.number} ended with status {code}: another one goes on", flush=True)
            self.start()
            return True
        return code is None

    def interrupt(self) -> None:
        self.interrupted = True
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)


def run(args: argparse.Namespace) -> None:
    """All tests, until the time is over or SIGTERM comes."""
    end, grace = time.monotonic() + args.budget, min(GRACE, 0.2 * args.budget)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    parts = [Part(args, number) for number in range(args.processes)]
    while any([part.running() for part in parts]):
        if stopped or time.monotonic() > end - grace:
            for part in parts:
                part.interrupt()
            break
        time.sleep(0.2)
    last = time.monotonic() + grace
    for part in parts:
        try:
            part.process.wait(max(0.0, last - time.monotonic()))
        except subprocess.TimeoutExpired:
            part.process.kill()
            part.process.wait()


def summary(found: dict[str, dict[str, Any]], left: Sequence[str], of: int) -> str:
    """Each failure, why tests were skipped, those `left`, and counts. `of`: how many tests there are."""
    counts = Counter(line["outcome"] for line in found.values())
    parts = []
    for name, line in found.items():
        if line["outcome"] not in ("passed", "skipped"):
            parts.append(f"{name}: {(line.get('why') or line['outcome']).splitlines()[0][:200]}")
    said = {line["why"] for line in found.values() if line["outcome"] == "skipped"}
    parts += [f"skipped: {why}" for why in sorted(said)]
    parts += show.not_done(left)
    parts.append(", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + f" of {of} tests")
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_tests", allow_abbrev=False)
    add = parser.add_argument
    add("tests", nargs="*", help="files or names of tests, as for pytest")
    add("--only", nargs="+", default=[], metavar="NAME", help="of these tests, those named")
    add("--device", choices=tuple(FILES), default="cuda", help="whose tests are run without names")
    add("--processes", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    add("--budget", type=float, default=600.0, metavar="SECONDS", help="for everything (default: 600)")
    add("--json", type=Path, required=True, metavar="PATH.jsonl")
    args = parser.parse_args(argv)
    args.tests, args.json = args.tests or FILES[args.device], args.json.resolve()
    run(args)
    found, written = outcomes(args.json), lines.read(args.json) if args.json.exists() else []
    tests = dict.fromkeys(name for line in written for name in line.get("tests", ()))
    unknown = {name for line in written for name in line.get("unknown", ())}
    for name in sorted(unknown):
        print(f"--only: no test is named {name!r}")
    left = [name for name in tests if name not in found]
    if left:
        lines.add(args.json, {"not_done": left})
    print(summary(found, left, len(tests)), flush=True)
    fine = [line for line in found.values() if line["outcome"] in ("passed", "skipped")]
    return 0 if fine and len(fine) == len(found) == len(tests) and not unknown else 1


if __name__ == "__main__":
    sys.exit(main())
