"""fp8compile.optim.AdamW on parameters that are DTensors, and its checkpoints on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fp8compile.optim import AdamW
from tests.support.processes import on_ranks

pytestmark = pytest.mark.slow
WHOLE = StateDictOptions(full_state_dict=True)


def model(rows: int = 256) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, rows), nn.GELU(), nn.Linear(rows, 128), nn.LayerNorm(128)).bfloat16()


def train(of: nn.Module, optimizer: AdamW, steps: range) -> None:
    """The same batch on all ranks, so that any sharding has the gradients of one process."""
    for step in steps:
        x = torch.randn(16, 128, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.zero_grad()
        (of(x) - x).float().square().mean().backward()
        optimizer.step()


def build(kind: str, rows: int) -> tuple[nn.Module, AdamW]:
    net: Any = model(rows)
    ranks = dist.get_world_size() if kind != "one" else 1
    if kind == "fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (ranks,)))
    if kind == "hsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard")))
    if kind == "tp":
        parallelize_module(
            net, init_device_mesh("cpu", (ranks,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
    return net, AdamW(net.parameters(), lr=0.01, master="bf16+remainder", compiled=False)


def states(net: nn.Module, optimizer: AdamW) -> dict[str, dict[str, Tensor]]:
    return get_optimizer_state_dict(net, optimizer, options=WHOLE)["state"]


def trained(rank: int, kind: str, rows: int) -> Any:
    net, optimizer = build(kind, rows)
    train(net, optimizer, range(4))
    return get_model_state_dict(net, options=WHOLE), states(net, optimizer)


def equal(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(
        equal(value, other[key]) if isinstance(value, dict) else torch.equal(value, other[key])
        for key, value in one.items()
    )


def near(weights: dict[str, Tensor], net: nn.Module) -> bool:
    """The difference is small beside what four steps have changed."""
    start = model(net[0].out_features).state_dict()  # type: ignore[index]
    theirs = net.state_dict().items()
    return all((weights[n] - v).float().norm() <= 0.1 * (v - start[n]).float().norm() for n, v in theirs)


@pytest.mark.parametrize(
    ("kind", "ranks", "rows"), [("fsdp", 2, 256), ("hsdp", 4, 256), ("fsdp", 2, 255), ("tp", 2, 256)]
)
def test_shards_are_updated_as_one_process_updates_the_whole(kind: str, ranks: int, rows: int) -> None:
    """To the bit where rows have 128 elements, so that no block spans two shards. Tensor parallelism adds up
    in another order; of 255 columns of the second weight, blocks span shards."""
    weights, moments = on_ranks(ranks, trained, kind, rows)[0]
    net, optimizer = build("one", rows)
    train(net, optimizer, range(4))
    if rows == 255 or kind == "tp":
        assert near(weights, net)
    else:
        assert equal(weights, net.state_dict()) and equal(moments, states(net, optimizer))


def saved(rank: int, folder: str) -> Any:
    net, optimizer = build("fsdp", 256)
    train(net, optimizer, range(3))
    dcp.save(
        {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)},
        checkpoint_id=folder,
    )
    train(net, optimizer, range(3, 6))
    return get_model_state_dict(net, options=WHOLE), states(net, optimizer)


def resumed(rank: int, folder: str, kind: str) -> Any:
    net, optimizer = build(kind, 256)
    found = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}
    dcp.load(found, checkpoint_id=folder)
    set_model_state_dict(net, found["model"])
    set_optimizer_state_dict(net, optimizer, found["optimizer"])
    train(net, optimizer, range(3, 6))
    return get_model_state_dict(net, options=WHOLE), states(net, optimizer)


@pytest.mark.parametrize(("kind", "ranks"), [("one", 1), ("fsdp", 4)])
def test_a_checkpoint_of_two_ranks_resumes_to_the_bit_on_others(
    kind: str, ranks: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    weights, moments = on_ranks(2, saved, folder)[0]
    theirs, found = on_ranks(ranks, resumed, folder, kind)[0]
    assert equal(weights, theirs)
    assert equal(moments, found)


def given_a_whole_state(rank: int) -> list[str]:
    net, optimizer = build("fsdp", 256)
    train(net, optimizer, range(1))
    _, whole = build("one", 256)
    for p in whole.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    whole.step()
    try:
        optimizer.load_state_dict(whole.state_dict())
    except ValueError as error:
        return [str(error)]
    return []


def test_a_whole_state_for_a_shard_is_refused() -> None:
    assert "set_optimizer_state_dict" in on_ranks(2, given_a_whole_state)[0][0]
