"""Tensor parallelism: its gradients are as close to those of high precision as one device's, and it goes on from its state.

All ranks get the same batch, so that what they compute together is what one device computes.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from fp8compile.ir.state_page import HISTORY
from tests.distributed.ranks import OnRanks, Way, facts, prepared, train
from tests.support.harness import load_scaling, scaling_tensors, sqnr
from tests.support.processes import on_ranks

pytestmark = pytest.mark.slow

WAYS = {
    "tp, delayed": (2, Way("tp", {"recipe": "delayed"})),
    "tp, tensorwise": (2, Way("tp", {"recipe": "tensorwise", "amax_group": "tp"})),
    "tp, rowwise": (2, Way("tp", {"recipe": "rowwise"})),
    "tp, blockwise": (2, Way("tp", {"recipe": "blockwise"})),
    "fsdp x tp": (4, Way("fsdp x tp", {"recipe": "delayed"}, mesh=(2, 2), same=True)),
    "mixed precision": (2, Way("fsdp", {"recipe": "delayed"}, dtype=torch.bfloat16, same=True)),
}


def gradients(run: OnRanks) -> dict[str, torch.Tensor]:
    return {name: x for name, x in run.seen.items() if name.split()[1] == "gradient"}


def _exact(rank: int, name: str) -> dict[str, Any]:
    """In dB to high precision, of each gradient of two steps: on these ranks, and on one device."""
    way = WAYS[name][1]
    options = {key: value for key, value in way.options.items() if key != "amax_group"}
    high = gradients(train("gated", Way("one", compiled="not"), "fbs fb"))
    found: dict[str, Any] = {"ratios": [], "facts": [], "slots": []}
    for one in (Way("one", options), way):
        run = train("gated", one, "fbs fb")
        found["ratios"].append([sqnr(x, gradients(run)[key]) for key, x in high.items()])
        found["facts"].append(facts(run, []))
        found["slots"].append(histories(run))
    return found


def histories(run: OnRanks) -> dict[str, list[float]]:
    state = scaling_tensors(run.model)
    return {name: row[HISTORY:-1].tolist() for name, row in state.items() if "version" not in name}


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("name", WAYS)
def test_as_exact_as_one_device(name: str) -> None:
    """Reports, statistics and states have the names of one device. A weight's amax is the larger of its shards', and each
    shard's matmul is half of the matmul."""
    ranks, way = WAYS[name]
    results = on_ranks(ranks, _exact, name)
    for found in results:
        (one, ours), (theirs, mine), (expected, got) = found["ratios"], found["facts"], found["slots"]
        assert min(ours) > 18.0 and median(ours) > 20.0
        assert way.dtype == torch.bfloat16 or all(x >= y - 2.0 for x, y in zip(ours, one, strict=True))
        assert mine["fp8"] == theirs["fp8"] and mine["state"] == theirs["state"]
        keys = ("name", "role", "use", "layout", "recipe", "format")
        assert [[row[key] for key in keys] for row in mine["stats"]] == [[row[key] for key in keys] for row in theirs["stats"]]
        assert bool(got) is (way.options["recipe"] == "delayed")
        assert all(sum(amax > 0 for amax in history) == 2 for history in got.values())
        if way.kind == "tp":
            assert [2 * size for size in mine["sizes"]] == theirs["sizes"]
    for key, history in expected.items():
        if way.kind == "tp" and ".weight.weight." in key:
            assert max(found["slots"][1][key][1] for found in results) == history[1] > 0.0, key  # before the first update


def _from_one(rank: int) -> dict[str, list[float]]:
    """The third loss: on one device; on two that have loaded its state; on two without a state."""
    one = train("gated", Way("one", {"recipe": "delayed"}), "fbs fbs")
    state, weights = scaling_tensors(one.model), {k: x.detach().clone() for k, x in one.model.state_dict().items()}
    x = one.batch()
    found = {"one": [one.call(x).square().mean().item()]}
    for kind, options in (("tp", {"amax_group": "tp"}), ("ddp", {})):
        torch._dynamo.reset()
        for loads in (True, False):
            run = prepared("gated", Way(kind, {"recipe": "delayed", **options}))
            for name, p in run.model.named_parameters():
                value = weights[name]
                p.detach().copy_(distribute_tensor(value, p.device_mesh, p.placements) if isinstance(p, DTensor) else value)
            if loads:
                load_scaling(run.model, state)
            found.setdefault(kind, []).append(run.call(x).square().mean().item())
    return found


@pytest.mark.weekly
def test_ranks_go_on_from_the_state_of_one_process() -> None:
    """The losses differ by rounding from those of one process: less than a lost state changes them."""
    first, second = on_ranks(2, _from_one)
    (one,) = first["one"]
    for kind in ("tp", "ddp"):
        loaded, cold = first[kind]
        assert loaded == second[kind][0] and abs(loaded - one) < 0.3 * abs(cold - one), kind
