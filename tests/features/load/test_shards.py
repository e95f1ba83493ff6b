"""Held weights under `fully_shard`, on several processes: each keeps its rows, bytes and scales are gathered,
and graphs multiply by what has arrived. The oracle is the same model with whole bytes on each rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile.config.recipe import ROW, WHOLE, Block
from tests.features.load import test_stacks
from tests.features.load.test_load import (
    POLICY,
    SQUARE,
    batch,
    freeze,
    model,
    products,
    released,
    scale_of,
    values,
)
from tests.support import hooks
from tests.support.operands import ends
from tests.support.processes import error_of, on_ranks
from tests.support.served import same, tensors_of

LIMIT = 120.0  # seconds, of each test
LAYERS = ("up.base", "down.base")


def build(folder: str, whole: bool = False, again: bool = False, **how: Any) -> Any:
    """A model with held weights and adapters, whose layers are compiled and sharded. `again`: backward
    computes them again. `whole`: each rank has the whole bytes."""
    torch._dynamo.reset()
    made: Any = freeze(model())
    fp8compile.load_fp8(made, folder)
    if whole:
        how["ignored_params"] = fp8compile.fp8_parameters(made)
    for layer in (made.up, made.down):
        layer.compile(backend="fp8", fullgraph=True, options={"policy": POLICY})
        if again:
            layer.forward = checkpointed(layer.forward)
        fully_shard(layer, **how)
    return fully_shard(made, **how)


def checkpointed(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def steps(made: Any, rank: int) -> list[Tensor]:
    """Outputs and gradients of two steps, and the output of an evaluation."""
    found = []
    optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=0.5)
    for seed in range(2):
        y = made(batch(2 * seed + rank))
        (y.float() * batch(7 + rank).float()).sum().backward()
        found += [y.detach(), *(p.grad.full_tensor() for p in made.parameters() if p.requires_grad)]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found.append(made.eval()(batch(rank)))
    for layer in (made.up, made.down):
        layer.reshard()
    return found


def _train(rank: int, folder: str, mesh: tuple[int, ...], how: dict[str, Any]) -> dict[str, Any]:
    how = {**how, "mesh": init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])}
    whole = steps(build(folder, whole=True, **how), rank)
    made = build(folder, **how)
    with hooks.multiplied() as multiplied, hooks.joint_graphs(products) as graphs:
        found = steps(made, rank)
    held = [made.get_parameter(f"{name}.weight") for name in LAYERS]
    return {
        "alike": [same(a, b) for a, b in zip(whole, found, strict=True)],
        "rows": [len(x._local_tensor.data_) for x in held],
        "bytes": [x._local_tensor.nbytes for x in held],
        "multiplied": multiplied,
        "graphs": graphs,
        "report": fp8compile.report(made).summary(),
        "adapters": {type(p) for p in made.parameters() if p.requires_grad},
    }


def check(path: Path, block: Block, mesh: tuple[int, ...], how: dict[str, Any]) -> None:
    tensors, ranks = released(path, block), mesh[-1]
    said = on_ranks(torch.Size(mesh).numel(), _train, str(path), mesh, how, limit=LIMIT)
    for i, found in enumerate(said):
        assert len(found["alike"]) == 11 and all(found["alike"])
        for j, size in enumerate((320, 256)):
            rows = -(-size // ranks)
            assert found["rows"][j] == min(rows, size - i % ranks * rows)
            data, scales = rows * (576 - size), scale_of(tensors, LAYERS[j]).numel() * 4
            assert found["bytes"][j] <= data + (scales if block != ROW else -(-scales // ranks))
        forward = [(data, inv) for data, inv in found["multiplied"] if data.shape in ((320, 256), (256, 320))]
        assert same(forward[0][0], tensors["up.base.weight"])
        assert torch.equal(forward[0][1].reshape(-1), scale_of(tensors, "up.base").reshape(-1))
        assert {operand for graph in found["graphs"] for operand in graph} == {"placeholder"}
        assert "MB instead of 0.3277, in shards, gathered in FP8" in found["report"]
        assert found["adapters"] == {DTensor}


CASES = {
    "blocks": (SQUARE, {}),
    "rows": (ROW, {"reshard_after_forward": False}),
    "whole": (WHOLE, {}),
    "again": (SQUARE, {"again": True}),
}


@pytest.mark.cases(test=1, slow=3)
@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_whole_bytes(case: str, tmp_path: Path) -> None:
    """A cut divides a block of `up`, 160 of whose rows are on each rank."""
    block, how = CASES[case]
    check(tmp_path, block, (2,), how)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
def test_uneven_shards_and_replicas_of_shards(mesh: tuple[int, ...], tmp_path: Path) -> None:
    check(tmp_path, SQUARE, mesh, {})


def _out(rank: int, folder: str) -> dict[str, Any]:
    made = build(folder)
    before = {name: x.clone() for name, x in fp8compile.served_weights(made)}
    fp8compile.export(made, Path(folder, "out"))
    y = made(batch(rank))
    y.float().sum().backward()
    state = made.state_dict()
    made.load_state_dict(state)
    assert torch.equal(made(batch(rank)), y)
    full = get_model_state_dict(made, options=StateDictOptions(full_state_dict=True))
    scales = [row["scale_inv_min"] for row in fp8compile.stats(made) if row["role"] == "weight"]
    return {
        "served": [before, {name: x.clone() for name, x in fp8compile.served_weights(made)}],
        "state": {name: x.full_tensor() for name, x in state.items() if isinstance(x, DTensor)},
        "plain": {type(x.to_local()) for x in state.values() if isinstance(x, DTensor)},
        "full": full,
        "scales": scales,
    }


@pytest.mark.slow
def test_what_comes_out_is_whole(tmp_path: Path) -> None:
    """`served_weights`, and `export` in two files: the bytes of the file on both ranks, before the first
    call, too. State dicts have what they stand for."""
    tensors = released(tmp_path, stored=torch.bfloat16)
    file = load_file(tmp_path / "model.safetensors")
    said = on_ranks(2, _out, str(tmp_path), limit=LIMIT)
    written = tensors_of(tmp_path / "out")
    assert len([*(tmp_path / "out").glob("model-0000?-of-00002.safetensors")]) == 2
    for found in said:
        for served in (*found["served"], written):
            assert served.keys() == file.keys()
            assert all(same(served[name], x) for name, x in file.items() if "base" in name)
        assert found["plain"] == {Tensor} and found["full"].keys() == model().state_dict().keys()
        for name in LAYERS:
            for state in (found["state"], found["full"]):
                assert same(state[f"{name}.weight"], values(tensors, name))
        assert all(x > 0 for x in found["scales"]) and len(found["scales"]) == 2


def _errors(rank: int, folder: str) -> list[str]:
    made = build(folder)
    changed = {name: x.clone() for name, x in made.state_dict().items()}
    changed["up.base.weight"] += 1
    columns = {"shard_placement_fn": lambda p: Shard(1) if p.dim() > 1 else None}
    return [
        error_of(lambda: made.load_state_dict(changed)),
        error_of(lambda: fp8compile.load_fp8(made, folder)),
        error_of(lambda: fp8compile.restore_frozen_weights(made)),
        error_of(lambda: made.up.base.weight.detach().mul_(2)),
        error_of(lambda: build(folder, **columns)),
        error_of(lambda: build(folder, reshard_after_forward=2)(batch())),
        error_of(lambda: build(folder).to(torch.float32)(batch().float())),
    ]


@pytest.mark.slow
def test_what_shards_cannot_do_says_what_to_do(tmp_path: Path) -> None:
    released(tmp_path)
    wanted = (
        "that fully_shard has sharded: load them before fully_shard, with load_fp8",
        "is a DTensor: call load_fp8 before fully_shard",
        "up.base.weight is a shard of a weight that is kept in FP8 only: call restore_frozen_weights before",
        "aten.mul_.Tensor would write to a weight that is kept in FP8 only",
        "Linear.weight is held in FP8, and shard_placement_fn shards it along dimension 1: return Shard(0)",
        "up.base.weight is held in FP8, and resharded to fewer ranks after forward: use reshard_",
        "Linear.weight was held in FP8, and its shards are in high precision now: call model.to() before",
    )
    for said in on_ranks(4, _errors, str(tmp_path), limit=LIMIT):
        for message, part in zip(said, wanted, strict=True):
            assert part in message


def _experts(rank: int, folder: str) -> list[bool]:
    x, dy = (torch.randn(sum(test_stacks.SIZES), test_stacks.WIDE).bfloat16() for _ in range(2))
    found = []
    for whole in (True, False):
        torch._dynamo.reset()
        made = test_stacks.model()
        fp8compile.load_fp8(made, folder, stacks=test_stacks.stacks())
        fully_shard(made, ignored_params=fp8compile.fp8_parameters(made) if whole else None)
        made.compile(backend="fp8", options={"policy": test_stacks.POLICY})
        torch.manual_seed(rank)
        y = made(x, ends(test_stacks.SIZES))
        y.backward(dy)
        found.append([y.detach(), *(p.grad.full_tensor() for p in made.parameters() if p.requires_grad)])
    assert isinstance(made.experts.down_proj, DTensor)
    fp8compile.export(made, Path(folder, "out"))
    used = {m.recipe for m in fp8compile.report(made).matmuls if m.groups and m.decision == "fp8"}
    assert used == {"blockwise"}
    return [same(a, b) for a, b in zip(*found, strict=True)]


@pytest.mark.slow
def test_stacks_of_experts(tmp_path: Path) -> None:
    """Three experts on two ranks; an export has a tensor for each again."""
    tensors = test_stacks.released(tmp_path)
    assert on_ranks(2, _experts, str(tmp_path), limit=LIMIT) == [[True] * 3] * 2
    written = tensors_of(tmp_path / "out")
    experts = {name.removesuffix("_inv"): x for name, x in tensors.items() if name[0].isdigit()}
    assert len(experts) == 18 and all(same(x, written[name]) for name, x in experts.items())
