"""Tensor and context parallelism: gradients are as close to those of high precision as one device's, and with
`amax_group` or `reduce_amax` so are scales.

All ranks get the same batch, so that what they compute together is what one device computes.
"""

from __future__ import annotations

from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from fp8compile.features.delayed.state_page import HISTORY
from tests.distributed.ranks import MODELS, OnRanks, Way, facts, train
from tests.support.harness import scaling_tensors, sqnr
from tests.support.models import Attention, Block
from tests.support.processes import on_ranks

pytestmark = pytest.mark.slow

WAYS = {
    "delayed, group": (2, Way("tp", {"recipe": "delayed", "amax_group": "tp"})),
    "delayed": (2, Way("tp", {"recipe": "delayed"})),
    "tensorwise, group": (2, Way("tp", {"recipe": "tensorwise", "amax_group": "tp"})),
    "blockwise": (2, Way("tp", {"recipe": "blockwise"})),
    "fsdp x tp": (4, Way("fsdp x tp", {"recipe": "delayed"}, mesh=(2, 2), same=True)),
    "context": (2, Way("context", {"recipe": "delayed", "reduce_amax": True})),
}
AGREE = {"amax_group", "reduce_amax"}  # all ranks have the amaxes of one device
FIRST = ("blocks.0.mlp.up.weight.input", "blocks.0.mlp.gate.weight.input", "attention.q.weight.input")
NAMED = ("name", "role", "use", "layout", "recipe", "format")


class GatheringAttention(Attention):
    """Queries of this rank's tokens against the keys and values of all; [batch, time / ranks, width] -> the
    same. torch's ring attention does not run on a CPU (docs/distributed.md says why)."""

    parallel = False

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (f(x).view(batch, time, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        first = dist.get_rank() * time if self.parallel else 0
        if self.parallel:
            k, v = (all_gather_tensor_autograd(part.contiguous(), 2, dist.group.WORLD) for part in (k, v))
        positions = torch.arange(k.shape[2], device=x.device)
        seen = positions <= positions[first : first + time, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o(y.transpose(1, 2).reshape(batch, time, width))


class Attending(Block):
    """A transformer block whose attention can gather."""

    def __init__(self) -> None:
        super().__init__(gated=True)
        self.attention = GatheringAttention()


def gradients(run: OnRanks) -> dict[str, Tensor]:
    return {name: x for name, x in run.seen.items() if name.split()[1] == "gradient"}


def histories(run: OnRanks) -> dict[str, list[float]]:
    state = scaling_tensors(run.model)
    return {name: row[HISTORY:-1].tolist() for name, row in state.items() if "version" not in name}


@mock.patch.dict(MODELS, attending=Attending)
def _exact(rank: int, name: str) -> dict[str, Any]:
    """In dB to high precision, of each gradient of two steps: on one device, and on these ranks."""
    way = WAYS[name][1]
    model = "attending" if way.kind == "context" else "gated"
    options = {key: value for key, value in way.options.items() if key not in AGREE}
    high = gradients(train(model, Way("one", compiled="not"), "fbz fbz"))
    found: dict[str, Any] = {"ratios": [], "facts": [], "slots": []}
    for one in (Way("one", options), way):
        run = train(model, one, "fbz fbz s")
        found["ratios"].append([sqnr(x, gradients(run)[key]) for key, x in high.items()])
        found["facts"].append(facts(run, []))
        found["slots"].append(histories(run))
    return found


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("name", WAYS)
def test_as_exact_as_one_device(name: str) -> None:
    """Reports, statistics and states have the names of one device. A weight's amax is the larger of its
    shards', and each shard's matmul is half of the matmul. With a group, or if amaxes are reduced, all ranks
    have those of one device: bitwise those of weights and of the first input; after a first layer in FP8,
    products may be rounded elsewhere."""
    ranks, way = WAYS[name]
    near, alike = (1.5, 0.3) if way.kind == "context" else (2.0, 0.1)  # in dB; of amaxes
    results = on_ranks(ranks, _exact, name)
    for found in results:
        (one, ours), (theirs, mine), (_, got) = found["ratios"], found["facts"], found["slots"]
        assert min(ours) > 18.0 and median(ours) > max(20.0, median(one) - 1.0)
        assert all(x >= y - near for x, y in zip(ours, one, strict=True))
        assert mine["graphs"] == theirs["graphs"] and mine["fp8"] == theirs["fp8"]
        assert mine["state"] == theirs["state"]
        rows = [[[*map(row.get, NAMED)] for row in side["stats"]] for side in (mine, theirs)]
        assert rows[0] == rows[1]
        assert bool(got) is (way.options["recipe"] == "delayed")
        assert all(sum(amax > 0 for amax in history) == 2 for history in got.values())
        if way.kind in ("tp", "context"):
            assert [2 * size for size in mine["sizes"]] == theirs["sizes"]
    expected, agree = results[0]["slots"][0], bool(AGREE & way.options.keys())
    for key, history in expected.items():
        every, weight = [found["slots"][1][key] for found in results], ".weight.weight." in key
        if way.kind == "tp" and weight:
            assert max(one[1] for one in every) == history[1] > 0.0, key
        if agree:
            exact = weight or key.startswith(FIRST)
            assert all(one == every[0] for one in every), key
            torch.testing.assert_close(every[0], history, rtol=0.0 if exact else alike, atol=0.0, msg=key)
