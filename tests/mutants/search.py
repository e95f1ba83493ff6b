"""Which tier finds a mutant, and by which test. Likely tests come first, so that most mutants cost one test.

killer    the test that found it last time
named     the tests that its entry names
room      the files of the same room, those with similar names first
tier      the whole of `make test`
all       the whole of `make slow`

In the first three, tests of the quick tiers run before those of the slow one. A test that was renamed is
looked for as one with other parameters. A test that has not found this mutant before must pass without it:
else it proves nothing, and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.tiers import MARKS

from . import Mutant
from .table import Row
from .tree import NOT_FOUND, TIMEOUT, Run, Tree

FAST, SLOW = ("-m", MARKS["test"]), ("-m", MARKS["slow"])
STEPS = ("killer", "named", "room", "tier", "all")
GATHERS = ("all_gather", "gathered_scales", "compression", "wire", "checkpoint")
PROCESSES = (*GATHERS, "amax_groups", "collectives", "all_to_alls")


class Search:
    """`to`: how far to look, one of STEPS."""

    def __init__(self, tree: Tree, to: str):
        self.tree, self.steps = tree, STEPS[: STEPS.index(to) + 1]
        self.broken: list[str] = []  # tests that fail without any fault
        self.proved: set[str] = set()  # tests that pass without one
        self.tiers = {test: name for name, marks in MARKS.items() for test in tree.collected(marks)}
        makefile = (tree.folder / "Makefile").read_text().replace("\\\n", " ")
        files = [f"tests/{name}" for name in re.findall(r"^FAST *:= *(.*)$", makefile, re.M)[0].split()]
        self.tiers |= dict.fromkeys(tree.collected(f"{MARKS['test']} and not compiled", *files), "check")

    def __call__(self, mutant: Mutant, killer: str) -> Row:
        for arguments in self._runs(mutant, killer):
            while True:
                without = [f"--deselect={test}" for test in self.broken]
                with self.tree.planted(mutant):
                    run = self.tree.run([*arguments, *without])
                found = self._found(run, arguments)
                if not found:
                    break
                test = found.removeprefix("tests/")
                if test == killer or self._passes(found):
                    return Row(mutant.id, self.tiers.get(found, "test"), test, run.seconds)
                if found not in run.failed:
                    break  # a whole file that cannot be imported, with or without the fault
        return Row(mutant.id, "none")

    def _runs(self, mutant: Mutant, killer: str) -> Iterator[list[str]]:
        """Arguments of pytest, one run after the other."""
        again = [[f"tests/{name}"] for name in dict.fromkeys((killer, killer.partition("[")[0])) if name]
        named = [self._named(test) for test in mutant.tests] if "named" in self.steps else []
        quick = self.tiers.get(f"tests/{killer}", "test") in ("check", "test")
        if quick:
            yield from again
        yield from ([*FAST, *test] for test in named)
        if not quick:
            yield from again
        if "room" in self.steps and (room := self._room(mutant)):
            yield [*FAST, *room]
        yield from ([*SLOW, *test] for test in named)
        if "tier" in self.steps:
            yield [*FAST, "tests"]
        if "all" in self.steps:
            yield [*SLOW, "tests"]

    @staticmethod
    def _named(test: str) -> list[str]:
        path, _, word = test.partition(" -k ")
        return [f"tests/{path}", *(["-k", word] if word else [])]

    def _room(self, mutant: Mutant) -> list[str]:
        """Files of tests about the same part of the package, the most likely ones first."""
        path = Path(mutant.file)
        room = path.parts[-2] if len(path.parts) > 1 else "backend"  # of a feature: its own folder
        rooms = [room, "distributed"] if any(word in path.stem for word in PROCESSES) else [room]
        words = set(path.stem.split("_"))
        files = {}
        for file in sorted((self.tree.folder / "tests").rglob("test_*.py")):
            parts = file.stem.split("_")
            alike = len(words & {*parts, *(part.removesuffix("s") for part in parts)})
            if alike or file.parent.name in rooms:
                files[file.relative_to(self.tree.folder).as_posix()] = (-alike, file.parent.name not in rooms)
        return sorted(files, key=lambda name: files[name])

    @staticmethod
    def _found(run: Run, arguments: list[str]) -> str:
        """The test that the fault fails, "" if none does."""
        unknown = run.code == TIMEOUT or run.code == NOT_FOUND and "while loading conftest" in run.output
        return run.failed or (next(part for part in arguments if part.startswith("tests")) if unknown else "")

    def _passes(self, test: str) -> bool:
        """Does the test pass without any fault?"""
        if test not in self.proved and test not in self.broken:
            (self.broken.append if self.tree.run([test]).code else self.proved.add)(test)
        return test in self.proved
