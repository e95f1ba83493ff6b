"""Data parallel training on CPUs with gloo: a split graph keeps its state, and `reduce_amax` shares amaxes."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8compile
from fp8compile.runtime.state import slots_of
from tests.support.harness import ALL_FP8, assert_close, interpreted
from tests.support.models import ResidualMlp, SwiGlu
from tests.support.processes import on_ranks


class Net(nn.Module):
    """Dynamo sees this model as one frame. (Under DDP it would compile the blocks of an nn.Sequential one by one.)"""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualMlp(256, 1024) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def test_a_graph_that_ddp_splits(one_process) -> None:
    """DDPOptimizer cuts the graph at the ends of its buckets. The parts compute the same results and state as the whole. (After
    an overflow only the part that overflowed runs cold, but here nothing overflows.)"""
    x = torch.randn(16, 256)

    def train(model: nn.Module, run) -> list[dict[str, torch.Tensor]]:
        grads = []
        with interpreted():
            for step in range(3):
                run(x * (1 + step / 4)).square().mean().backward()
                grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        return grads

    whole, split = build(), build()
    expected = train(whole, torch.compile(whole, backend="fp8"))
    names = {record.fqn for record in fp8compile.report(whole).matmuls}
    torch._dynamo.reset()  # otherwise the second model would run the code of the first one, which is not split
    got = train(split, torch.compile(DistributedDataParallel(split, bucket_cap_mb=1), backend="fp8"))
    for step in range(3):
        assert_close(expected[step], got[step], 40.0, f"step {step}")
    report = fp8compile.report(split)
    assert len(report.graphs) > 1 and {record.fqn for record in report.matmuls} == names
    assert slots_of(split).keys() == slots_of(whole).keys()
    for key, slot in slots_of(split).items():
        torch.testing.assert_close(slot.history(), slots_of(whole)[key].history(), rtol=0.02, atol=0)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = SwiGlu(128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


@pytest.mark.parametrize("views", [False, True])
def test_gradients_that_are_slices_of_one_tensor(one_process, views: bool) -> None:
    """Merged matmuls return them. DDP copies them into its buckets, or lets them be views of the buckets."""
    options = {"policy": ALL_FP8, "recipe": "tensorwise", "merge_matmuls": True}

    def train(model: nn.Module, run) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
        with interpreted():
            for step in range(3):
                run(torch.randn(16, 128, generator=torch.Generator().manual_seed(step))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=step == 1)
        assert {len(record.merged) for record in fp8compile.report(model).matmuls} == {0, 2}
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    torch.manual_seed(0)
    plain = Gated()
    wrapped = copy.deepcopy(plain)
    expected = train(plain, torch.compile(plain, backend="fp8", options=options))
    torch._dynamo.reset()
    ddp = DistributedDataParallel(wrapped, gradient_as_bucket_view=views)
    got = train(wrapped, torch.compile(ddp, backend="fp8", options=options))
    assert all(map(torch.equal, expected.values(), got.values()))


def test_copies_of_weights_of_graphs_that_ddp_splits(one_process) -> None:
    """Each part keeps its own. To the bit as without, and one cast a step."""
    results = []
    for cache in (False, True):
        torch._dynamo.reset()
        model = build()
        ddp = DistributedDataParallel(model, bucket_cap_mb=1)
        options = {"policy": ALL_FP8, "recipe": "tensorwise", "cache_weights": cache}
        run = torch.compile(ddp, backend="fp8", options=options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with interpreted():
            for step in range(3):
                for micro, context in enumerate((ddp.no_sync(), contextlib.nullcontext())):
                    with context:
                        generator = torch.Generator().manual_seed(2 * step + micro)
                        run(torch.randn(32, 256, generator=generator)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
        assert len(fp8compile.report(model).graphs) > 1
    assert all(map(torch.equal, *results))


def test_phases_of_a_graph_that_ddp_splits(one_process) -> None:
    """Each part has both phases, and histories move in both."""
    model = build()
    policy = {"schedule": {"warmup_steps": 2}}
    run = torch.compile(
        DistributedDataParallel(model, bucket_cap_mb=1), backend="fp8", options={"policy": policy, "reduce_amax": True}
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with interpreted():
        for step in range(4):
            run(torch.randn(32, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen = {sum(amax > 0 for amax in slot.history()) for slot in slots_of(model).values()}
            assert seen == {step + 1}
    assert len(fp8compile.report(model).graphs) > 1


def test_layers_are_those_of_the_model_not_of_a_bucket(one_process) -> None:
    policy = {"rules": [{"layers": "first 1", "fp8": "off"}, {"layers": "last 1", "fp8": "off"}], "extends": "none"}
    model = build()
    run = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend="fp8", options={"policy": policy})
    with interpreted():
        run(torch.randn(32, 256)).sum().backward()
    kept = {record.fqn for record in fp8compile.report(model).matmuls if record.decision != "fp8"}
    assert kept == {"blocks.0.up", "blocks.2.down"}


def _worker(rank: int, reduce_amax: bool) -> dict[tuple[str, str, int], list[float]]:
    torch.manual_seed(0)
    model = nn.Linear(128, 128)
    run = torch.compile(model, backend="fp8", options={"reduce_amax": reduce_amax})
    for step in (1.0, 2.0):
        y = run(torch.full((16, 128), step * (1 + rank)))
        y.backward(torch.full_like(y, step * (4 - rank)))
    return {key: slot.history()[:2] for key, slot in slots_of(model).items()}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("reduce_amax", [False, True])
def test_reduce_amax(tmp_path, reduce_amax: bool) -> None:
    """With `reduce_amax` both processes record the larger of their amaxes; without it each records its own."""
    first, second = on_ranks(2, tmp_path, _worker, reduce_amax)
    own = {"input": ([2.0, 1.0], [4.0, 2.0]), "gradient": ([8.0, 4.0], [6.0, 3.0])}
    for role, (mine, theirs) in own.items():
        both = [max(pair) for pair in zip(mine, theirs, strict=True)]
        key = ("weight", role, 0)
        assert (first[key], second[key]) == ((both, both) if reduce_amax else (mine, theirs))


def test_a_deep_copy_of_a_wrapped_model_is_another_model() -> None:
    """Users copy models under DDP, for example to average weights: a copy starts with its own state."""
    model = build()
    with interpreted():
        torch.compile(model, backend="fp8")(torch.randn(16, 256)).sum().backward()
    assert slots_of(model) and not slots_of(copy.deepcopy(model))
