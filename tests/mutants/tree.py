"""A copy of the tree in which one fault at a time is planted, and runs of pytest in it.

Starting costs more than most tests: torch, Inductor and transformers take 8 seconds to import. So they are
imported once, and each run is a process that is forked from there. Nothing of fp8compile and of its tests is
imported before.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import Mutant

PREPARED = ("torch", "torch._inductor.compile_fx", "transformers", "hypothesis", "pytest")
LEFT_OUT = (".git", ".venv*", "out", "build", ".hypothesis", ".*_cache", "*.egg-info")
NOT_FOUND = 4  # exit code of pytest: no such test
TIMEOUT = -1


@dataclass(frozen=True)
class Run:
    """`code`: of pytest, or TIMEOUT. `failed`: the first test that failed, or that hung."""

    code: int
    failed: str
    seconds: float
    output: str


class Watcher:
    """A plugin of pytest that writes what happens into a file, line by line: a test that hangs tells nothing
    at its end."""

    def __init__(self, path: Path):
        self.file = path.open("w")

    def tell(self, what: str, test: str) -> None:
        self.file.write(json.dumps([what, test]) + "\n")
        self.file.flush()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.tell("failed", report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tell("began", nodeid)

    pytest_runtest_logreport = pytest_collectreport


class Tree:
    """A copy of the tree at `root`. `limit`: the seconds that a test may take. `show`: print what pytest
    prints."""

    def __init__(self, root: Path, limit: float, show: bool = False):
        self.limit, self.show = limit, show
        self.work = Path(tempfile.mkdtemp(prefix="mutants-"))
        self.folder = self.work / "tree"
        shutil.copytree(root, self.folder, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        for name in PREPARED:
            importlib.import_module(name)
        gc.freeze()

    def close(self) -> None:
        gc.unfreeze()
        shutil.rmtree(self.work, ignore_errors=True)

    @contextlib.contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Inside, the copy has this fault."""
        path = self.folder / "fp8compile" / mutant.file
        before, stat = path.read_text(), path.stat()
        path.write_text(mutant.planted(before))
        _forget(path)
        try:
            yield
        finally:
            path.write_text(before)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            _forget(path)

    def collected(self, marks: str, *files: str) -> list[str]:
        """The node ids of the tests with these marks, of all files or of these."""
        output = self.run(["-m", marks, "--collect-only", *(files or ["tests"])]).output
        return [line for line in output.splitlines() if line.startswith("tests/") and "::" in line]

    def run(self, arguments: Sequence[str]) -> Run:
        """`pytest -x` with these arguments, from the folder of the copy."""
        told, output = self.work / "told", self.work / "output"
        told.write_text("")
        sys.stdout.flush()
        child = os.fork()
        if not child:
            _become(self.folder, arguments, told, output)
        done, killed = 0, False
        while not done:
            done, status, usage = os.wait4(child, os.WNOHANG)
            if not done and time.time() - told.stat().st_mtime > self.limit:  # since a test began
                killed = True
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):  # what a test has left behind
            os.killpg(child, signal.SIGKILL)
        text = output.read_text(errors="replace")
        if self.show:
            print(" ".join(arguments), text, sep="\n")
        lines = [json.loads(line) for line in told.read_text().splitlines()]
        failed = next((line for line in lines if line[0] == "failed"), None)
        code = os.waitstatus_to_exitcode(status)
        if killed or code < 0:  # it hung, or the process crashed
            code, failed = TIMEOUT, failed or (lines[-1] if lines else None)
        return Run(code, failed[1] if failed else "", usage.ru_utime + usage.ru_stime, text)


def _forget(path: Path) -> None:
    """Remove the compiled forms of a file. (A file of the same second and size counts as unchanged.)"""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _become(folder: Path, arguments: Sequence[str], told: Path, output: Path) -> None:
    """Run pytest in this process, which was forked for it, and end the process."""
    code = 70
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        import pytest

        here = Path(__file__).parents[2]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        sys.path[:] = [str(folder), *(path for path in sys.path if path and Path(path).resolve() != here)]
        os.environ["PYTHONPATH"] = str(folder)
        os.chdir(folder)
        options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=short", "--rootdir", str(folder)]
        code = int(pytest.main([*options, *arguments], plugins=[Watcher(told)]))
    finally:
        sys.stdout.flush()
        os._exit(code)
