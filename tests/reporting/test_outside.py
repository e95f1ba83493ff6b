"""A model's report says what of it is in no compiled graph: the percentage is of what was compiled."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.reporting.outside import OutsideRecord
from fp8compile.reporting.report import Report
from tests.support.harness import noise

pytestmark = pytest.mark.usefixtures("interpreted")


class Layer(nn.Module):
    """A layer that Dynamo cannot trace if `breaks`."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(128, 256), nn.Linear(256, 128), nn.LayerNorm(128)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            return self.eager(x)
        return self.norm(x + self.down(self.up(x).relu()))

    @torch._dynamo.disable
    def eager(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(self.up(x).relu()))


class Net(nn.Module):
    def __init__(self, *breaks: bool) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(16, 128), nn.ModuleList(map(Layer, breaks))
        self.positions, self.scale = nn.Parameter(torch.zeros(8, 128)), nn.Parameter(torch.ones(1, 128))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


TOKENS = torch.zeros(4, 8, dtype=torch.int64)


def names(report: Report) -> list[str]:
    return [record.parameter for record in report.outside]


@pytest.mark.slow
def test_what_dynamo_leaves_to_eager() -> None:
    model = Net(False, True, True)
    explained = fp8compile.explain(model, TOKENS)
    torch.compile(model, backend="fp8")(TOKENS).sum().backward()
    report = fp8compile.report(model)
    assert names(explained) == names(report) and "of what was compiled" in explained.summary()
    assert names(report) == [f"layers.{i}.{last}.weight" for i in (1, 2) for last in ("up", "down")]
    assert report.outside[0] == OutsideRecord("layers.1.up", "Linear", "layers.1.up.weight", 256, 128)
    why = "outside of what was compiled, left to eager by Dynamo, or not called yet"
    assert report.summary() == (
        "6 of 6 matmuls, 100.0% of matmul FLOPs of what was compiled; "
        f"in no compiled graph: 4 linears (layers.1-2.up, layers.1-2.down): {why}"
    )
    assert "layers.1-2.up.weight (x2)  " in str(report) and str(report).endswith(f"* {why}")
    data = json.loads(json.dumps(report.to_dict()))["outside"]
    assert data == [dataclasses.asdict(record) for record in report.outside]
    assert names(fp8compile.report()) == []  # of no model in particular


@pytest.mark.slow
def test_blocks_that_are_compiled_one_by_one() -> None:
    """Their code is one graph, called with the parameters of each."""
    model = Net(False, False, False)
    for layer in model.layers[:2]:
        layer.compile(backend="fp8")
    model(TOKENS).sum().backward()
    assert names(fp8compile.report(model)) == ["layers.2.up.weight", "layers.2.down.weight"]
    assert names(fp8compile.report(model.layers[0])) == []


@pytest.mark.slow
def test_evaluation_and_frozen_parts() -> None:
    """A graph for evaluation reads the weights, too. So does one of a part that has no gradients."""
    model, frozen = Net(False), Net(False)
    with torch.no_grad():
        torch.compile(model, backend="fp8")(TOKENS)
    assert names(fp8compile.report(model)) == []
    frozen.layers[0].requires_grad_(False)
    torch.compile(frozen, backend="fp8")(TOKENS).sum().backward()
    assert names(fp8compile.report(frozen)) == []


@pytest.mark.slow
def test_tied_weights_are_one() -> None:
    """Of a weight with two names nobody can tell which is not read; where neither is, it is listed once."""
    model = Net(False, True)
    model.layers[1].down.weight = nn.Parameter(torch.zeros(128, 256))
    model.layers[1].extra = nn.Linear(256, 128)
    model.layers[1].extra.weight = model.layers[1].down.weight
    model.layers[1].up.weight = model.layers[0].up.weight
    torch.compile(model, backend="fp8")(TOKENS).sum().backward()
    assert names(fp8compile.report(model)) == ["layers.1.down.weight"]


@pytest.mark.slow
def test_weights_of_other_modules() -> None:
    """What multiplies need not be a linear."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.attention = nn.Linear(128, 128), nn.MultiheadAttention(128, 4, batch_first=True)
            self.projection, self.conv = nn.Parameter(torch.eye(128)), nn.Conv1d(128, 128, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.eager(self.first(x))

        @torch._dynamo.disable
        def eager(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv((self.attention(x, x, x)[0] @ self.projection).mT)

    model = Odd()
    torch.compile(model, backend="fp8")(noise(2, 16, 128)).sum().backward()
    report = fp8compile.report(model)
    assert names(report) == ["projection", "attention.in_proj_weight", "attention.out_proj.weight"]
    weights = "projection, attention.in_proj_weight, attention.out_proj"
    assert f"in no compiled graph: 3 weights ({weights})" in report.summary()
