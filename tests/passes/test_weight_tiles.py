"""`weight_tiles`: a scale for 32 x 32 elements of a weight with mxfp8. fprop and dgrad share FP8 values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.ir import grouped, ops
from tests.passes.test_recipes import TILES, blocks_of, count, graphs
from tests.support import hooks
from tests.support.harness import grads_of, noise
from tests.support.models import Experts, make

pytestmark = pytest.mark.usefixtures("interpreted")

E4M3 = torch.float8_e4m3fn


class Experts4(nn.Module):
    """Four experts, with ends that are fixed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = Experts(128, 128, 4).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, torch.tensor([30, 30, 100, 128], dtype=torch.int32))


def tokens(seed: int = 0) -> Tensor:
    return noise(128, 128, seed=seed, dtype=torch.bfloat16).requires_grad_()


# -- a linear --


def test_both_directions_multiply_the_same_values():
    seen: list[tuple[Tensor, Tensor]] = []

    def product(call: Callable[..., Any], operator: Any, args: tuple, kwargs: dict) -> Any:
        if operator is ops.block_mm and tuple(args[-1]) == (32, 32):
            seen.append((args[1], args[3]))
        return call(operator, args, kwargs)

    # no multiples of 32
    model, x = make(lambda: nn.Linear(144, 272, bias=False)), noise(48, 144).requires_grad_()
    with hooks.through(product):
        step = torch.compile(model, backend="fp8", options=TILES)
        step(x).square().sum().backward()
    (w8, inverse), (turned, inverse_turned) = seen
    assert torch.equal(w8.view(torch.uint8), turned.view(torch.uint8).t())
    assert torch.equal(inverse, inverse_turned.t())
    assert w8.shape == (272, 144) and inverse.shape == (9, 5)
    values = ops.values(w8, inverse, torch.float32, [32, 32])
    assert (values - model.weight).abs().max() <= model.weight.abs().max() / 16


# -- experts --


@functools.cache
def of_experts(**options: Any) -> tuple[dict[str, Tensor], tuple[torch.fx.Graph, torch.fx.Graph]]:
    model, x = Experts4(), tokens()
    made = graphs(model, x, **{**TILES, **options})
    return {**grads_of(model), "dx": x.grad}, (made[0], made[1])


def kept_in_fp8(backward: torch.fx.Graph) -> list[int]:
    """The sizes of the FP8 tensors that a backward gets."""
    inputs = [node.meta["val"] for node in backward.find_nodes(op="placeholder")]
    return [x.numel() for x in inputs if isinstance(x, Tensor) and x.dtype == E4M3]


@pytest.mark.slow
def test_one_copy_of_an_experts_weight_on_blackwell():
    """sm_100 reads it along either dimension. Elsewhere, and with 1 x 32 blocks, there are two."""
    expected, (forward, _) = of_experts(recast_weights=False)
    assert count(forward, ops.quantize_both) >= 2
    stacks = (4 * 256, 128), (4 * 128, 128)
    sizes = {4 * 256 * 128, 4 * 128 * 128}
    for key, copies in (("b200", 1), ("rtx5090", 2), ("h100", 2)):
        got, (forward, backward) = of_experts(recast_weights=False, device=key)
        assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)
        casts = forward.find_nodes(op="call_function", target=ops.quantize)
        weights = [node for node in casts if tuple(node.meta["val"].shape) in stacks]
        assert len(weights) == (2 if copies == 1 else 0), key
        kept = kept_in_fp8(backward)
        # either one: the copy that dgrad reads
        assert sizes <= set(kept) and sum(size in sizes for size in kept) == 2, key
        assert count(backward, grouped.grouped_mm) == 4 and [32, 32] not in blocks_of(backward)


def test_experts_that_are_cast_again():
    expected, _ = of_experts(recast_weights=False)
    got, (forward, backward) = of_experts(recast_weights=True, device="b200")
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert not {*kept_in_fp8(backward)} & {4 * 256 * 128, 4 * 128 * 128}


@pytest.mark.feature("weight_cache")
def test_cached_copies_of_experts_take_half_the_memory():
    cached = []
    for key in ("b200", "h100"):
        model, options = Experts4(), {**TILES, "cache_weights": True, "device": key}
        torch._dynamo.reset()
        with hooks.traced(), hooks.bytes_of_copies() as found:
            torch.compile(model, backend="fp8", options=options)(tokens()).sum().backward()
        cached.append(sum(found))
    parameters = sum(p.numel() for p in model.parameters())
    scales = 4 * parameters // 1024  # float32; for one layout, of which the other is a view
    assert cached == [parameters + scales, 2 * parameters + scales]


def test_sides_that_are_no_multiples_of_32_stay_in_high_precision():
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(noise(2, 144, 128, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            ends = torch.tensor([60, 128], dtype=torch.int32)
            return nn.functional.grouped_mm(x, self.up.transpose(1, 2), offs=ends)

    model = Narrow()
    with hooks.traced():
        torch.compile(model, backend="fp8", options=TILES)(tokens()).sum().backward()
    reasons = {record.reason for record in fp8compile.report(model).matmuls if record.gemm != "wgrad"}
    assert reasons == {"not a multiple of 32: 144 x 128, the blocks of an expert's weight"}
