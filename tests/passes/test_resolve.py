"""`resolve`: the settings that run are those of all layers, but for overrides, each of which is told."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import fp8compile
from fp8compile import Recipe
from fp8compile.config.recipe import ROW, WHOLE, Block
from fp8compile.passes.resolve import OVERRIDES, Facts, settle
from tests.support import hooks
from tests.support.models import SwiGlu, make
from tests.support.operands import B200, MI300X
from tests.support.reference_settings import RECIPES

PLAIN = Facts(None, ("input", "weight"))
FLAGS = [field.name for field in fields(Facts) if field.type == "bool"]
HELD = (WHOLE, Block(1, 0), Block(128, 128), Block(32, 32))  # of weights that are held in FP8


@pytest.mark.parametrize("name", RECIPES)
def test_a_change_is_told_and_nothing_else_is(name: str) -> None:
    """Of each fact alone, and of all together."""
    recipe = Recipe(name)
    assert settle(recipe, PLAIN) == (recipe, ())
    for flags in (*([flag] for flag in FLAGS), FLAGS):
        given = replace(PLAIN, **dict.fromkeys(flags, True))
        found, lines = settle(replace(recipe, frozen="high_precision"), given)
        assert bool(lines) is (found != recipe), (flags, lines)
        assert all(line.split("=")[0] in ("recipe", *(f.name for f in fields(Recipe))) for line in lines)


def test_each_override_decides_something() -> None:
    seen = set()
    for name in RECIPES:
        for flag in FLAGS:
            for block in HELD:
                seen.update(settle(Recipe(name), replace(PLAIN, **{"arrived": block, flag: True}))[1])
    for gpu in (B200, MI300X):
        seen.update(settle(Recipe("blockwise", serve="vllm"), replace(PLAIN, gpu=gpu))[1])
    assert {line.split(": ", 1)[1] for line in seen} == {override.why for override in OVERRIDES}


@pytest.mark.parametrize("block", HELD)
@pytest.mark.parametrize("name", RECIPES)
def test_a_weight_that_is_held_decides_its_blocks(name: str, block: Block) -> None:
    """Whatever the recipe, and with all that may be set beside it; nothing else changes without need."""
    recipe = Recipe(name, amax_group="tp") if Recipe(name).built_in.block == WHOLE else Recipe(name, margin=1)
    found, lines = settle(recipe, replace(PLAIN, arrived=block))
    assert found.weight_block == block and found.margin == recipe.margin
    assert found.scaling("weight", "dgrad").block == (WHOLE if block == ROW else block)
    assert bool(lines) is (found != recipe)
    assert found.name == name or recipe.built_in.tile != block


DOWN = "current_scaling=(True, False, False): rule 'down projection' of the policy"


@pytest.mark.feature("delayed")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, {"down": DOWN}),  # a rule of the default policy
        ({"recipe": "tensorwise"}, {}),  # has no effect there
        ({"current_scaling": (True, False, False)}, {}),  # which all layers have
        (
            {"policy": {"rules": [{"name": "own", "module": "up", "recipe": "tensorwise", "margin": 2}]}},
            {"up": "recipe='tensorwise', margin=2: rule 'own' of the policy", "down": DOWN},
        ),
    ],
)
def test_what_a_rule_changes_is_told_everywhere(options: Mapping[str, Any], told: Mapping[str, str]) -> None:
    """Whether the rule is the user's or one of a shipped policy."""
    model = make(SwiGlu)
    x = torch.randn(32, 128, requires_grad=True)
    with hooks.traced():
        torch.compile(model, backend="fp8", options=dict(options))(x).sum().backward()
    for report in (fp8compile.report(model), fp8compile.explain(model, x, options=options)):
        changed = {record.fqn: record.overrides for record in report.matmuls if record.overrides}
        assert changed == {name: (line,) for name, line in told.items()}
        lines = [f"1 FP8 layer: {line}" for line in told.values()]
        assert [line[2:] for line in str(report).splitlines() if line.startswith("* 1 FP8")] == lines
        page = html.unescape(report.to_html())
        assert all(line in page for line in lines)
        assert report.to_dict()["graphs"][0]["remarks"] == lines
