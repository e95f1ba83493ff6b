"""The soak, `python -m benchmarks.soak`, in a few steps: what each fault leaves behind, and what it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak

SHORT = soak.Study(steps=20, nan=6, loss=9, kill=14, weight=17, save=4)
GATHERED = "delayed, fp8 all-gather"


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    return soak.run(GATHERED, SHORT)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_soak(row: dict[str, Any]) -> None:
    assert row["gathered"] == 8 and row["skipped"] == [6]
    assert row["losses"][6] is None and None not in row["losses"][:6] + row["losses"][7:]
    assert row["losses"][-1] < row["losses"][0] - 0.5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_nan_batch_leaves_no_trace_in_the_state(row: dict[str, Any]) -> None:
    """Ranks 2 and 3 had it: no slot moved. On the others, every slot took in an amax. No state was ever not finite."""
    ranks = row["faults"]["nan"]["ranks"]
    assert [rank["moved"] for rank in ranks] == [ranks[0]["slots"], ranks[1]["slots"], 0, 0] and ranks[0]["slots"] == 20
    assert row["bad"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_overflows_are_on_the_ranks_that_had_them(row: dict[str, Any]) -> None:
    first, second, third, fourth = ({*rank["overflows"]} for rank in row["faults"]["loss"]["ranks"])
    assert {"down.weight (gradient)", "q.weight (gradient)"} <= first & second and not third | fourth
    first, second, third, fourth = ({*rank["overflows"]} for rank in row["faults"]["weight"]["ranks"])
    assert "gate.weight (input)" in second & fourth and not first | third


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_goes_on_to_the_bit(row: dict[str, Any]) -> None:
    """Steps 12 and 13 ran twice. Until the last fault, tensor-parallel neighbours have the same copies."""
    assert (row["replayed"], row["alike"]) == (2, 2)
    drift = dict(row["drift"])
    assert drift.keys() == {3, 7, 11, 15, 19} and not any(drift[step] for step in (3, 7, 11, 15))
    assert 0.0 < drift[19] == row["apart"] < 0.1


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_hang_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="hangs"):
        soak.run("delayed", soak.Study(limit=0.0).clean)


def step(number: int, loss: float, attempt: int = 0, overflows: tuple[str, ...] = (), bad: int = 0) -> dict[str, Any]:
    ranks = [{"bad": bad, "moved": 1, "slots": 1, "overflows": list(overflows)}] * soak.RANKS
    return {"step": number, "loss": loss, "skipped": loss != loss, "ranks": ranks, "attempt": attempt, "apart": None}


def test_summary_table_and_plot(tmp_path: Path) -> None:
    """Overflows are seen a step later; a step that ran twice counts once, with the loss of the second time."""
    steps = [step(0, 3.0), step(1, float("nan")), step(2, 2.0, bad=1), step(3, 2.5), step(4, 2.0, overflows=("a",))]
    steps += [step(3, 2.5, 1), step(4, 1.5, 1, ("a", "b")), step(5, 1.0, 1)]
    study = soak.Study(steps=6, nan=1, loss=None, kill=5, weight=3)
    made = {"arm": "delayed", **vars(study), "apart": 0.5, **soak.summary(steps, study)}
    assert (made["late"], made["skipped"], made["bad"]) == (1.0, [1], 4)
    assert (made["replayed"], made["alike"]) == (2, 1) and made["losses"] == [3.0, None, 2.0, 2.5, 1.5, 1.0]
    assert [rank["overflows"] for rank in made["faults"]["weight"]["ranks"]] == [["a", "b"]] * soak.RANKS
    clean = {**made, **vars(study.clean), "late": 0.8, "faults": {}, "replayed": 0}
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in soak.tabled([clean, made]).splitlines()[2:]]
    assert cells[0][:4] == ["delayed", "clean", "0.8000", ""]
    assert cells[1][:8] == ["delayed", "faults", "1.0000", "+25.00%", "1", "4", "1 of 2", "0+0+0+0, 2+2+2+2"]
    soak.plot([clean, made], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
