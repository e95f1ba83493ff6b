"""Compiled modules with the sharded parameters of FSDP2 and FSDP1, on two processes: phases and policies.
(test_equivalence_on_ranks.py trains them beside replicas.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

import fp8compile
from tests.distributed.ranks import Way, build, sharded
from tests.support import hooks
from tests.support.harness import noise, sqnr
from tests.support.hooks import slots_of
from tests.support.models import ResidualMlp
from tests.support.processes import on_ranks, warnings

pytestmark = pytest.mark.slow


def _names(rank: int) -> dict[str, tuple[dict[str, str], set[str]]]:
    """The reasons of the matmuls by name, and the names of graphs: of the model as it is, and sharded as one
    group; in groups, compiled whole, where FSDP2 breaks the graph; with its blocks compiled; with compiled
    blocks in their place, as torchtitan does."""
    found = {}
    for way in ("plain", "one", "whole", "blocks", "replaced"):
        torch._dynamo.reset()
        model = build("mlps")
        last = {"name": "last", "blocks": "last 1", "gemm": "wgrad", "fp8": "off"}
        named = {"name": "class", "module_class": "ResidualMlp", "module": "*.1.up"}
        named |= {"gemm": "dgrad", "fp8": "off"}
        options = {"strict": True, "exclude": ["blocks.0.up"], "policy": {"rules": [last, named]}}
        how: Any = {"backend": "fp8", "options": options}
        blocks: Any = model.blocks
        if way in ("plain", "one", "whole"):
            model.compile(**how)
        for name, block in list(blocks.named_children()):
            if way == "blocks":
                block.compile(**how)
            elif way == "replaced":
                blocks.register_module(name, torch.compile(block, **how))
        for module in {"plain": (), "one": (model,)}.get(way, (*blocks, model)):
            fully_shard(module)
        with hooks.traced():
            model(noise(32, 128, seed=rank).requires_grad_()).sum().backward()
            torch.optim.SGD(model.parameters(), 0.0).step()
        report = fp8compile.report(model)
        reasons = {f"{x.fqn} {x.gemm}": x.reason for x in report.matmuls if x.fqn.startswith("blocks")}
        found[way] = reasons, {graph.name for graph in report.graphs if graph.matmuls}
    return found


def test_names_are_those_of_the_model() -> None:
    """`fully_shard` makes a class of its own for each, and breaks the graph at each of its modules."""
    for found in on_ranks(2, _names):
        plain, _ = found["plain"]
        assert {*plain.values()} >= {"", "exclude blocks.0.up", "last", "class"}
        assert all(reasons == plain for reasons, _ in found.values())
        assert found["plain"][1] == found["one"][1] == {"Net, training"}
        assert found["blocks"][1] == found["replaced"][1] == {"ResidualMlp, training"}


class Stem(nn.Module):
    """A convolution, then blocks in checkpoints: a batch of one has another stride than behind a linear."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv1d(128, 128, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualMlp() for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def _recomputed_by_another_graph(rank: int) -> list[bool]:
    """Dynamo compiles a block twice, and a recomputation may get the other graph."""
    ends = []
    for checkpointed in (False, True):
        torch._dynamo.reset()
        model, seen = Stem(checkpointed), []
        for block in model.blocks:
            block.compile(backend="fp8")
            fully_shard(block)
        fully_shard(model)
        for number in range(5):
            x = noise(1, 32, 128, seed=10 * number + rank) * (100.0 if number == 3 else 1.0)
            model(x).square().mean().backward()
            seen += [p.grad.to_local().clone() for p in model.parameters()]
            model.zero_grad()
        ends.append(seen)
    return [torch.equal(*pair) for pair in zip(*ends, strict=True)]


def test_a_batch_of_one_in_checkpoints() -> None:
    """Gradients are those without checkpoints, bitwise."""
    for found in on_ranks(2, _recomputed_by_another_graph):
        assert len(found) == 50 and all(found), found


def _as_fsdp2(rank: int) -> list[Any]:
    """By FSDP2 and by FSDP1: the decisions of rules by position, and of a function that chooses weights; and
    how far a model is from high precision, in dB, one and two steps after its start: FP8 begins after two."""
    found = []
    rules = [{"layers": "last 2", "recipe": "rowwise"}, {"blocks": "first 1", "fp8": "off"}]
    for kind in ("fsdp", "fsdp1"):
        torch._dynamo.reset()
        made = []
        for options in ({"policy": {"rules": rules}}, {"policy": lambda module, name: name.endswith("up")}):
            model: Any = sharded(build("mlps"), Way(kind, options), None)
            model(noise(32, 128, seed=rank)).sum().backward()
            report = fp8compile.report(model)
            made.append(sorted((x.fqn, x.gemm, x.decision, x.recipe, x.reason) for x in report.matmuls))
            made.append([(x.parameter, x.rows, x.columns) for x in report.outside])
        torch._dynamo.reset()
        warmup = Way(kind, {"policy": {"schedule": {"warmup_steps": 2}}})
        model, plain = sharded(build("mlps"), warmup, None), build("mlps")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(3):
            made.append(sqnr(plain(noise(32, 128, seed=9)), y := model(noise(32, 128, seed=9))) > 100.0)
            y.sum().backward()
            optimizer.step()
        found.append(made)
    return found


def test_fsdp1_decides_as_fsdp2() -> None:
    """Its parameters are flat parts, so their places in the model are to be found in another way."""
    for ours, theirs in on_ranks(2, _as_fsdp2):
        assert ours == theirs and theirs[-3:] == [True, True, False]
        assert {x[2] for x in theirs[0]} == {x[2] for x in theirs[2]} == {"fp8", "high_precision"}
        assert {x[3] for x in theirs[0]} >= {"rowwise", "delayed"} and theirs[1] == [("out.weight", 128, 128)]


def _fsdp1(rank: int) -> list[str]:
    """What is said of a model under FSDP1 with use_orig_params=False, with and without `strict`."""
    said = []
    for options in ({}, {"strict": True}):
        hooks.forget()
        policy = ModuleWrapPolicy({ResidualMlp})
        blocks = nn.Sequential(ResidualMlp(), ResidualMlp())
        model = FullyShardedDataParallel(
            blocks, auto_wrap_policy=policy, use_orig_params=False, device_id=torch.device("cpu")
        )
        found = warnings()
        try:
            torch.compile(model, backend="fp8", options=options)(noise(32, 128, seed=rank)).sum().backward()
        except fp8compile.StrictError as error:
            found.append(f"StrictError: {error}")
        said.append(next(text for text in found if "FSDP1" in text))
    return said


def test_fsdp1_without_original_parameters_is_named() -> None:
    for warned, raised in on_ranks(2, _fsdp1):
        assert warned.startswith("FullyShardedDataParallel (FSDP1) with use_orig_params=False")
        assert "fully_shard" in warned
        assert raised.startswith("StrictError") and "FSDP1" in raised


# -- a block that FSDP2 compiles twice --


class Slices(nn.Module):
    """Three slices of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(384, 128) / 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ part.t() for part in self.weight.chunk(3))
        return x + (q * k.sigmoid() + v).tanh()


def _slices(rank: int) -> dict[str, list[Any]]:
    """Outputs and histories of four steps, as a replica and sharded, on the same batches on all ranks."""
    found: dict[str, list[Any]] = {}
    for way in ("replica", "fsdp"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        block = Slices()
        block.compile(backend="fp8")
        if way == "fsdp":
            fully_shard(block)
        optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
        found[way] = []
        for step in range(4):
            x = torch.randn(32, 128, generator=torch.Generator().manual_seed(step)) * (1 + step)
            for _ in range(2):
                x = checkpoint(block, x, use_reentrant=False)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = {key: (slot.history(), slot.scale()) for key, slot in slots_of(block).items()}
            found[way].append((x.detach(), state))
    return found


def test_a_block_that_is_compiled_twice_has_the_state_of_a_replica() -> None:
    """It is called twice a step in a checkpoint. (A graph a call moved the state in each, until 0.3.)"""
    for found in on_ranks(2, _slices):
        for (expected, state), (y, ours) in zip(found["replica"], found["fsdp"], strict=True):
            assert torch.equal(y, expected) and ours == state and len(state) > 6
