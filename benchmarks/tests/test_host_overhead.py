"""The benchmark of the host's time: what its rows say."""

from __future__ import annotations

from benchmarks import host_overhead


def test_a_row_is_the_median_of_differences_within_turns() -> None:
    """A turn in which everything takes ten times as long changes no median. Code and host add up."""
    times = (100.0, 200.0, 40.0, 50.0), (130.0, 260.0, 50.0, 75.0)
    turns = [[[factor * x for x in arm] for arm in times] for factor in (1, 1, 10)]
    _, ours = host_overhead.rows_of("2", ["delayed"], turns)
    assert [ours["forward"][key]["median"] for key in ("us", "code", "host")] == [30, 10, 20]
    assert [ours["backward"][key]["median"] for key in ("us", "code", "host")] == [60, 25, 35]
