"""Faults that the tests must find: a list of mutants, each one changed place of the package.

    python -m tests.mutants check         is each place there, exactly once? (a fast test does the same)
    python -m tests.mutants run [ID ...]  plant each in a copy of the tree: which tier and which test find it?

The mutants are in `compiler.toml` (what happens to a graph) and `training.toml` (what happens in calls, and
around them):

    id, area       "S1", "state"
    fault          what is wrong then, in words
    file           in fp8compile/
    line, becomes  the text, which is there once, and what is put in its place
    tests          test files, with or without -k, that are likely to find it, in tests/

`results.txt` has a row for each: the quickest known tier that finds it (check, test, slow or none), the test,
and its seconds.
"""

from __future__ import annotations

import ast
import functools
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LISTS = ("compiler.toml", "training.toml")


@dataclass(frozen=True)
class Mutant:
    id: str
    area: str
    fault: str
    file: str
    line: str
    becomes: str
    tests: tuple[str, ...] = ()

    def places(self, root: Path) -> int:
        """How often its line is in the tree."""
        path = root / "fp8compile" / self.file
        return path.read_text().count(self.line) if path.exists() else 0

    def planted(self, text: str) -> str:
        """The text of its file, with the fault."""
        return text.replace(self.line, self.becomes, 1)


def mutants(*ids: str) -> list[Mutant]:
    """All mutants, or those with these ids; ValueError for an id of none."""
    lists = [tomllib.loads((HERE / name).read_text())["mutants"] for name in LISTS]
    found = [Mutant(**{**given, "tests": tuple(given["tests"])}) for each in lists for given in each]
    unknown = sorted(set(ids) - {mutant.id for mutant in found})
    if unknown:
        raise ValueError(f"no mutant {', '.join(unknown)}")
    return [mutant for mutant in found if not ids or mutant.id in ids]


@functools.cache
def _meaning(text: str) -> str:
    return ast.dump(ast.parse(text))


def problems(root: Path = ROOT) -> list[str]:
    """What is wrong with the list itself: a place that is not there once, a fault that is none, a test file
    that is gone."""
    found = []
    every = mutants()
    for twice in sorted({mutant.id for mutant in every if sum(mutant.id == other.id for other in every) > 1}):
        found.append(f"{twice}: two mutants have this id")
    for mutant in every:
        where = f"{mutant.id}: fp8compile/{mutant.file}"
        if (places := mutant.places(root)) != 1:
            found.append(f"{where} has its line {places} times: {mutant.line.strip().splitlines()[0]}")
            continue
        text = (root / "fp8compile" / mutant.file).read_text()
        try:
            same = _meaning(text) == _meaning.__wrapped__(mutant.planted(text))
        except SyntaxError as error:
            found.append(f"{where}: with the fault it cannot be parsed: {error}")
            continue
        if same:
            found.append(f"{where}: the fault changes nothing")
        gone = [test for test in mutant.tests if not (root / "tests" / test.split(" -k ")[0]).exists()]
        found += [f"{mutant.id}: tests/{test} is not there" for test in gone]
    return found
