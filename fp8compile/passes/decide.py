"""decide: give every matmul its decision, FP8 or the reason why not. Changes the records, not the graph."""

from __future__ import annotations

from .. import policy
from ..capture import Inputs
from ..matmul import Matmul
from ..recipe import Recipe


def decide(matmuls: list[Matmul], inputs: Inputs, recipe: Recipe, inference: bool) -> int:
    """How many become FP8."""
    whole = "eval mode" if not inputs.training else "inference: nothing to differentiate" if inference else None
    for matmul in matmuls:
        matmul.reason = whole or policy.decide(matmul, recipe)
    return sum(matmul.fp8 for matmul in matmuls)
