"""The training study's script: its statistics against tables, a run of each kind of arm, and continuing a file of results."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import train_gpt

from benchmarks import recipes
from tests.support.straight import straight


def test_interval_and_welch_by_hand() -> None:
    mean, half = recipes.mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0 and half == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=1e-3)  # Student's t for 4 degrees of freedom
    # Student's t has a closed form for two degrees of freedom, and Welch's formula gives two where one sample has no variance:
    # the sample [1, 3, 5] has mean 3 and standard error sqrt(4 / 3), so its distance from 0 is t = 3 / sqrt(4 / 3)
    t = 3 / math.sqrt(4 / 3)
    assert recipes.welch([0.0, 0.0, 0.0], [1.0, 3.0, 5.0]) == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert math.isnan(recipes.welch([1.0], [1.0, 2.0])) and math.isnan(recipes.mean_interval([1.0])[1])


def row(arm: str, seed: int, late: float) -> dict[str, Any]:
    settings = {name: getattr(recipes.Study(), name) for name in recipes.FIELDS}
    return {"arm": arm, "seed": seed, **settings, "loss": late, "late": late, "evaluations": [[100, 3.0], [1500, late]]}


def test_summary_table_and_plot(tmp_path: Path) -> None:
    rows = [row("bf16", seed, 2.0 + seed) for seed in range(3)]
    rows += [row("rowwise", seed, (2.0 + seed) * (1.001 + 0.0001 * seed)) for seed in range(4)]  # seed 3 has no partner
    rows += [row("delayed", 0, 2.2)]
    found = {summary.arm: summary for summary in recipes.summarise(rows)}
    assert found["rowwise"].gaps == pytest.approx([0.10, 0.11, 0.12]) and found["delayed"].gaps == pytest.approx([10.0])
    text = recipes.overview(list(found.values()))
    assert "0.2%: met" in text and "0.5%: missed" in text and "+0.085 to +0.135%" in text
    assert [recipes.verdict(-0.1, half, 0.2) for half in (0.1, 0.11, math.nan)] == ["met", "met by the mean", "met by the mean"]
    recipes.plot(rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="bf16"):
        recipes.summarise(rows[3:])


def test_a_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    assert recipes.read(path, recipes.Study()) == []
    other = {**row("bf16", 0, 1.0), "steps": 7}
    path.write_text("".join(json.dumps(x) + "\n" for x in (row("bf16", 0, 2.0), other, row("bf16", 0, 3.0))))
    assert [x["late"] for x in recipes.read(path, recipes.Study())] == [3.0]
    assert [x["late"] for x in recipes.read(path, recipes.Study(steps=7))] == [1.0]
    assert recipes.run_missing(["bf16"], 1, 1, path, recipes.Study()), "nothing is missing, nothing is run"
    assert len(path.read_text().splitlines()) == 3


def test_evaluations_are_at_the_end_and_in_order() -> None:
    steps = recipes.Study().evaluations
    assert steps == sorted(set(steps)) and steps[-5:] == [1300, 1350, 1400, 1450, 1500] and len(steps) > 10
    assert recipes.Study(steps=3).evaluations[-1] == 3


@pytest.fixture
def study() -> Iterator[recipes.Study]:
    precision = torch.get_float32_matmul_precision()
    with straight():
        yield dataclasses.replace(recipes.Study(), steps=4, windows=64)
    torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize(
    ("arm", "matmuls"), [("delayed-fnuz", 24), pytest.param("rowwise_with_gw_hp", 16, marks=pytest.mark.slow)]
)
def test_a_run(arm: str, matmuls: int, study: recipes.Study) -> None:
    made = recipes.train(arm, 0, study, train_gpt.load_text())
    assert made["fp8_matmuls"] == matmuls
    assert made["evaluations"][-1] == (4, made["loss"]) and 4.0 < made["loss"] < 6.0
    assert all(made[name] == getattr(study, name) for name in recipes.FIELDS)
    json.dumps(made)


def test_a_run_that_is_not_in_fp8(study: recipes.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recipes.ARMS, "delayed", {"policy": {"rules": [{"module": "*.down", "fp8": "off"}]}})
    with pytest.raises(RuntimeError, match="matmuls in FP8, expected"):
        recipes.train("delayed", 0, dataclasses.replace(study, steps=1, windows=8), train_gpt.load_text())
