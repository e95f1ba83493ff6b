"""Five of the 200 models of never_slower.py: FP8 is never slower, by the roofline of Inductor's launches."""

from __future__ import annotations

import pytest

from benchmarks import never_slower
from fp8compile.dryrun import fake_gpu


@pytest.mark.skipif(fake_gpu.unavailable() is not None, reason=fake_gpu.unavailable() or "")
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (10, 15, 20, 37))])
def test_never_slower(seed: int) -> None:
    row = never_slower.compare(never_slower.draw(seed))
    assert not never_slower.slower(row), row
