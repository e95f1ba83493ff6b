"""Matmuls of groups of rows, the experts of a mixture: kernels against graphs without kernels."""

from __future__ import annotations

import pytest

from tests.passes.test_fusion import assert_same
from tests.support.models import Moe

RECIPES = ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")


@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_experts_are_experts(recipe: str) -> None:
    made = assert_same(Moe, [(2, 20, 128)] * 2, recipe=recipe)
    print(made)
