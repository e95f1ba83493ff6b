"""The benchmark of the host's time: what its rows say, and a short run of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import host_overhead, lines


def test_a_row_is_the_median_of_differences_within_turns() -> None:
    """A turn in which everything takes ten times as long changes no median. Code and host add up."""
    turns = [
        [[f * x for x in (100.0, 200.0, 40.0, 50.0)], [f * x for x in (130.0, 260.0, 50.0, 75.0)]]
        for f in (1, 1, 10)
    ]
    inductor, ours = host_overhead.rows_of("2", ["delayed"], turns)
    assert inductor["forward"]["us"]["median"] == 100 and inductor["backward"]["host"]["median"] == 150
    assert [ours["forward"][key]["median"] for key in ("us", "code", "host")] == [30, 10, 20]
    assert [ours["backward"][key]["median"] for key in ("us", "code", "host")] == [60, 25, 35]
    assert ours["forward"]["us"]["high"] > 100


@pytest.mark.weekly
@pytest.mark.timeout(300)
def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "host.jsonl"
    host_overhead.main(["--cases", "1", "--recipes", "delayed", "--turns", "2", "--json", str(path)])
    (record,) = lines.read(path)
    inductor, ours = record["rows"]
    assert inductor["forward"]["us"]["median"] > inductor["forward"]["code"]["median"] > 0
    assert ours["forward"]["us"]["median"] > 0 and "delayed" in capsys.readouterr().out
