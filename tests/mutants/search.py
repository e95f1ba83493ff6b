"""Which tier finds a mutant, and by which test. Likely tests come first, so that most mutants cost one test.

1. the test that found it last time, if a quick tier has it
2. the tests that its entry names, of the quick tiers
3. the test that found it last time, if the slow tier has it
4. the files of the same room, those with similar names first, of the quick tiers
5. the tests that its entry names, of the slow tier
6. the whole of `make test`
7. if asked for, the whole of `make slow`

A test that was renamed is looked for as one with other parameters; then the search goes on with the next step. A test that has
not found this mutant before must pass without it: else it proves nothing, and is left out from then on.
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
PROCESSES = ("all_gather", "gathered_scales", "compression", "wire", "checkpoint", "amax_groups", "collectives", "all_to_alls")


class Search:
    """`to`: how far to look. `tier`: the slowest tier whose tests count, "check", "test" or "slow". `prove`: a new
    killer has to pass without the fault."""

    def __init__(self, tree: Tree, to: str = "tier", tier: str = "slow", prove: bool = True):
        self.tree, self.to, self.tier, self.prove = tree, to, tier, prove
        self.broken: list[str] = []  # tests that fail without any fault
        self.proved: set[str] = set()  # tests that pass without one
        self.check = files_of_check(tree.folder)
        self.tiers = {test: name for name, marks in MARKS.items() for test in tree.collected(marks)}

    def __call__(self, mutant: Mutant, known: Row | None = None) -> Row:
        killer = known.test if known is not None else ""
        for arguments in self._steps(mutant, known):
            while True:
                with self.tree.planted(mutant):
                    run = self.tree.run([*arguments, *(part for test in self.broken for part in ("--deselect", test))])
                found = self._found(run, arguments)
                if not found:
                    break
                test = found.removeprefix("tests/")
                if not self.prove or test == killer or self._passes(found):
                    return Row(mutant.id, self._tier(found, run), test, run.seconds)
                if found not in run.failed:
                    break  # a whole file that cannot be imported, with or without the fault
        return Row(mutant.id, "none")

    def _steps(self, mutant: Mutant, known: Row | None) -> Iterator[list[str]]:
        """Arguments of pytest, one run after the other."""
        steps = STEPS[: STEPS.index(self.to) + 1]
        slow, quick = self.tier == "slow", [*FAST]
        if self.tier == "check":
            quick = ["-m", f"{MARKS['test']} and not compiled", *self.check]
        last = list(self._again(known.test)) if known is not None and known.test else []
        now = self.tiers.get(last[0][0], known.tier) if last else ""  # it may have gone to another tier
        if now in ("check", "test"):
            yield from last
        named = [self._named(test) for test in mutant.tests if (self.tree.folder / "tests" / test.split(" -k ")[0]).exists()]
        if "named" in steps and self.tier != "check":
            yield from ([*quick, *test] for test in named)
        if now == "slow" and slow:
            yield from last
        room = self._room(mutant)
        if "room" in steps and self.tier != "check" and room:
            yield [*quick, *room]
        if "named" in steps and slow:
            yield from ([*SLOW, *test] for test in named)
        if "tier" in steps:
            yield quick if self.tier == "check" else [*quick, "tests"]
        if "all" in steps and slow:
            yield [*SLOW, "tests"]

    def _again(self, test: str) -> Iterator[list[str]]:
        """The test, and if it has other parameters now, all of its name."""
        yield [f"tests/{test}"]
        if "[" in test:
            yield [f"tests/{test.partition('[')[0]}"]

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
            alike = len(words & {part.removesuffix("s") for part in file.stem.split("_")} | words & set(file.stem.split("_")))
            if alike or file.parent.name in rooms:
                files[file.relative_to(self.tree.folder).as_posix()] = (-alike, file.parent.name not in rooms)
        return sorted(files, key=lambda name: files[name])

    def _found(self, run: Run, arguments: list[str]) -> str:
        """The test that the fault fails, "" if none does."""
        if run.failed:
            return run.failed
        if run.code == NOT_FOUND and "while loading conftest" in run.output:
            return next(part for part in arguments if part.startswith("tests"))
        return "" if run.code != TIMEOUT else next(part for part in arguments if part.startswith("tests"))

    def _passes(self, test: str) -> bool:
        """Does the test pass without any fault?"""
        if test not in self.proved:
            if test in self.broken or self.tree.run([test]).code:
                self.broken.append(test)
                return False
            self.proved.add(test)
        return True

    def _tier(self, test: str, run: Run) -> str:
        tier = self.tiers.get(test, "test")  # a file that cannot be imported is in each
        if tier != "test":
            return tier
        file = test.partition("::")[0]
        inside = any(file == part or file.startswith(part.rstrip("/") + "/") for part in self.check)
        return "check" if inside and "compiled" not in run.marks else "test"


def files_of_check(root: Path) -> list[str]:
    """The files and folders that `make check` tests, from the Makefile's FAST."""
    text = (root / "Makefile").read_text().replace("\\\n", " ")
    found = re.search(r"^FAST *:?= *(.*)$", text, re.M)
    return [f"tests/{name}" for name in found[1].split()] if found else []
