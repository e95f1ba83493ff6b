"""Where a run of the tests spends its time: the slowest files at its end, and an error where it takes far too
long.

`--budget SECONDS` is the time that a run may take. In CI (the variable `CI` is set), a run that takes half as
long again fails. Machines differ by a factor of three, so a slow one is given more: how long a loop of plain
Python takes says how slow it is.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from typing import Any

import pytest

SHOWN = 12
ALLOWED = 1.5  # times the budget, in CI
LOOP = 0.08  # seconds that `slowness` took on the machine of the budgets


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--budget",
        type=float,
        default=None,
        help="seconds that this run may take; in CI, half more is an error",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that has the terminal
        config.pluginmanager.register(Budget(config.getoption("--budget")), "budget")


def slowness() -> float:
    """How many times as long as on the machine of the budgets plain Python takes here; 1 if it is quicker."""
    found = []
    for _ in range(3):
        start, total = time.process_time(), 0
        for i in range(1_000_000):
            total += i
        found.append(time.process_time() - start)
    return max(1.0, sorted(found)[1] / LOOP)


class Budget:
    def __init__(self, budget: float | None) -> None:
        self.budget, self.start, self.took, self.slowness = budget, time.monotonic(), 0.0, 1.0
        self.files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self.files[report.nodeid.partition("::")[0]]
        found[0] += report.duration
        found[1] += report.when == "call"

    @property
    def late(self) -> bool:
        return (
            self.budget is not None
            and bool(os.environ.get("CI"))
            and self.took > ALLOWED * self.slowness * self.budget
        )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.took = time.monotonic() - self.start
        if self.budget is not None:
            self.slowness = slowness()
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
