"""Weights that were gathered in FP8: what FP8 matmuls read of them, and what everything else does.
(tests/distributed has the all-gather itself.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.config.recipe import Block
from fp8compile.ir import ops
from fp8compile.ir.gathered_weight import GatheredWeight
from fp8compile.ir.scale import inverse_of, scale_of
from tests.support import hooks

pytestmark = pytest.mark.usefixtures("interpreted")

E4M3, MAX = torch.float8_e4m3fn, 448.0


class Layer(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def gathered(
    rows: int = 128, columns: int = 256, dtype: torch.dtype = torch.float32
) -> tuple[GatheredWeight, torch.Tensor, torch.Tensor]:
    """A weight whose scale is not that of its amax, so that a second cast would show."""
    torch.manual_seed(0)
    weight = torch.randn(rows, columns) / 16
    scale = scale_of(weight.abs().amax().reshape(1) * 1.37, MAX, 0)
    data, inverse = ops.quantize(weight, scale, E4M3, MAX, False), inverse_of(scale)
    return GatheredWeight(data, inverse, dtype), data, inverse


def of_blocks(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> GatheredWeight:
    """A weight with scales of blocks that are not those of the blocks' amaxes."""
    torch.manual_seed(0)
    weight = (torch.randn(rows, columns) * torch.logspace(-3, 3, columns)).to(dtype)
    blocks = [128, 128]
    scale = scale_of(ops.amax_blocks(weight, False, blocks) * 2.5, MAX, 0, True)
    return GatheredWeight(
        ops.quantize(weight, scale, E4M3, MAX, False, blocks), inverse_of(scale), dtype, block=Block(*blocks)
    )


def cast(x: torch.Tensor, dtype: torch.dtype, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    scale = scale_of(x.abs().amax().reshape(1), largest, 0)
    return ops.quantize(x, scale, dtype, largest, False), inverse_of(scale)


def in_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values and inverses of scales of 1 x 128 elements."""
    block = [1, 128]
    scale = scale_of(ops.amax_blocks(x, False, block), MAX, 0, True)
    return ops.quantize(x, scale, E4M3, MAX, False, block), inverse_of(scale)


SLOW, COMPILED = [pytest.mark.slow], [pytest.mark.compiled, pytest.mark.slow]


@pytest.mark.parametrize(
    ("recipe", "columns", "recast"),
    [
        pytest.param("tensorwise", 256, False, marks=SLOW),
        pytest.param("tensorwise", 256, True, marks=SLOW),
        ("blockwise", 256, False),
        pytest.param("blockwise", 320, False, marks=SLOW),  # the last block of a row is a part
        pytest.param("blockwise", 320, False, marks=COMPILED, id="compiled"),
    ],
)
def test_fp8_matmuls_read_what_was_gathered(recipe: str, columns: int, recast: bool) -> None:
    """fprop and dgrad, bitwise, from the gathered bytes: nothing is cast again. dgrad reads the transposed
    bytes, and scales of blocks are transposed, too."""
    of_one = recipe == "tensorwise"
    weight = gathered(384, columns)[0] if of_one else of_blocks(384, columns)
    data, inverse = weight.data_, weight.inv_
    layer, x = Layer(weight), torch.randn(64, columns, requires_grad=True)
    layer.compile(backend="fp8", options={"recipe": recipe, "recast_weights": recast, "strict": True})
    y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    turned, F32 = data.t().contiguous(), torch.float32
    if of_one:
        (x8, x_inverse), (dy8, dy_inverse) = cast(x.detach(), E4M3, MAX), cast(dy, torch.float8_e5m2, 57344.0)
        expected = ops.scaled_mm(x8, data, x_inverse, inverse, None, F32, True)
        gradient = ops.scaled_mm(dy8, turned, dy_inverse, inverse, None, F32, False)
    else:
        (x8, x_inverse), (dy8, dy_inverse) = in_rows(x.detach()), in_rows(dy)
        last = (F32, False, [1, 128], [128, 128])
        assert inverse.shape == (3, -(-columns // 128)) and inverse.unique().numel() > 2
        expected = ops.block_mm(x8, data, x_inverse, inverse, None, *last)
        gradient = ops.block_mm(dy8, turned, dy_inverse, inverse.t(), None, *last)
        assert torch.equal(weight + 0, data.float() * ops.spread(inverse, data.shape, [128, 128]))
    assert torch.equal(y, expected) and torch.equal(x.grad, gradient)
    assert fp8compile.report(layer).fp8_flop_fraction == 1
    assert type(layer.weight.grad) is torch.Tensor and layer.weight.grad.dtype == F32


def trained(weight: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """A step: the output, and the gradients of the input and of the weight."""
    layer = Layer(weight)
    torch.manual_seed(1)
    x = torch.randn(64, 256, requires_grad=True)
    layer.compile(backend="fp8", options={"strict": True, **options})
    y = layer(x)
    y.square().mean().backward()
    assert fp8compile.report(layer).fp8_flop_fraction == 1
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("blocks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_weight_decides_how_it_is_scaled(blocks: bool) -> None:
    """Bytes with a scale a block, or with one for all, are multiplied as they are, whatever the recipe."""
    weight = of_blocks(128, 256) if blocks else gathered()[0]
    other, own = ("tensorwise", "blockwise") if blocks else ("rowwise", "rowwise")
    results = [trained(weight, recipe=other), trained(weight, recipe=own, weight_tiles=not blocks)]
    for one, same in zip(*results, strict=True):
        assert torch.equal(one, same)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_weight_that_arrives_in_fp8_is_charged_no_cast(recipe: str) -> None:
    """In the cost model: fprop reads it as it is, dgrad transposes it."""
    made = of_blocks if recipe == "blockwise" else lambda *sizes: gathered(*sizes)[0]
    weight, found = made(1024, 512, torch.bfloat16), []
    for given in (weight, weight + 0):
        torch._dynamo.reset()
        layer, x = Layer(given), torch.randn(64, 512, dtype=torch.bfloat16, requires_grad=True)
        step = torch.compile(layer, backend="fp8", options={"recipe": recipe, "device": "h200"})
        with hooks.traced():
            step(x).sum().backward()
        found.append({record.gemm: record.cast_us for record in fp8compile.report(layer).matmuls})
    arrives, cast = found
    assert arrives["fprop"] < cast["fprop"] and arrives["dgrad"] < cast["dgrad"]


def test_everything_else_reads_what_fp8_left_of_it() -> None:
    """Eager code, other backends, and graphs in high precision. Only eager reads are told."""
    weight, data, inverse = gathered()
    values = data.float() * inverse
    said: list[str] = []
    told = nn.Parameter(GatheredWeight(data, inverse, torch.float32, said.append))
    x = torch.randn(16, 256)
    assert said == [] and torch.equal(told + 1, values + 1) and said == ["aten.add.Tensor"]
    linear = torch.compile(nn.functional.linear, backend="fp8")
    with torch.no_grad():
        assert torch.equal(linear(x, told), nn.functional.linear(x, values))
    eager = torch.compile(nn.functional.linear, backend="aot_eager")
    assert torch.equal(eager(x, told), nn.functional.linear(x, values))
    assert said == ["aten.add.Tensor"]
