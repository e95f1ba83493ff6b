"""Held weights on two processes with DDP: each holds the whole bytes, and only adapters' gradients travel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fp8compile
from tests.features.load.test_load import POLICY, batch, freeze, model, released
from tests.support.harness import sqnr
from tests.support.processes import on_ranks
from tests.support.served import same

pytestmark = pytest.mark.slow


def step(run: Any, seeds: list[int]) -> None:
    for seed in seeds:
        (run(batch(seed)).float() * batch(seed + 9).float()).sum().div(len(seeds)).backward()


def train(rank: int, folder: str) -> dict[str, Any]:
    made: Any = freeze(model(rank))  # DDP brings the adapters of the first rank to all
    fp8compile.load_fp8(made, folder)
    if rank:
        with torch.no_grad():
            made.up.a.weight.zero_()
    ddp = DistributedDataParallel(made)
    step(torch.compile(ddp, backend="fp8", options={"policy": POLICY}), [rank])
    held = {name: p for name, p in made.named_parameters() if p in fp8compile.fp8_parameters(made)}
    files = fp8compile.export(ddp, Path(folder) / f"out{rank}").files
    return {
        "bytes": {name: (p.data_, p.inv_) for name, p in held.items()},
        "gradients": {name: p.grad for name, p in made.named_parameters() if p.grad is not None},
        "recipes": {(m.recipe, m.decision) for m in fp8compile.report(ddp).matmuls if "base" in m.fqn},
        "files": files,
    }


def test_ddp(tmp_path: Path) -> None:
    """Bytes are those of the file on both ranks. Gradients are the mean, those of one process."""
    tensors = released(tmp_path)
    ranks = on_ranks(2, train, str(tmp_path), limit=120)
    alone: Any = freeze(model())
    fp8compile.load_fp8(alone, tmp_path)
    step(alone, [0, 1])
    wanted: dict[str, Tensor] = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    for found in ranks:
        assert found["recipes"] == {("blockwise", "fp8")} and "model.safetensors" in found["files"]
        assert found["bytes"].keys() == {"up.base.weight", "down.base.weight"}
        for name, (data, inverse) in found["bytes"].items():
            assert same(data, tensors[name]) and same(inverse, tensors[f"{name}_scale_inv"])
        assert found["gradients"].keys() == wanted.keys()
        for name, x in found["gradients"].items():
            assert torch.equal(x, ranks[0]["gradients"][name]) and sqnr(x, wanted[name]) > 24, name
