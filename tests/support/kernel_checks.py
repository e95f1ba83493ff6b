"""Compares a kernel's results with the operators': bit by bit, to one FP8 value, or to a sum's rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from .groups import ALWAYS, FOR_EXACT_SUMS, Case, Made
from .interpreter import BITS

aten = torch.ops.aten


def bits(x: Tensor) -> Tensor:
    """A tensor's bytes, with every NaN replaced by the same NaN."""
    if not x.dtype.is_floating_point:
        return x
    return torch.where(x.isnan(), -1, x.contiguous().view(BITS[x.element_size()]).to(torch.int64))


def assert_bits(expected: Tensor, got: Tensor, where: str) -> None:
    wrong = (bits(expected) != bits(got)).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        pytest.fail(
            f"{where}: {len(wrong)} of {got.numel()} differ; at {at} {expected[at].item()} became "
            f"{got[at].item()}"
        )


def assert_within_one(expected: Tensor, got: Tensor, where: str) -> None:
    """Each pair of FP8 values is equal or adjacent; NaNs are at the same places."""
    assert torch.equal(expected.isnan(), got.isnan()), f"{where}: NaN elsewhere"
    order = []
    for x in (expected, got):
        code = x.view(torch.uint8).to(torch.int32)
        order.append(torch.where(code >= 128, 128 - code, code).masked_fill(x.isnan(), 0))
    apart = (order[0] - order[1]).abs().max().item() if got.numel() else 0
    assert apart <= 1, f"{where}: {apart} FP8 values apart"


def assert_close(expected: Tensor, got: Tensor, floor: Tensor | float, where: str) -> None:
    """The difference is at most two units in the last place, plus the error of float32 sums of size `floor`
    in another order.

    Values that are not finite are at the same places.
    """
    finite, size = expected.isfinite(), max(2 * torch.finfo(expected.dtype).eps, 2.0**-18)
    a, b = expected.to(torch.float64), got.to(torch.float64)
    assert torch.equal(finite, b.isfinite()), f"{where}: not finite elsewhere"
    excess = ((a - b).abs() - size * a.abs() - 2.0**-20 * floor)[finite]
    assert not (excess > 0).any(), f"{where}: off by {excess.max().item()}"


class Weights(Interpreter):
    """Runs the oracle, and notes the sum of magnitudes of each sum, to which its rounding is relative."""

    def __init__(self, gm: GraphModule):
        super().__init__(gm)
        self.noted: dict[Node, Tensor] = {}

    def run_node(self, node: Node) -> Any:
        if node.target is aten.sum.dim_IntList:
            source: Any = node.args[0]
            self.noted[node] = self.env[source].to(torch.float64).abs().sum(node.args[1])
        return super().run_node(node)

    def of(self, output: int) -> Tensor:
        node: Any = next(iter(self.module.graph.find_nodes(op="output"))).args[0][output]  # type: ignore[union-attr]
        while node not in self.noted:
            node = node.args[0]
        return self.noted[node]


def assert_sum(expected: Tensor, got: Tensor, weight: Tensor, where: str) -> None:
    assert torch.equal(expected.isnan() & weight.isnan(), got.isnan() & weight.isnan()), (
        f"{where}: NaN elsewhere"
    )
    assert not got[weight.isinf()].isfinite().any(), f"{where}: an infinite term is lost"
    # larger sums overflow or not, depending on the order of the terms
    fits = weight < torch.finfo(expected.dtype).max / 2
    assert_close(expected[fits], got[fits], weight[fits], where)


def layout(x: Tensor) -> list[int]:
    """Strides of the dimensions with more than one element."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1] if x.numel() else []


def check(case: Case, made: Made, inputs: tuple, data: str) -> None:
    """Compares the results of a fused graph on these inputs with the oracle's."""
    weights = Weights(made.oracle)
    with torch.no_grad():
        expected = weights.run(*inputs)
        got = made.fused(*inputs)
    exact = case.exact == ALWAYS or case.exact == FOR_EXACT_SUMS and data == "exact"
    assert len(expected) == len(got) == len(case.roles)
    values = None
    for i, (role, a, b) in enumerate(zip(case.roles, expected, got, strict=True)):
        where = f"{data}, result {i} ({role})"
        assert (a.shape, a.dtype) == (b.shape, b.dtype), where
        assert layout(a) == layout(b) or role in ("amax", "other"), where
        if role == "sum" and not (exact and data == "exact"):
            assert_sum(a, b, weights.of(i), where)
        elif exact:
            assert_bits(a, b, where)
        elif role in ("copy", "transposed", "alone"):
            assert_within_one(a, b, where)
        else:
            finite = a.to(torch.float64).nan_to_num(0.0, 0.0, 0.0).abs()
            floor = 1e5 if data == "moderate" else 16.0
            if role == "value" and a.numel():
                floor = finite.amax(-1, keepdim=True)
            assert_close(a, b, floor, where)
        if role == "transposed":
            rows = got[i - 1].shape[0]
            assert b.shape == (got[i - 1].shape[1], max(16, -(-rows // 16) * 16)), where
            assert torch.equal(got[i - 1].view(torch.uint8), b[:, :rows].t().view(torch.uint8)), (
                f"{where}: of the copy"
            )
            assert not b[:, rows:].view(torch.uint8).any(), f"{where}: padding"
        if role == "value" and b.dtype != torch.bool:
            values = b
        if role == "amax" and values is not None:
            amax = values.to(torch.float32).abs().amax().reshape(1) if values.numel() else b * 0
            assert_bits(amax, b, f"{where}: of values")
