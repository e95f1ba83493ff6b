"""Several processes whose graphs Inductor compiles: one training beside another with the same bits."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.ranks import Way, train
from tests.support.processes import on_ranks

pytestmark = pytest.mark.weekly

PAIRS = {
    "ddp and a replica": (Way("ddp"), Way("replica", compiled="around")),
    "gathered, tensorwise": tuple(
        Way(options={"recipe": "tensorwise"}, gather=gather) for gather in (True, False)
    ),
    "gathered, blockwise": tuple(
        Way(options={"recipe": "blockwise"}, gather=gather) for gather in (True, False)
    ),
    "sequence parallel": tuple(
        Way("sequence", {"recipe": "delayed"}, skip=skip) for skip in ("", "all_gathers")
    ),
}


def _differs(rank: int, name: str) -> list[str]:
    model = "gated block" if name == "sequence parallel" else "square"
    ours, theirs = (train(model, way, "fbs fbs").seen for way in PAIRS[name])
    return [name for name, x in theirs.items() if not torch.equal(x, ours[name])]


@pytest.mark.parametrize("name", PAIRS)
def test_the_same_bits(name: str) -> None:
    assert on_ranks(2, _differs, name, inductor=True) == [[], []]
