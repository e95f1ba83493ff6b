"""Weights that were gathered in FP8: what FP8 matmuls read of them, and what everything else does. (tests/distributed has the
all-gather itself.)"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.ir import ops
from fp8compile.ir.gathered import GatheredWeight
from fp8compile.ir.scale import inverse_of, scale_of
from tests.support.harness import interpreted

E4M3, MAX = torch.float8_e4m3fn, 448.0


class Layer(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def gathered(rows: int = 128, columns: int = 256) -> tuple[GatheredWeight, torch.Tensor, torch.Tensor]:
    """A weight whose scale is not that of its amax, so that a second cast would show."""
    torch.manual_seed(0)
    weight = torch.randn(rows, columns) / 16
    scale = scale_of(weight.abs().amax().reshape(1) * 1.37, MAX, 0)
    data, inverse = ops.quantize(weight, scale, E4M3, MAX, False), inverse_of(scale)
    return GatheredWeight(data, inverse, torch.float32), data, inverse


def cast(x: torch.Tensor, dtype: torch.dtype, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    scale = scale_of(x.abs().amax().reshape(1), largest, 0)
    return ops.quantize(x, scale, dtype, largest, False), inverse_of(scale)


@pytest.mark.parametrize("recast", [False, True])
def test_fp8_matmuls_read_what_was_gathered(recast: bool) -> None:
    """fprop and dgrad, to the bit, from the gathered bytes: nothing is cast again."""
    weight, data, inverse = gathered()
    layer = Layer(weight)
    x = torch.randn(64, 256, requires_grad=True)
    torch._dynamo.reset()
    with interpreted():
        layer.compile(backend="fp8", options={"recipe": "tensorwise", "recast_weights": recast, "strict": True})
        y = layer(x)
        dy = torch.randn_like(y)
        y.backward(dy)
    x8, x_inverse = cast(x.detach(), E4M3, MAX)
    assert torch.equal(y, ops.scaled_mm(x8, data, x_inverse, inverse, None, torch.float32, True))
    dy8, dy_inverse = cast(dy, torch.float8_e5m2, 57344.0)
    transposed = data.t().contiguous()
    assert torch.equal(x.grad, ops.scaled_mm(dy8, transposed, dy_inverse, inverse, None, torch.float32, False))
    assert fp8compile.report(layer).fp8_flop_fraction == 1
    assert type(layer.weight.grad) is torch.Tensor and layer.weight.grad.dtype == torch.float32


def test_everything_else_reads_what_fp8_left_of_it() -> None:
    """Eager code, other backends, and graphs in high precision. Only eager reads are told."""
    weight, data, inverse = gathered()
    values = data.float() * inverse
    said: list[str] = []
    told = nn.Parameter(GatheredWeight(data, inverse, torch.float32, said.append))
    x = torch.randn(16, 256)
    torch._dynamo.reset()
    assert said == [] and torch.equal(told + 1, values + 1) and said == ["aten.add.Tensor"]
    with interpreted():
        linear = torch.compile(nn.functional.linear, backend="fp8")
        with torch.no_grad():
            assert torch.equal(linear(x, told), nn.functional.linear(x, values))
    eager = torch.compile(nn.functional.linear, backend="aot_eager")
    assert torch.equal(eager(x, told), nn.functional.linear(x, values))
    assert said == ["aten.add.Tensor"]


def test_a_matmul_that_wants_another_cast_casts_what_fp8_left_of_it() -> None:
    """A recipe with a scale a row cannot read bytes that have one scale."""
    weight, data, inverse = gathered()
    results = []
    for given in (weight, data.float() * inverse):
        layer = Layer(given)
        torch._dynamo.reset()
        torch.manual_seed(1)
        x = torch.randn(64, 256, requires_grad=True)
        with interpreted():
            layer.compile(backend="fp8", options={"recipe": "rowwise", "strict": True})
            y = layer(x)
            y.square().mean().backward()
        assert fp8compile.report(layer).fp8_flop_fraction == 1
        results.append((y.detach(), x.grad, layer.weight.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
