"""All-gathers of a graph that carry FP8: the graph, for a described GPU. (tests/distributed runs them.)"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8compile
from fp8compile.dryrun.fake_gpu import Step, trace
from fp8compile.features.collectives.collectives import CollectiveRecord
from tests.support import hooks
from tests.support.executed import planning
from tests.support.harness import ALL_FP8

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

RANKS, TOKENS, DIM = 2, 512, 256


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    """Two ranks, of which this is the first; the other one is not there."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=RANKS)
    with hooks.ranks_agree():
        yield
    dist.destroy_process_group()


class Exchange(torch.autograd.Function):
    """An all-gather along `dim` or a reduce-scatter, as DTensor does them; each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, gathers: bool) -> Tensor:
        ctx.dim, ctx.gathers = dim, gathers
        return _gather(x, dim) if gathers else _scatter(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _scatter(gradient, ctx.dim) if ctx.gathers else _gather(gradient, ctx.dim), None, None


def _gather(x: Tensor, dim: int) -> Tensor:
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    out = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), RANKS, name))
    return out if dim == 0 else torch.cat(out.split(x.shape[0]), dim)


def _scatter(x: Tensor, dim: int) -> Tensor:
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    whole = x if dim == 0 else torch.cat(x.split(x.shape[dim] // RANKS, dim))
    return ops.wait_tensor(ops.reduce_scatter_tensor(whole.contiguous(), "sum", RANKS, name))


class SequenceParallel(nn.Module):
    """A norm on a shard of the tokens, and an MLP on all of them; a rank has half of its hidden features."""

    def __init__(
        self, dim: int = 1, also: Callable[[Tensor], Tensor] | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM, bias=bias), nn.Linear(2 * DIM, DIM, bias=False)
        self.dim, self.also = dim, also

    def forward(self, x: Tensor) -> Tensor:
        whole = Exchange.apply(self.norm(x), self.dim, True)
        y = Exchange.apply(self.down(self.up(whole).relu()), self.dim, False)
        return y if self.also is None else y + self.also(whole)


def step(model: nn.Module, x: Tensor, **options: Any) -> Step:
    compiled = torch.compile(model, backend="fp8", options={"policy": ALL_FP8, **options})
    return trace(lambda: compiled(x).sum().backward())


def shard(dim: int) -> Tensor:
    """A rank's tokens: [batch, tokens, features] sharded along `dim`."""
    shape = (2, TOKENS // RANKS, DIM) if dim else (TOKENS // RANKS, 2, DIM)
    return torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)


def launches(made: Step) -> list[list[str]]:
    """The generated kernels, matmuls and collectives of forward and backward, in their order."""
    ways = (r"extern_kernels\.(\w+)\(", r"(fp8_\w+)_\w{8}_\d+\.run\(")
    ways += (r"torch\.ops\.(?:_c10d_functional|symm_mem)\.(\w+)\.default\(",)
    call = re.compile(rf"\b(?:{'|'.join(ways)})")
    return [[next(filter(None, match)) for match in call.findall(graph.code)] for graph in made.graphs]


def cast(recipe: str) -> tuple[str, str]:
    """The kernels that write the FP8 copy of a rank's part, in forward and in backward."""
    if recipe == "delayed":
        return "fp8_pow_mean_add_rsqrt_cast_amax", "fp8_cast_amax"
    return "fp8_mul_cast", "fp8_cast"


@functools.cache
def made_by(recipe: str, dim: int) -> Step:
    return step(SequenceParallel(dim).bfloat16(), shard(dim), recipe=recipe)


@pytest.mark.slow
@planning
@pytest.mark.parametrize(("recipe", "dim"), [("delayed", 1), ("tensorwise", 0)])
def test_what_a_gpu_sends(recipe: str, dim: int) -> None:
    """FP8 itself, which NCCL can send. The part is cast in the kernel of its producer, right before it is
    gathered; nothing of the whole tensor is cast, and all matmuls are FP8."""
    made = made_by(recipe, dim)
    shape = str(tuple(shard(dim).shape))
    for graph, order, kernel, dtype in zip(
        made.graphs, launches(made), cast(recipe), ("e4m3fn", "e5m2"), strict=True
    ):
        gather = order.index("all_gather_into_tensor")
        assert order.count("all_gather_into_tensor") == 1 and kernel in order[:gather]
        assert "_scaled_mm" not in order[:gather] and "mm" not in order
        sent = re.search(r"all_gather_into_tensor\.default\((?:reinterpret_tensor\()?(\w+)", graph.code)
        assert sent is not None
        assert re.search(
            rf"{sent[1]} = empty_strided_cuda\(\([\d, ]+\), \([\d, ]+\), torch\.float8_{dtype}\)", graph.code
        )
        assert shape in graph.code
    assert [order.count("_scaled_mm") for order in launches(made)] == [2, 4]


@planning
def test_an_all_reduce_of_amaxes_is_waited_for_at_the_end() -> None:
    """The first all-reduce agrees on scales, the second one is for the state: kernels run between its start
    and its wait."""
    for order in launches(made_by("delayed", 1)):
        last = len(order) - 1 - order[::-1].index("all_reduce_")
        behind = order[last + 1 :]
        assert order.count("all_reduce_") == 2
        assert "_scaled_mm" in behind[: behind.index("wait_tensor")] or "reduce_scatter_tensor" in behind


@pytest.mark.slow
@planning
@pytest.mark.parametrize(("recipe", "dim"), [("delayed", 0), ("tensorwise", 1)])
def test_async_tensor_parallelism_finds_the_matmuls(recipe: str, dim: int) -> None:
    """With `_micro_pipeline_tp`, Inductor fuses each gather with the FP8 matmul after it, and a matmul with
    the reduce-scatter after it. (These run on NCCL and symmetric memory only. Here Inductor is told that
    there are both.)"""
    model = SequenceParallel(dim).bfloat16()
    with ExitStack() as stack:
        stack.enter_context(mock.patch("torch.distributed.is_nccl_available", return_value=True))
        stack.enter_context(
            mock.patch("torch.distributed._symmetric_memory.is_symm_mem_enabled_for_group", return_value=True)
        )
        made = step(model, shard(dim), recipe=recipe, _micro_pipeline_tp=True)
    for order, left, kernel in zip(launches(made), (0, 2), cast(recipe), strict=True):
        assert order.count("fused_all_gather_scaled_matmul") == 1
        assert order.count("fused_scaled_matmul_reduce_scatter") == 1
        assert order.count("_scaled_mm") == left and kernel in order
        assert not {"all_gather_into_tensor", "reduce_scatter_tensor", "mm"} & {*order}
    # casts after what Inductor has fused are ours
    assert any("cast_transpose" in kernel for kernel in launches(made)[1])


# -- what is moved, and what is not --


def records(model: nn.Module, x: Tensor, **options: Any) -> list[CollectiveRecord]:
    with hooks.traced():
        torch.compile(model, backend="fp8", options=options)(x).sum().backward()
    return [record for graph in fp8compile.report(model).graphs for record in graph.collectives]


def small(**how: Any) -> tuple[nn.Module, Tensor]:
    return SequenceParallel(**how), torch.randn(2, 32, DIM, requires_grad=True)


def test_bytes_and_names() -> None:
    part = 2 * 32 * DIM
    expected = [CollectiveRecord(name, part, 4 * part) for name in ("up (input)", "down (gradient)")]
    model, x = small()
    assert records(model, x) == expected
    assert "read from other ranks" in str(fp8compile.report(model))
    page = fp8compile.report(model).to_html()
    assert "Read from other ranks" in page
    assert f'<td class="n">{4 * part:,}</td><td class="n">{part:,}</td>' in page


@pytest.mark.parametrize(
    ("how", "options", "reasons"),
    [
        ({"also": lambda whole: whole[:, :32].sin()}, {}, ["also read by aten.slice.Tensor", ""]),
        ({}, {"recipe": "rowwise"}, ["recipe 'rowwise' has more than one scale per tensor"] * 2),
        (
            {},
            {"policy": {"rules": [{"gemm": "wgrad", "fp8": "off"}]}},
            [
                "also read by up wgrad in high precision: policy",
                "also read by down wgrad in high precision: policy",
            ],
        ),
    ],
    ids=["another reader", "rowwise", "wgrad in high precision"],
)
def test_why_not(how: dict[str, Any], options: dict[str, Any], reasons: list[str]) -> None:
    """A gather whose result is also read in high precision would send more bytes with one in FP8."""
    model, x = small(**how)
    found = records(model, x, **options)
    for record, reason in zip(found, reasons, strict=True):
        assert record.reason.startswith(reason) and bool(record.reason) is bool(reason)
    assert all((record.bytes == record.before) is bool(record.reason) for record in found)


def test_evaluation_gathers_in_high_precision() -> None:
    model, x = small()
    with hooks.traced(), torch.no_grad():
        torch.compile(model.eval(), backend="fp8")(x)
    assert not [record for graph in fp8compile.report(model).graphs for record in graph.collectives]


@pytest.mark.slow
def test_dynamic_shapes() -> None:
    """Also with a number of tokens that is not known, and not divisible by 16: wgrad's copy is padded."""
    model = SequenceParallel(dim=1)
    compiled = torch.compile(model, backend="fp8", dynamic=True)
    with hooks.interpreted():
        for tokens in (33, 47):
            x = torch.randn((2, tokens, DIM), requires_grad=True)
            compiled(x).sum().backward()
            assert x.grad is not None and x.grad.shape == x.shape
    graphs = fp8compile.report(model).graphs
    assert len(graphs) == 1 and len(graphs[0].matmuls) == 6
    found = {r.tensor: r.reason for r in graphs[0].collectives}
    assert found == {"up (input)": "", "down (gradient)": ""}
