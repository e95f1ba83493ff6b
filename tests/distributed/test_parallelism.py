"""Tensor parallelism: its gradients are as close to those of high precision as one device's, and with
`amax_group` so are its scales.

All ranks get the same batch, so that what they compute together is what one device computes.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
import torch

from fp8compile.features.delayed.state_page import HISTORY
from tests.distributed.ranks import OnRanks, Way, facts, train
from tests.support.harness import scaling_tensors, sqnr
from tests.support.processes import on_ranks

pytestmark = pytest.mark.slow

WAYS = {
    "delayed, group": (2, Way("tp", {"recipe": "delayed", "amax_group": "tp"})),
    "delayed": (2, Way("tp", {"recipe": "delayed"})),
    "tensorwise, group": (2, Way("tp", {"recipe": "tensorwise", "amax_group": "tp"})),
    "blockwise": (2, Way("tp", {"recipe": "blockwise"})),
    "fsdp x tp": (4, Way("fsdp x tp", {"recipe": "delayed"}, mesh=(2, 2), same=True)),
}
NAMED = ("name", "role", "use", "layout", "recipe", "format")


def gradients(run: OnRanks) -> dict[str, torch.Tensor]:
    return {name: x for name, x in run.seen.items() if name.split()[1] == "gradient"}


def histories(run: OnRanks) -> dict[str, list[float]]:
    state = scaling_tensors(run.model)
    return {name: row[HISTORY:-1].tolist() for name, row in state.items() if "version" not in name}


def _exact(rank: int, name: str) -> dict[str, Any]:
    """In dB to high precision, of each gradient of two steps: on one device, and on these ranks."""
    way = WAYS[name][1]
    options = {key: value for key, value in way.options.items() if key != "amax_group"}
    high = gradients(train("gated", Way("one", compiled="not"), "fbz fbz"))
    found: dict[str, Any] = {"ratios": [], "facts": [], "slots": []}
    for one in (Way("one", options), way):
        run = train("gated", one, "fbz fbz s")
        found["ratios"].append([sqnr(x, gradients(run)[key]) for key, x in high.items()])
        found["facts"].append(facts(run, []))
        found["slots"].append(histories(run))
    return found


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("name", WAYS)
def test_as_exact_as_one_device(name: str) -> None:
    """Reports, statistics and states have the names of one device. A weight's amax is the larger of its
    shards', and each shard's matmul is half of the matmul. With a group, all ranks have the amaxes of one
    device: bitwise those of weights and of the first input; after a first layer in FP8, products may be
    rounded elsewhere."""
    ranks, way = WAYS[name]
    results = on_ranks(ranks, _exact, name)
    for found in results:
        (one, ours), (theirs, mine), (_, got) = found["ratios"], found["facts"], found["slots"]
        assert min(ours) > 18.0 and median(ours) > 20.0
        assert all(x >= y - 2.0 for x, y in zip(ours, one, strict=True))
        assert mine["fp8"] == theirs["fp8"] and mine["state"] == theirs["state"]
        assert [[*map(row.get, NAMED)] for row in mine["stats"]] == [
            [*map(row.get, NAMED)] for row in theirs["stats"]
        ]
        assert bool(got) is (way.options["recipe"] == "delayed")
        assert all(sum(amax > 0 for amax in history) == 2 for history in got.values())
        if way.kind == "tp":
            assert [2 * size for size in mine["sizes"]] == theirs["sizes"]
    expected, grouped = results[0]["slots"][0], "amax_group" in way.options
    for key, history in expected.items():
        every, weight = [found["slots"][1][key] for found in results], ".weight.weight." in key
        if way.kind == "tp" and weight:
            assert max(one[1] for one in every) == history[1] > 0.0, key
        if grouped:
            exact = weight or key.startswith(
                ("blocks.0.mlp.up.weight.input", "blocks.0.mlp.gate.weight.input")
            )
            assert all(one == every[0] for one in every), key
            torch.testing.assert_close(every[0], history, rtol=0.0 if exact else 0.1, atol=0.0, msg=key)
