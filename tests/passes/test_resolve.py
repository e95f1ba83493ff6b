"""`resolve`: the settings that run are the chosen ones, but for overrides, each of which is told."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fp8compile
from fp8compile import Recipe
from fp8compile.passes.resolve import OVERRIDES, Facts, settle
from tests.support import hooks
from tests.support.reference_settings import RECIPES

PLAIN = Facts(None, ("input", "weight"))
FLAGS = [field.name for field in fields(Facts) if field.type == "bool"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_change_is_told_and_nothing_else_is(name: str) -> None:
    """Of each fact alone, and of all together."""
    recipe = Recipe(name)
    assert settle(recipe, PLAIN) == (recipe, ())
    for flags in (*([flag] for flag in FLAGS), FLAGS):
        found, lines = settle(
            replace(recipe, frozen="high_precision"), replace(PLAIN, **dict.fromkeys(flags, True))
        )
        assert bool(lines) is (found != recipe), (flags, lines)
        assert all(line.split("=")[0] in ("recipe", *(f.name for f in fields(Recipe))) for line in lines)


def test_each_override_decides_something() -> None:
    seen = set()
    for name in RECIPES:
        for flag in FLAGS:
            seen.update(settle(Recipe(name), replace(PLAIN, **{"arrived": True, flag: True}))[1])
    assert {line.split(": ", 1)[1] for line in seen} == {override.why for override in OVERRIDES}


def test_the_report_prints_them() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(128, 256)), nn.ReLU(), nn.Linear(256, 128))
    with hooks.traced():
        torch.compile(model, backend="fp8")(torch.randn(32, 128)).sum().backward()
    told = (
        "* 1 FP8 layer: current_scaling=(False, True, False): a weight that is computed in "
        "each call has no history"
    )
    assert told in str(fp8compile.report(model)).splitlines()
