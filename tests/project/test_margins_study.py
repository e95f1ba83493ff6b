"""The study of headroom: its results for known casts and for a model with planned growth; it continues a file of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import margins
from tests.support.harness import noise


def test_casts() -> None:
    """E5M2 has spare binades where E4M3 has none left; without a spread of magnitudes, tokens have the tensor's SQNR."""
    found = {(row["format"], row["span"]): row for row in margins.casts()}
    assert set(found) == {(form, span) for form in ("e5m2", "e4m3") for span in margins.SPANS}
    assert found["e5m2", 0]["tensor"] == pytest.approx([25.6] * 13, abs=0.1)
    assert found["e4m3", 0]["tensor"][0] > 31 > found["e4m3", 0]["tensor"][12]
    assert found["e4m3", 24]["token"][0] - found["e4m3", 24]["token"][3] > 10 > 1 > 25.6 - found["e5m2", 24]["token"][11]


def test_a_gradient_that_doubles_beyond_its_margin() -> None:
    """A gradient grows 32 times: it saturates with every margin below 5, but only in the call in which it grows."""
    model = nn.Sequential(nn.Linear(128, 128, bias=False))
    recorder = margins.Recorder(model)
    saturated = {}
    for step, factor in enumerate((1.0, 32.0, 32.0)):
        model(noise(16, 128).requires_grad_()).backward(factor * noise(16, 128, seed=1))
        recorder.step(measured=True)
        for row in recorder.found:
            saturated[step, row["role"], row["format"]] = row["saturated"]
            assert row["own"] == pytest.approx(row["tensor"][5], abs=0.5) or row["format"] == "e4m3"
        recorder.found.clear()
    for form in ("e5m2", "e4m3"):
        assert saturated[1, "gradient", form] == [m < 5 for m in margins.MARGINS]
        assert not any(saturated[step, "gradient", form][m] for step in (0, 2) for m in margins.MARGINS)
    assert not any(any(flags) for (_, role, _), flags in saturated.items() if role != "gradient")


def test_first_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 128), nn.GELU(), nn.Linear(128, 100))
    row = margins.first_steps(model, {}, 16)
    assert len(row["lowest"]) == margins.TIMM_STEPS and row["compared"] > 8 and row["below"] == 0


def test_results_are_continued_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "found.jsonl", tmp_path / "page.md"
    page.write_text("<!-- table: margins -->\n<!-- end -->\n")
    timm = {"part": "timm", "model": "beit", "arm": "11", "lowest": [0.99, 0.96], "below": 2, "compared": 300}
    path.write_text("".join(json.dumps(row) + "\n" for row in (timm, {"part": "casts", "format": "e5m2", "span": 0})))
    for _ in range(2):
        margins.main(["--part", "casts", "--out", str(path), "--update", str(page)])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 1 + 2 * len(margins.SPANS) and all("commit" in row for row in rows if row["part"] == "casts")
    assert "0.960 (2 of 300)" in page.read_text() and "| e4m3, 24 binades" in page.read_text()
    assert "median token" in capsys.readouterr().out
