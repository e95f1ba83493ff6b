"""The table of results: a row for each mutant, as text that a difference of two versions shows well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import Mutant

HEAD = ("id", "area", "fault", "tier", "test", "seconds")
TIERS = ("check", "test", "slow", "weekly", "none")


@dataclass(frozen=True)
class Row:
    """`tier`: the quickest known one that finds the mutant, "none" if no test did. `test`: its node id, in
    tests/. `seconds`: CPU seconds of the run that found it, up to its failure."""

    id: str
    tier: str
    test: str = ""
    seconds: float = 0.0


def read(path: Path) -> dict[str, Row]:
    """The rows of a table by id; {} if there is none."""
    if not path.exists():
        return {}
    rows = {}
    for line in path.read_text().splitlines()[1:]:
        cells, _, seconds = line.rpartition(" | ")  # a test's name may have a bar
        id_, _, _, tier, test = (cell.strip() for cell in cells.split(" | ", 4))
        rows[id_] = Row(id_, tier, test, float(seconds))
    return rows


def write(path: Path, rows: Mapping[str, Row], mutants: Iterable[Mutant]) -> None:
    """The rows in the order of the list. Those of mutants that are not in the list any more are left out."""
    cells = [HEAD]
    for mutant in mutants:
        if mutant.id in rows:
            row = rows[mutant.id]
            cells.append((mutant.id, mutant.area, mutant.fault, row.tier, row.test, f"{row.seconds:.0f}"))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" | ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in cells]
    path.write_text("".join(lines))


def summary(rows: Iterable[Row]) -> str:
    """ "72 mutants: check 12, test 55, slow 4, none 1" """
    tiers = [row.tier for row in rows]
    return f"{len(tiers)} mutants: " + ", ".join(f"{tier} {tiers.count(tier)}" for tier in TIERS)
