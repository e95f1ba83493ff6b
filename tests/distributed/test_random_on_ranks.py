"""Random models and protocols on two ranks; planted errors show that the comparison finds errors.

`FUZZ_CASES=500 make weekly` runs more cases, the same ones each time.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any
from unittest import mock

import pytest

from tests.distributed import fuzz_ranks
from tests.distributed.fuzz_ranks import OnRanks
from tests.support import hooks
from tests.support.processes import on_ranks

MANY = int(os.environ.get("FUZZ_CASES", "40"))
SMALL = (72, 85)  # models of one block: DDP that cuts graphs, and FP8 gathers of noise
SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in SMALL]
SEEDS += [pytest.param(seed, marks=pytest.mark.weekly) for seed in range(MANY) if seed not in SMALL]


@pytest.mark.parametrize("seed", SEEDS)
def test_as_replicas_whose_gradients_are_averaged(seed: int) -> None:
    seen, failed = fuzz_ranks.run(1, seed)
    assert not failed, "\n\n".join(failed)
    assert seen["models"] == 1 and seen["models in FP8"] == 1, seen
    if seed in SMALL:
        assert bool(seen["weights gathered in FP8"]) is OnRanks.of(seed).way.gather


def _planted(rank: int, seed: int) -> dict[str, list[str]]:
    """Plant -> what differs."""
    plant = ""

    def see(call: Any, target: Any, args: tuple, kwargs: dict) -> Any:
        if plant == "a scale" and rank == 1 and "scaled_mm" in str(target):
            args = (*args[:2], args[2] * 1.01, *args[3:])
        return call(target, args, kwargs)

    case, found = OnRanks.of(seed), dict[str, list[str]]()
    assert case.exact
    case.protocols = ["plain"]
    with hooks.through(see), fuzz_ranks.fuzzing(case):
        for plant in ("", "a scale", "not reduced"):
            with mock.patch.dict(fuzz_ranks.PROTOCOLS, plain="g" if plant == "not reduced" else "fb"):
                found[plant] = fuzz_ranks.check(case, Counter[str]())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [72, 71], ids=["ddp", "fsdp"])
def test_a_planted_error_is_seen(seed: int) -> None:
    """A scale is wrong on the second rank alone: so are its outputs, and the gradients of both."""
    one, other = on_ranks(2, _planted, seed, limit=fuzz_ranks.TIME_LIMIT)
    assert not one[""] and not other[""], (one, other)
    assert "y0" in other["a scale"][0] and one["a scale"] and "y0" not in one["a scale"][0], (one, other)
    assert one["not reduced"] and other["not reduced"], (one, other)
