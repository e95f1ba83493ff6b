"""Where a run of the tests spends its time: the slowest files at its end, and an error where it takes far too
long.

`--budget SECONDS` is the time that a run may take. In CI (the variable `CI` is set), a run that takes twice
as long fails. Machines differ by a factor of three, and one that others share is slower still. How often all
cores at once compile a large file in a second, before the tests and after them, says how slow a machine is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

import pytest

SHOWN = 12
ALLOWED = 2.0  # times the budget, in CI
SLOWEST = 4.0  # a moment that is slower still is not what the run took
RATE = 52.0  # times that a core of the machine of the budgets compiles `SOURCE` in a second
SOURCE = argparse.__file__
PROBE = f"""
import time
source, count = open({SOURCE!r}).read(), 0
begun = time.monotonic()  # time of the process would leave out what others take from this machine
while time.monotonic() < begun + 3:
    compile(source, "probe", "exec")
    count += 1
print(count / (time.monotonic() - begun))
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--budget",
        type=float,
        default=None,
        help="seconds that this run may take; in CI, twice as many are an error",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that has the terminal
        config.pluginmanager.register(Budget(config.getoption("--budget")), "budget")


def slowness() -> float:
    """How many times as long all cores at once take as on the machine of the budgets, from 1 to `SLOWEST`."""
    probes = [
        subprocess.Popen([sys.executable, "-c", PROBE], stdout=subprocess.PIPE, text=True)
        for _ in range(len(os.sched_getaffinity(0)))
    ]
    rates = [float(probe.communicate()[0]) for probe in probes]
    return min(max(1.0, RATE * len(rates) / sum(rates)), SLOWEST)


class Budget:
    def __init__(self, budget: float | None) -> None:
        self.budget, self.took = budget, 0.0
        self.judged = budget is not None and bool(os.environ.get("CI"))
        self.slowness = slowness() if self.judged else 1.0
        self.start = time.monotonic()
        self.files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self.files[report.nodeid.partition("::")[0]]
        found[0] += report.duration
        found[1] += report.when == "call"

    @property
    def late(self) -> bool:
        return self.judged and self.took > ALLOWED * self.slowness * (self.budget or 0.0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.took = time.monotonic() - self.start
        if self.judged:
            self.slowness = (self.slowness + slowness()) / 2
        if self.late and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        total = sum(seconds for seconds, _ in self.files.values())
        if not total:
            return
        write = terminalreporter.write_line
        terminalreporter.section("slowest files")
        for name, (seconds, tests) in sorted(self.files.items(), key=lambda item: -item[1][0])[:SHOWN]:
            write(f"{seconds:7.1f} s  {tests:4} tests  {name}")
        of = f" of a budget of {self.budget:.0f} s" if self.budget is not None else ""
        if self.slowness > 1.05:
            of += f", on a machine that is {self.slowness:.1f} times as slow as that of the budget"
        write(
            f"{total:7.1f} s  in all tests, by the processes that ran them; "
            f"{self.took:.0f} s on the clock{of}"
        )
        if self.late:
            write(f"error: more than {ALLOWED:g} times the budget", red=True)
