"""`fp8_all_gather` with scales of blocks, where shards have whole blocks: to the bit the training without it. Statistics."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8compile
from fp8compile.backend import fp8
from fp8compile.distributed import fp8_all_gather
from fp8compile.runtime.inner import INDUCTOR
from fp8compile.runtime.parameters import find
from tests.distributed.test_all_gather import FP8, counted, gathered, reductions, same_training
from tests.support.models import ResidualMlp
from tests.support.processes import on_ranks

pytestmark = pytest.mark.slow

STEPS = 4


class Net(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualMlp(width, hidden) for _ in range(2))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def batch(step: int, rank: int, width: int) -> torch.Tensor:
    return torch.randn(32, width, generator=torch.Generator().manual_seed(10 * step + rank))


def sharded(gather: bool, width: int, hidden: int, bf16: bool = True, checkpoint: bool = False, **how: Any) -> Net:
    """A model whose blocks are compiled. `how`: `compiled` has more options, all else goes to `fully_shard`."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(width, hidden)
    options = {"recipe": "blockwise", **how.pop("compiled", {})}
    if bf16:
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i, block in enumerate(model.blocks):
        block.compile(backend="fp8", fullgraph=True, options=options)
        fully_shard(block, **how)
        if checkpoint:  # around a sharded module: backward gathers for a forward within it
            model.blocks[i] = checkpoint_wrapper(block)
    fully_shard(model, **{key: value for key, value in how.items() if key != "reshard_after_forward"})
    if gather:
        fp8_all_gather(model)
    return model


# --- training ---------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "bf16": {"adam": "foreach"},
    "fp32, any scale, checkpoint": {
        "adam": "fused",
        "bf16": False,
        "checkpoint": True,
        "compiled": {"power_of_2_scale": False, "margin": (0, 1, 0)},
    },
    "accumulation, no reshard": {"adam": "foreach", "accumulate": 2, "reshard_after_forward": False, "evaluate": False},
    "Inductor": {"adam": "foreach", "inductor": True},
    "tiles of mxfp8": {"adam": "foreach", "compiled": {"recipe": "mxfp8", "weight_tiles": True}},
}


def _trained(
    rank: int, gather: bool, adam: str, accumulate: int = 1, evaluate: bool = True, inductor: bool = False, **how: Any
) -> dict[str, Any]:
    """Some steps, with an evaluation and a loaded state in between."""
    model = sharded(gather, 256, 256, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **{adam: True})
    found: dict[str, Any] = {"gradients": {}, "sent": [], "evaluated": [], "alive": [], "reduced": []}
    for step in range(STEPS):
        with counted() as sent, reductions() as reduced:
            for part in range(accumulate):
                model.set_requires_gradient_sync(part == accumulate - 1)
                kept: list[torch.UntypedStorage] = []

                def pack(x: torch.Tensor, kept: list[torch.UntypedStorage] = kept) -> torch.Tensor:
                    if x.dtype in FP8 and x.numel() == 256 * 256:
                        kept.append(x.untyped_storage())
                    return x

                with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                    y = model(batch(step, rank + 2 * part, 256))
                alive = {id(storage): storage.nbytes() for storage in kept}  # FSDP2 has freed what it gathered
                y.float().square().mean().backward()
        found["alive"].append(sum(alive.values()))
        found["sent"].append(sum(sent))
        found["reduced"].append(len(reduced))
        for name, p in model.named_parameters():
            found["gradients"][f"{step} {name}"] = p.grad.full_tensor().clone()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            model.load_state_dict({name: value.detach().clone() * 3 for name, value in model.state_dict().items()})
        if evaluate:
            with torch.no_grad():
                found["evaluated"].append(model.eval()(batch(7, rank, 256)))
            model.train()
    return {**found, "report": gathered(model), "graphs": len(fp8compile.report(model).graphs)}


def _train(rank: int) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for name, case in CASES.items():
        inner = {"inner": INDUCTOR} if case.get("inductor") else {}
        with mock.patch.dict(fp8.__kwdefaults__, inner):
            found[name] = [_trained(rank, gather, **case) for gather in (False, True)]
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> list[dict[str, list[dict[str, Any]]]]:
    return on_ranks(2, tmp_path_factory.mktemp("train"), _train)


@pytest.mark.parametrize("case", CASES)
def test_the_training_is_the_one_without_it(trained, case: str) -> None:
    for results in trained:
        plain, ours = results[case]
        same_training(plain, ours, STEPS * 10)
        said = {name.rpartition(".")[2]: entry for name, entry in ours["report"].items() if name.startswith("blocks")}
        assert said == {"weight": ("e4m3", ""), "bias": (said["bias"][0], "not a matrix")}


@pytest.mark.parametrize("case", CASES)
def test_bytes_on_the_wire(trained, case: str) -> None:
    """From the second step on a byte an element, and 4 bytes for each 128 x 128 of them (32 x 32 for mxfp8). One all-reduce a
    step, as for other recipes."""
    tiles = (256 // (32 if "tiles" in case else 128)) ** 2
    kept = CASES[case].get("reshard_after_forward") is not False
    gathers = (2 if kept else 1) * CASES[case].get("accumulate", 1)
    high = 2 if CASES[case].get("bf16", True) else 4
    elements, blocks = 4 * 256 * 256 // 2, 4 * tiles // 2  # four weights, half of each on a rank
    for results in trained:
        plain, ours = results[case]
        spared = gathers * (elements * (high - 1) - 4 * blocks)
        assert ours["sent"] == [plain["sent"][0], *(sent - spared for sent in plain["sent"][1:])]
        others = plain["sent"][1] - gathers * elements * high
        assert ours["sent"][1] - others <= 0.53 * gathers * elements * 2
        assert ours["reduced"] == [count + 1 for count in plain["reduced"]]
        if kept:
            assert ours["alive"][1:] == [0] * (STEPS - 1)


# --- shards without whole blocks ------------------------------------------------------------------------


def step(model: Net, number: int, rank: int, width: int) -> dict[str, torch.Tensor]:
    model(batch(number, rank, width)).float().square().mean().backward()
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.grad.full_tensor().clone()
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None
    return found


def _partly(rank: int, width: int, hidden: int) -> tuple[list[list[dict[str, torch.Tensor]]], dict[str, tuple[str, str]]]:
    runs = []
    for gather in (False, True):
        model = sharded(gather, width, hidden)
        runs.append([step(model, i, rank, width) for i in range(3)])
    return runs, gathered(model)


@pytest.mark.parametrize("ranks, width, hidden, why", [
    (2, 128, 256, "blockwise: shards of 64 rows are no multiple of 128"),
    (3, 256, 384, "blockwise: shards are of different sizes, or by columns"),
    (1, 208, 336, ""),  # a rank alone has all rows
])  # fmt: skip
def test_shards_without_whole_blocks(tmp_path, ranks: int, width: int, hidden: int, why: str) -> None:
    """The first weight of each block has whole blocks on all ranks."""
    for (plain, ours), said in on_ranks(ranks, tmp_path, _partly, width, hidden):
        for expected, got in zip(plain, ours, strict=True):
            for name, gradient in expected.items():
                assert torch.equal(got[name], gradient), name
        assert said["blocks.0.up.weight"] == ("e4m3", "")
        assert said["blocks.1.down.weight"] == (("bfloat16", why) if why else ("e4m3", ""))


# --- statistics, and what a step asks of the device -----------------------------------------------------

WAITS = ("_local_scalar_dense", "nonzero", "index_put_", "lift_fresh", "item")  # or copy from the host to the device


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).removeprefix("aten.").split(".")[0])
        return func(*args, **(kwargs or {}))


def _statistics(rank: int) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for recipe in ("tensorwise", "blockwise"):
        rows = []
        for gather in (False, True):
            model = sharded(gather, 256, 256, compiled={"recipe": recipe})
            for i in range(3):
                step(model, i, rank, 256)
            fp8compile.stats(model, measure=True)
            step(model, 3, rank, 256)
            rows.append(fp8compile.stats(model).rows())
        weight = model.blocks[0].up.weight.full_tensor().to(torch.bfloat16)
        step(model, 4, rank, 256)
        entry = find(model.blocks[0].up.weight).gathered
        with Seen() as seen:
            entry.scales.refresh(False, True)
        found[recipe] = [*rows, fp8compile.stats(model).rows(), weight.abs().max().item(), seen.names]
    return found


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if isinstance(value, float)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_statistics(tmp_path, ranks: int) -> None:
    """A weight has the rows that it has without it. What is measured is of the rank's own rows; amax and scale are those of the
    whole weight, and of the last forward. No step asks the device for anything."""
    for results in on_ranks(ranks, tmp_path, _statistics):
        for recipe, (plain, ours, later, amax, asked) in results.items():
            named = ("name", "role", "use", "layout", "recipe", "format")
            assert [[row[key] for key in named] for row in ours] == [[row[key] for key in named] for row in plain]
            for expected, got in zip(plain, ours, strict=True):
                if got["role"] != "weight" or ranks == 1:
                    assert numbers(got) == pytest.approx(numbers(expected), rel=1e-12) and got["sqnr"]
                else:
                    assert got["sqnr"] == pytest.approx(expected["sqnr"], abs=1) and got["sqnr"] != expected["sqnr"]
                    if recipe == "tensorwise":
                        assert all(got[key] == expected[key] for key in ("scale", "scale_inv", "scale_inv_min"))
            if recipe == "tensorwise":
                (first,) = (row for row in later if row["name"] == "blocks.0.up.weight" and row["role"] == "weight")
                assert first["amax"] == amax and first["scale"] * amax == pytest.approx(448)
            assert "stack" in asked and not set(asked) & set(WAITS)
