"""Studies that train: the statistics of the training study, a run of an arm, a soak with faults, optimizers,
random models."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import train_gpt

from benchmarks import never_slower, recipes, soak, whole_steps
from fp8compile.dryrun import fake_gpu
from tests.support.straight import straight

needs_description = pytest.mark.skipif(
    fake_gpu.unavailable() is not None, reason=fake_gpu.unavailable() or ""
)


# -- the training study --


@pytest.mark.slow
def test_interval_and_welch_by_hand() -> None:
    mean, half = recipes.mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    # Student's t for 4 degrees of freedom
    assert mean == 3.0 and half == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=1e-3)
    # Student's t has a closed form for two degrees of freedom, and Welch's formula gives two where one sample
    # has no variance: the sample [1, 3, 5] has mean 3 and standard error sqrt(4 / 3), so its distance from 0
    # is t = 3 / sqrt(4 / 3)
    t = 3 / math.sqrt(4 / 3)
    assert recipes.welch([0.0, 0.0, 0.0], [1.0, 3.0, 5.0]) == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert math.isnan(recipes.welch([1.0], [1.0, 2.0])) and math.isnan(recipes.mean_interval([1.0])[1])


def row(arm: str, seed: int, late: float) -> dict[str, Any]:
    settings = {name: getattr(recipes.Study(), name) for name in recipes.FIELDS}
    return {
        "arm": arm,
        "seed": seed,
        **settings,
        "loss": late,
        "late": late,
        "evaluations": [[100, 3.0], [1500, late]],
    }


@pytest.mark.slow
def test_summary_table_and_plot(tmp_path: Path) -> None:
    rows = [row("bf16", seed, 2.0 + seed) for seed in range(3)]
    # seed 3 has no partner
    rows += [row("rowwise", seed, (2.0 + seed) * (1.001 + 0.0001 * seed)) for seed in range(4)]
    rows += [row("delayed", 0, 2.2)]
    found = {summary.arm: summary for summary in recipes.summarise(rows)}
    assert found["rowwise"].gaps == pytest.approx([0.10, 0.11, 0.12]) and found[
        "delayed"
    ].gaps == pytest.approx([10.0])
    text = recipes.overview(list(found.values()))
    assert "0.2%: met" in text and "0.5%: missed" in text and "+0.085 to +0.135%" in text
    assert [recipes.verdict(-0.1, half, 0.2) for half in (0.1, 0.11, math.nan)] == [
        "met",
        "met by the mean",
        "met by the mean",
    ]
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


@pytest.fixture
def study() -> Iterator[recipes.Study]:
    precision = torch.get_float32_matmul_precision()
    with straight():
        yield dataclasses.replace(recipes.Study(), steps=4, windows=64)
    torch.set_float32_matmul_precision(precision)


@pytest.mark.weekly
def test_a_run(study: recipes.Study) -> None:
    """With the weights' gradients in high precision, 16 of 24 matmuls are FP8."""
    made = recipes.train("rowwise_with_gw_hp", 0, study, train_gpt.load_text())
    assert made["fp8_matmuls"] == 16
    assert made["evaluations"][-1] == (4, made["loss"]) and 4.0 < made["loss"] < 6.0
    assert all(made[name] == getattr(study, name) for name in recipes.FIELDS)
    json.dumps(made)


# -- cached weights --


@pytest.mark.weekly
@needs_description
def test_whole_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A layer of Llama-3-8B has 7 weights: one cast each, that reads 2 bytes a parameter and writes 2."""
    path = tmp_path / "a.json"
    assert whole_steps.main(["--layers", "1", "--recipes", "delayed", "--out", str(path)]) == 0
    found = json.loads(path.read_text())["recipes"]["delayed"]
    plain, cached, early = (found[arm] for arm in ("plain", "cached", "cached-by-step"))
    assert early["cast_kernels"] == 7 < cached["cast_kernels"]
    assert early["cast_bytes"] == pytest.approx(4, abs=0.01) and cached["cast_bytes"] == pytest.approx(
        6, abs=0.01
    )
    assert cached["update_bytes"] < early["update_bytes"] < cached["update_bytes"] + 0.04
    assert early["ms"] < cached["ms"] < plain["ms"] / 1.03
    assert "cached-by-step" in capsys.readouterr().out


# -- random models --


@pytest.mark.weekly
@needs_description
@pytest.mark.parametrize("seed", [1, 20])
def test_never_slower(seed: int) -> None:
    """Two of the study's 200 models. FP8 is never slower, by the roofline of Inductor's launches."""
    row = never_slower.compare(never_slower.draw(seed))
    assert not never_slower.slower(row), row


# -- the soak --


def _short(slots: Iterable[str]) -> set[str]:
    """Slots without the layer's name: "q.weight.input.0"."""
    return {".".join(slot.split(".")[-4:]) for slot in slots}


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.timeout(600)
def test_a_short_soak() -> None:
    row = soak.run("delayed, fp8 all-gather", soak.Study(steps=20, nan=6, loss=9, kill=14, weight=17, save=4))
    assert row["gathered"] == 8 and row["skipped"] == [6]
    assert row["losses"][6] is None and None not in row["losses"][:6] + row["losses"][7:]
    assert row["losses"][-1] < row["losses"][0] - 0.5
    # a NaN batch: ranks 2 and 3 had it, and no slot moved there. On the others, every slot took in an amax
    ranks = row["faults"]["nan"]["ranks"]
    assert [rank["moved"] for rank in ranks] == [ranks[0]["slots"], ranks[1]["slots"], 0, 0] and ranks[0][
        "slots"
    ] == 20
    assert row["bad"] == 0  # no state was ever not finite
    # overflows are on the ranks that had them
    first, second, third, fourth = (_short(rank["overflows"]) for rank in row["faults"]["loss"]["ranks"])
    assert {"down.weight.gradient.0", "q.weight.gradient.0"} <= first & second and not third | fourth
    first, second, third, fourth = (_short(rank["overflows"]) for rank in row["faults"]["weight"]["ranks"])
    assert "gate.weight.input.0" in second & fourth and not first | third
    # steps 12 and 13 ran twice, bitwise. Until the last fault, tensor-parallel neighbours are equal
    assert (row["replayed"], row["alike"]) == (2, 2)
    drift = dict(row["drift"])
    assert drift.keys() == {3, 7, 11, 15, 19} and not any(drift[step] for step in (3, 7, 11, 15))
    assert 0.0 < drift[19] == row["apart"] < 0.1


@pytest.mark.weekly
@pytest.mark.timeout(100)
def test_a_soak_that_hangs_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="hangs"):
        soak.run("delayed", soak.Study(limit=0.0).clean)


def step(
    number: int, loss: float, attempt: int = 0, overflows: tuple[str, ...] = (), bad: int = 0
) -> dict[str, Any]:
    ranks = [{"bad": bad, "moved": 1, "slots": 1, "overflows": list(overflows)}] * soak.RANKS
    return {
        "step": number,
        "loss": loss,
        "skipped": loss != loss,
        "ranks": ranks,
        "attempt": attempt,
        "apart": None,
    }


def test_summary_table_and_plot_of_a_soak(tmp_path: Path) -> None:
    """A step that ran twice counts once, with its second loss."""
    steps = [
        step(0, 3.0),
        step(1, float("nan")),
        step(2, 2.0, bad=1),
        step(3, 2.5, overflows=("a",)),
        step(4, 2.0),
    ]
    steps += [step(3, 2.5, 1, ("a", "b")), step(4, 1.5, 1), step(5, 1.0, 1)]
    study = soak.Study(steps=6, nan=1, loss=None, kill=5, weight=3)
    made = {"arm": "delayed", **vars(study), "apart": 0.5, **soak.summary(steps, study)}
    assert (made["late"], made["skipped"], made["bad"]) == (1.0, [1], 4)
    assert (made["replayed"], made["alike"]) == (2, 1) and made["losses"] == [3.0, None, 2.0, 2.5, 1.5, 1.0]
    assert [rank["overflows"] for rank in made["faults"]["weight"]["ranks"]] == [["a", "b"]] * soak.RANKS
    clean = {**made, **vars(study.clean), "late": 0.8, "faults": {}, "replayed": 0}
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in soak.tabled([clean, made]).splitlines()[2:]
    ]
    assert cells[0][:4] == ["delayed", "clean", "0.8000", ""]
    assert cells[1][:8] == ["delayed", "faults", "1.0000", "+25.00%", "1", "4", "1 of 2", "0+0+0+0, 2+2+2+2"]
    soak.plot([clean, made], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
