"""The claims of docs/recipes.md about precision, at a fixed seed; `python -m benchmarks.sqnr` has the whole table.

Floors are for normal data: 28 dB for an output, 28 dB for E4M3 gradients and 24 dB for E5M2 gradients; lower after the three
linears of a SwiGLU block. The gain of finer scales is asserted as a distance to tensorwise scaling.
"""

from __future__ import annotations

import functools

import pytest
import torch

from benchmarks import sqnr
from benchmarks.sqnr import Point

HYBRID = ("delayed", "tensorwise")
FINER = ("rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "mxfp8, weight_tiles")
every_arm = pytest.mark.parametrize("arm", sqnr.ARMS)


@functools.cache
def measured(model: str, data: str, arm: str) -> dict[str, float]:
    return sqnr.measure(Point(model, data, arm))


@every_arm
def test_linear(arm: str) -> None:
    db = measured("linear", "normal", arm)
    assert 28.0 <= db["y"] < 32.0
    for role in ("dx", "weight"):
        if arm == "rowwise_with_gw_hp" and role == "weight":
            assert db[role] > sqnr.EXACT
        else:
            assert (24.0 if arm in HYBRID else 28.0) <= db[role] < 32.0


@every_arm
def test_swiglu(arm: str) -> None:
    db = measured("swiglu", "normal", arm)
    gradients = {role: value for role, value in db.items() if role != "y"}
    assert len(gradients) == 4 and min(gradients.values()) >= (20.0 if arm in HYBRID else 22.5)
    assert max(gradients.values()) < 30.0


@pytest.mark.parametrize("arm", FINER)
def test_with_outliers_gradients_gain_by_finer_recipes(arm: str) -> None:
    """1% of elements are 50 times larger, which is within E4M3's range. Most of the gain comes from E4M3 for gradients, which
    finer scales allow."""
    base, db = measured("linear", "outliers", "tensorwise"), measured("linear", "outliers", arm)
    assert db["dx"] > base["dx"] + 3.0 and db["weight"] > base["weight"] + 3.0
    if arm.startswith("rowwise"):  # a row's amax is exact in FP8, and with outliers it is much of the row
        assert db["y"] > base["y"] + 1.0
    else:
        assert db["y"] > base["y"] - 0.5


@pytest.mark.parametrize("arm", FINER)
def test_tokens_that_have_grown_do_not_take_the_others_with_them(arm: str) -> None:
    """1% of tokens are 10,000 times larger: with one scale for all, the product in a SwiGLU block loses the other tokens."""
    base, db = measured("swiglu", "outlier tokens", "tensorwise"), measured("swiglu", "outlier tokens", arm)
    assert base["y"] < 3.0 and db["y"] > 23.0
    assert db["dx"] > base["dx"] + 3.0
    assert measured("linear", "outlier tokens", arm)["y"] > measured("linear", "outlier tokens", "tensorwise")["y"] + 2.0


def test_data() -> None:
    x, usual = sqnr.data_of("normal", (512, 256), 0)
    assert usual.all() and abs(x.std().item() - 1.0) < 0.01
    few, _ = sqnr.data_of("outliers", (512, 256), 0)
    assert 0.005 < ((few == 50.0 * x) & (x != 0.0)).double().mean() < 0.015
    grown, usual = sqnr.data_of("outlier tokens", (512, 256), 0)
    assert torch.equal(grown[usual], x[usual]) and (~usual).sum() == 5
    assert torch.equal(grown[~usual], 10_000.0 * x[~usual])


def test_table() -> None:
    points = [Point("linear", data, arm) for data in ("normal", "outlier tokens") for arm in ("delayed", "rowwise")]
    lines = {point: {"db": {"y": [28.0, 29.0], "dx": [float(i)]}} for i, point in enumerate(points)}
    lines[points[1]]["db"]["weight"] = [140.0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in sqnr.tabled(lines).splitlines()]
    assert rows[0] == ["normal", "linear y", "linear dx", "linear dw"]
    assert rows[2:4] == [["delayed", "28.5", "0.0", ""], ["rowwise", "28.5", "1.0", "exact"]]
    assert rows[5] == ["outlier tokens", "linear y", "linear dx"]
