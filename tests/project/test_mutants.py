"""The list of mutants is true: each place is there, once. `python -m tests.mutants run` plants them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import HERE, Mutant, mutants, problems, table


def test_each_place_is_there_once() -> None:
    assert not problems()
    assert len(mutants()) >= 64


def test_what_is_wrong_with_a_list_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "fp8compile"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1\ny = 1\nz = (1,)\n")

    def mutant(name: str, line: str, becomes: str, tests: tuple[str, ...] = ()) -> Mutant:
        return Mutant(name, "area", "fault", "a.py", line, becomes, tests)

    wrong = [
        mutant("A", "= 1\n", ""),
        mutant("B", "x = 1", "x = 1  # 1"),
        mutant("C", "x = 1", "x = ("),
        mutant("D", "w", ""),
    ]
    right = [mutant("E", "x = 1", "x = 2", ("a/test_gone.py -k it",))]
    monkeypatch.setattr("tests.mutants.mutants", lambda: [*wrong, *right])
    assert [text.partition(":")[0] for text in problems(tmp_path)] == ["A", "B", "C", "D", "E"]
    monkeypatch.setattr("tests.mutants.mutants", lambda: right * 2)
    assert any("two mutants" in text for text in problems(tmp_path))


def test_the_table_that_is_committed() -> None:
    """It has mutants of the list; the quick tiers find nine of ten."""
    rows = table.read(HERE / "results.txt")
    tiers = Counter(row.tier for row in rows.values())
    assert rows and rows.keys() <= {mutant.id for mutant in mutants()}
    assert tiers["check"] + tiers["test"] >= 0.9 * len(rows)
