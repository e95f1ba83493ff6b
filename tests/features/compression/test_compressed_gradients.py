"""Gradients that cross the wire in FP8, under DDP and FSDP2 with gloo, beside the mean in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8compile
from fp8compile.distributed import compress_gradients, fp8_hook
from tests.distributed.ranks import whole
from tests.support.harness import sqnr
from tests.support.processes import on_ranks

SHAPES = {
    "large": (96, 256),
    "odd": (77, 101),
    "tiny_scale": (64, 130),
    "bias": (5000,),
    "small": (8, 8),
    "last": (130, 64),
}


class Given(nn.Module):
    """A model whose gradients are given: those of the sum over parameters of (p * g).sum()."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: dict[str, Tensor], without: tuple[str, ...] = ()) -> Tensor:
        used = [(name, p) for name, p in self.named_parameters() if name not in without]
        return torch.stack([(p * gradients[name]).sum().float() for name, p in used]).sum()


def gradients(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A parameter's gradient is a thousandth of the others'; blocks differ in scale by six decades."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    decades = 6 * torch.rand(SHAPES["last"][0], 1, generator=torch.Generator().manual_seed(9)) - 6
    scales = {"tiny_scale": 1e-3, "last": 10**decades}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: (values * scales.get(name, 1)).to(dtype) for name, values in drawn.items()}


def mean(ranks: int, steps: tuple[int, ...] = (0,), dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    given = [gradients(rank, step, dtype) for rank in range(ranks) for step in steps]
    return {name: sum(one[name].double() for one in given) / ranks for name in SHAPES}  # type: ignore[misc]


@contextmanager
def counted() -> Iterator[Counter[torch.dtype]]:
    """The bytes that this rank sends to others in collectives, by dtype."""
    sent: Counter[torch.dtype] = Counter()
    others = dist.get_world_size() - 1
    part = others / (others + 1)
    shares = {"all_to_all_single": part, "all_reduce": 2 * part}
    shares |= {"all_gather_into_tensor": others, "all_gather_single": others}
    shares |= {"reduce_scatter_tensor": part, "reduce_scatter_single": part}

    def counting(name: str) -> Any:
        stock = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0] if name == "all_reduce" else args[1]
            sent[tensor.dtype] += int(shares[name] * tensor.nbytes)
            return stock(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    with ExitStack() as stack:
        for name in shares:
            if hasattr(dist, name):
                stack.enter_context(counting(name))
        yield sent


def wrapped(kind: str, dtype: torch.dtype = torch.float32, **how: Any) -> tuple[Any, dict[str, nn.Parameter]]:
    """A model whose gradients are compressed, and its parameters."""
    model: Any = Given(dtype)
    parameters = dict(model.named_parameters())
    if kind == "by hand":
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, fp8_hook)
        return model, parameters
    if kind == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=1, **how)
    else:
        ranks = dist.get_world_size()
        names = ("replicate", "shard") if kind == "hsdp" else None
        mesh = init_device_mesh("cpu", (2, ranks // 2) if names else (ranks,), mesh_dim_names=names)
        fully_shard(model, mesh=mesh, **how)
        parameters = dict(model.named_parameters())
    compress_gradients(model)
    return model, parameters


def reduced(rank: int, dtype: torch.dtype, kind: str, options: dict[str, Any]) -> Any:
    """Gradients after a step, and statistics."""
    model, parameters = wrapped(kind, dtype, **options)
    model(gradients(rank, dtype=dtype)).backward()
    stats = fp8compile.stats(model)
    return {name: whole(p.grad) for name, p in parameters.items()}, str(stats), stats.rows()


@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 2), ("ddp", 4), ("fsdp", 2), ("hsdp", 4)])
def test_each_parameter_arrives(kind: str, ranks: int) -> None:
    results = on_ranks(ranks, reduced, torch.float32, kind, {})
    exact = mean(ranks)
    for name in SHAPES:
        found = sqnr(exact[name], results[0][0][name])
        assert found >= (100 if name in ("bias", "small") else 31 if kind == "fsdp" else 28.3), (name, found)
        if kind == "ddp" and name not in ("bias", "small"):
            assert abs(found - 28.8) <= 0.5, (name, found)  # flat in ranks
        for other, *_ in results[1:]:
            assert torch.equal(other[name], results[0][0][name])
    row = results[0][2][0]
    assert row["role"] == "reduced" and 31 < row["sqnr"] < 33
    assert "bucket 0 (4 parameters)" in results[0][1]


def large_ones(rank: int) -> Any:
    layers = [nn.Linear(256, 256, bias=False) for _ in range(3)]
    model = DistributedDataParallel(nn.Sequential(*layers).bfloat16())
    compress_gradients(model)
    with counted() as sent:
        model(torch.randn(4, 256).bfloat16()).square().sum().backward()
    return sent


def test_half_of_the_bytes_of_bf16() -> None:
    sent = on_ranks(4, large_ones)[0]
    assert set(sent) == {torch.uint8}
    assert 0.5 <= sent[torch.uint8] / (2 * 3 / 4 * 3 * 256 * 256 * 2) <= 0.55


AS_THE_POLICY_SAYS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("kind", "dtype", "how"),
    [
        ("fsdp", torch.float16, {}),
        ("by hand", torch.bfloat16, {}),
        ("fsdp", torch.float32, {"mp_policy": AS_THE_POLICY_SAYS}),
    ],
)
def test_gradients_in_other_dtypes(kind: str, dtype: torch.dtype, how: dict[str, Any]) -> None:
    found, *_ = on_ranks(2, reduced, dtype, kind, how)[0]
    exact = mean(2, dtype=dtype)
    for name in ("large", "odd", "tiny_scale", *(SHAPES if how else ())):
        assert sqnr(exact[name], found[name]) >= 27, name


def _given(rank: int, kind: str) -> dict[str, Any]:
    """Gradients that are accumulated, that are missing, and that are not finite on one rank."""
    found: dict[str, Any] = {}
    model, parameters = wrapped(kind, **({"gradient_as_bucket_view": True} if kind == "ddp" else {}))
    with counted() as before:
        if kind == "ddp":
            with model.no_sync():
                model(gradients(rank, 0)).backward()
        else:
            model.set_requires_gradient_sync(False)
            model(gradients(rank, 0)).backward()
            model.set_requires_gradient_sync(True)
    found["silent"] = not before.get(torch.uint8)
    model(gradients(rank, 1)).backward()
    found["accumulated"] = {name: whole(p.grad) for name, p in parameters.items()}

    model, parameters = wrapped(kind, **({"find_unused_parameters": True} if kind == "ddp" else {}))
    for step in range(2):
        for p in model.parameters():
            p.grad = None
        model(gradients(rank, step), ("odd", "bias")).backward()
    found["unused"] = {name: whole(p.grad) for name, p in parameters.items()}

    model, _ = wrapped(kind)
    given = gradients(rank)
    if rank == 1:
        given["large"][3, 5], given["last"][7, 7], given["bias"][2] = float("inf"), float("nan"), float("inf")
    model(given).backward()
    return {**found, "norm": whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0))}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_accumulated_missing_and_infinite_gradients(kind: str) -> None:
    """Accumulation sends once. An infinity of one rank reaches all."""
    first, second = on_ranks(2, _given, kind)
    assert first["silent"] and not first["norm"].isfinite() and not second["norm"].isfinite()
    exact = mean(2, (0, 1))
    assert all(sqnr(exact[name], first["accumulated"][name]) >= 27 for name in SHAPES)
    for name, one in mean(2, (1,)).items():
        if name in ("odd", "bias"):
            assert first["unused"][name] is None or not first["unused"][name].any()
        else:
            assert sqnr(one, first["unused"][name]) >= 27


def fed_back(rank: int, feedback: bool) -> Any:
    """The sum over many steps of gradients of which the same is rounded away each time."""
    model = DistributedDataParallel(Given())
    compress_gradients(model, error_feedback=feedback)
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for _ in range(16):
        model.zero_grad()
        model(gradients(rank, 0)).backward()
        for name, p in model.module.named_parameters():
            total[name] += p.grad / 16
    return total


def test_error_feedback_loses_less_over_steps() -> None:
    found = []
    for feedback in (False, True):
        total = on_ranks(2, fed_back, feedback)[0]
        found.append(sqnr(mean(2)["large"], total["large"]))
    assert found[1] > found[0] + 2, found
