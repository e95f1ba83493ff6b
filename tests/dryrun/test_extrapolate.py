"""Which blocks of a deep model are compiled, how they count, and what is decided about them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.dryrun.explain import traced
from fp8compile.dryrun.extrapolate import FULL, Choices, judged, repeated, samples
from tests.support import models
from tests.support.harness import ALL_FP8

COUNT = 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.up(x))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(128, 128)
        self.layers = nn.ModuleList(Block() for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_each_three_blocks_in_a_row_count_as_often_as_they_occur() -> None:
    """Whatever the kinds are."""
    draw, fewer = random.Random(0), 0
    costs = {row: draw.random() for row in itertools.product("<abc>", repeat=3)}

    def cost(blocks: Iterable[str]) -> float:
        row = ["<", *blocks, ">"]
        return sum(costs[three] for three in zip(row, row[1:], row[2:], strict=False))

    for _ in range(300):
        kinds = [kind for _ in range(draw.randint(1, 6)) for kind in draw.choice("abc") * draw.randint(1, 20)]
        made = samples(kinds)
        total = sum(times * cost(kinds[i] for i in order) for order, times in made)
        assert total == pytest.approx(cost(kinds)), kinds
        assert sum(len(order) for order, _ in made) <= len(kinds)
        fewer += len(made) > 1
    assert fewer > 100
    assert samples("abbbbbbbbc") == [((0, 1, 2, 9), -5), ((0, 1, 2, 3, 9), 6)]
    assert samples("aaaaaaaa") == [((0, 1), -5), ((0, 1, 2), 6)]
    assert samples("abababab") == [(tuple(range(8)), 1)]


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"policy": {"rules": [{"blocks": ["first 1", "last 1"], "fp8": "off"}]}}, 5),
        ({"policy": {"rules": [{"layers": "last 2", "margin": 1}]}}, 5),
        ({"exclude": ["layers.9"]}, 4),
        ({"policy": lambda module, name: name != "layers.8.up"}, 5),
    ],
    ids=["blocks", "layers", "a number", "a function"],
)
def test_a_block_is_treated_as_in_the_whole_model(options: Mapping[str, Any], most: int) -> None:
    model, x = models.make(Deep), torch.randn(32, 128)
    blocks = repeated([model])
    assert blocks is not None and blocks.name == "layers"
    choices = Choices(blocks)
    report = traced(model, (x,), {}, options, judged(choices.note))
    made = samples(blocks.kinds(report.matmuls))
    assert max(len(order) for order, _ in made) == most
    whole = {(r.fqn, r.gemm): (r.decision, r.reason, r.rule, r.overrides) for r in report.matmuls}
    for order, _ in made:
        with blocks.only(order):
            part = traced(model, (x,), {}, options, judged(choices.repeat(order)))
        assert len(part.matmuls) == 2 + 3 * len(order)
        for r in part.matmuls:
            expected = whole[blocks.moved(r.fqn, order), r.gemm]
            assert (r.decision, r.reason, r.rule, r.overrides) == expected, (order, r.fqn)
    assert len(model.layers) == COUNT


def test_blocks_whose_weights_are_cast_again_are_no_other_kind() -> None:
    model = models.make(Deep)
    blocks = repeated([model])
    assert blocks is not None
    records = traced(model, (torch.randn(32, 128),), {}, {"policy": ALL_FP8}).matmuls
    lines = {"layers.3.up": (f"recast_weights=True: {FULL}",), "layers.9.up": ("margin=1: rule 1",)}
    changed = [replace(x, overrides=lines.get(x.fqn, ())) for x in records]
    kinds = blocks.kinds(changed)
    assert len({*kinds[:-1]}) == 1 and kinds[-1] != kinds[0]
