"""decide: give every matmul its decision, FP8 or the reason why not. Changes the records, not the graph."""

from __future__ import annotations

from .. import compat, policy
from ..capture import Inputs
from ..matmul import Matmul
from ..recipe import Recipe
from .plan import roles


def decide(matmuls: list[Matmul], inputs: Inputs, recipe: Recipe, inference: bool) -> int:
    """How many become FP8."""
    whole = "eval mode" if not inputs.training else "inference: nothing to differentiate" if inference else None
    for matmul in matmuls:
        evaluated = matmul.parameter is not None and compat.input_index(matmul.parameter) in inputs.evaluated
        matmul.reason = whole or ("eval mode" if evaluated else policy.decide(matmul, recipe))
        if matmul.fp8 and any(role != "gradient" and compat.is_backward(matrix.base) for matrix, role in roles(matmul)):
            matmul.reason = "an input that is made in backward"
    return sum(matmul.fp8 for matmul in matmuls)
