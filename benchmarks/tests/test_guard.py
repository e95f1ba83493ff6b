"""The planted failures: what is planted is seen where it should be, and runs are continued."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from benchmarks import guard, lines
from benchmarks.interpreted import interpreted


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    """The command says less of what it trains; other tests read the log."""
    logger = logging.getLogger("fp8compile")
    before = logger.level
    yield
    logger.setLevel(before)


def row(case: str, arm: str, seed: int, late: float, **more: object) -> dict:
    row = {"case": case, "arm": arm, "seed": seed, "steps": guard.CASES[case].steps, "late": late}
    return {**row, "measured": {}, "cpu_seconds": 1.0, **more}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [("tokens", "row_error"), ("channel", "column_error")])
def test_what_is_planted_is_measured(name: str, number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the input of both down projections, and nowhere else."""
    monkeypatch.setattr(guard, "EVERY", 3)
    with interpreted():
        made = guard.train(name, "delayed", 0, steps=3)
    json.dumps(made, allow_nan=False)
    assert [step for step, _ in made["evaluations"]] == [3]
    assert made["fp8_matmuls"] == 30 and len(made["measured"]) == 28  # gate and up share their input
    for what in ("row_error", "column_error"):
        at = 1 + guard.NUMBERS.index(what)
        lost = {tensor for tensor, seen in made["measured"].items() if (seen[0][at] or 0) > 0.5}
        both = {f"blocks.{i}.down.weight input" for i in range(guard.LAYERS)}
        assert lost == (both if what == number else set())


def test_arms_are_policies_and_cases_add_to_them() -> None:
    case = guard.CASES["head"]
    assert guard.policy({"guard": {"every": 50}}, case) == {
        "guard": {"every": 50},
        "defaults": {},
        "rules": [{"module": "lm_head", "fp8": "on"}],
    }
    assert guard.policy(guard.ARMS["bf16"], case)["rules"] == [{"fp8": "off"}]
    made = guard.policy({"defaults": {"recipe": "rowwise"}}, guard.CASES["saturate"])
    assert made["defaults"] == {"on_overflow": "saturate", "recipe": "rowwise"}


def test_only_missing_runs_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    """A line that was cut off, or that is of another number of steps, is made again. Then the tables."""
    made = []

    def train(case: str, arm: str, seed: int) -> dict:
        made.append((case, arm, seed))
        return row(case, arm, seed, 2.0 if arm == "bf16" else 2.2 + 0.02 * seed)

    monkeypatch.setattr(guard, "train", train)
    path = tmp_path / "guard.jsonl"
    lines.add(path, row("tokens", "bf16", 0, 2.0))
    lines.add(path, row("tokens", "bf16", 1, 9.0, steps=7))
    with path.open("a") as file:
        file.write('{"case": "tok')
    path.write_text(path.read_text().rpartition("\n")[0] + "\n")
    flags = ["--only", "tokens", "--seeds", "2", "--out", str(path)]
    assert guard.main(flags) == 0
    assert made == [("tokens", "bf16", 1), ("tokens", "delayed", 0), ("tokens", "delayed", 1)]
    shown = capsys.readouterr().out
    assert guard.main([*flags, "--show"]) == 0 and len(made) == 3
    assert capsys.readouterr().out in shown
    line = next(line for line in shown.splitlines() if line.startswith("outlier tokens of 2^18"))
    assert line.split()[-8:] == ["2.0000", "delayed", "2", "+10.50%", "+4.15", "to", "+16.85%", "+11.00%"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--only tokens,jumps", "'jumps' is none of tokens, growing"),
        ("--arms fp8", "'fp8' is none of bf16, delayed"),
        ("--seeds 0", "not a whole number of at least 1"),
    ],
)
def test_errors_are_one_line(flags: str, message: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        guard.main(flags.split())
    captured = capsys.readouterr()
    assert stopped.value.code == 2 and message in captured.err and captured.err.count("\n") == 1
