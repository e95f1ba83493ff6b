"""The table of mismatches: what is the same on both sides has none, and everything else has."""

from __future__ import annotations

import pytest

from benchmarks import mismatch
from benchmarks.interpreted import interpreted
from benchmarks.models import LLAMA_TINY


@pytest.mark.slow
def test_only_served_weights_have_no_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mismatch, "SHAPE", LLAMA_TINY)
    with interpreted():
        *others, served = mismatch.rows(2).values()
    assert len(others) == 4 and all(one.kl and one.kl > 1e-9 and one.largest > 1e-5 for one in others)
    assert served.kl == served.k3 == served.largest == 0.0
