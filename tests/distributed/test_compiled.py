"""Several processes whose graphs Inductor compiles: a case each of data, sharded and tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.ranks import Way, gathered, train
from tests.support.harness import scaling_tensors, sqnr
from tests.support.processes import on_ranks

pytestmark = pytest.mark.slow


def _trained(rank: int) -> dict[str, Any]:
    """DDP beside a replica; tensor and sequence parallel beside one device and high precision."""
    ways = {
        "ddp": Way("ddp"),
        "replica": Way("replica", compiled="around"),
        "high": Way("one", compiled="not"),
        "one": Way("one", {"recipe": "delayed"}),
        "sequence": Way("sequence", {"recipe": "delayed"}),
    }
    runs = {name: train("mlps" if i < 2 else "gated block", way, "fb") for i, (name, way) in enumerate(ways.items())}
    ours, theirs = runs["ddp"].seen, runs["replica"].seen
    found: dict[str, Any] = {"differs": [name for name, x in theirs.items() if not torch.equal(x, ours[name])]}
    found["ratios"] = {}
    for name in ("one", "sequence"):
        gradients = {key: x for key, x in runs["high"].seen.items() if key.split()[1:] in WEIGHTS}
        found["ratios"][name] = [sqnr(x, runs[name].seen[key]) for key, x in gradients.items()]
        found[name] = sorted(scaling_tensors(runs[name].model))
    return found


WEIGHTS = [["gradient", f"mlp.{name}.weight"] for name in ("gate", "up", "down")]


@pytest.mark.weekly
def test_ddp_is_its_replicas_and_tensor_parallel_as_exact_as_one_device() -> None:
    for found in on_ranks(2, _trained, inductor=True):
        assert found["differs"] == []
        one, ours = found["ratios"]["one"], found["ratios"]["sequence"]
        assert len(ours) == 3 and min(ours) > 18.0 and all(x >= y - 2.0 for x, y in zip(ours, one, strict=True)), (ours, one)
        assert found["one"] == found["sequence"] and len(found["one"]) == 8


def _gathering(rank: int, recipe: str) -> dict[str, Any]:
    ways = [Way(options={"recipe": recipe}, gather=gather) for gather in (False, True)]
    plain, run = (train("square", way, "fbs fbs fbs") for way in ways)
    fp8 = [name for name, (dtype, _) in gathered(run.model).items() if dtype == "e4m3"]
    return {"same": all(torch.equal(x, run.seen[name]) for name, x in plain.seen.items()), "gathered": fp8}


@pytest.mark.weekly
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_the_fp8_all_gather_changes_nothing(recipe: str) -> None:
    """To the bit."""
    for found in on_ranks(2, _gathering, recipe, inductor=True):
        assert found["same"] and len(found["gathered"]) == 4
