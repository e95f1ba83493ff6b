"""Which matmuls FP8 tensor cores and our rewriting can take at all: facts, not choices.

Each objection is a reason in the report. The policy makes the choices (`config.policy`), and the cost model
finds what pays (`profitability`).
"""

from __future__ import annotations

import torch

from .. import compat
from ..config.recipe import Recipe
from ..ir.fx_utils import FLOATS, Matrix, hint, is_data, value
from ..ir.matmul import Matmul, factors

NO_ROWS = "no rows"


def objection(matmul: Matmul) -> str | None:
    """Why no policy can make a matmul with a weight FP8; None if one can. (`misaligned` comes last.)"""
    overload = f"the overload {matmul.op} is not rewritten" if "." in matmul.op else None
    single = isinstance(matmul.batch, int) and matmul.batch == 1
    batched = None if single else "batched: one weight matrix per batch entry"
    return _dtype(matmul) or overload or batched or _grouped(matmul) or _rows(matmul)


def _dtype(matmul: Matmul) -> str | None:
    for x in (matmul.node, matmul.a.base, matmul.b.base):
        dtype = value(x).dtype
        if dtype not in FLOATS:
            return f"dtype {str(dtype).removeprefix('torch.')}"
        if value(x).layout is not torch.strided:
            return f"dtype: {value(x).layout} tensor"
    left, right = (value(x).dtype for x in factors(matmul.node))
    if left != right:  # an error without us, too: Inductor reports it
        return f"dtype: {left} times {right}".replace("torch.", "")
    return None


def _grouped(matmul: Matmul) -> str | None:
    """A grouped matmul is rewritten if its tokens are the rows of both tensors that hold tokens."""
    if matmul.offs is None:
        return None
    left, right = (value(x).dim() for x in factors(matmul.node))
    if left != 2:
        return "grouped: the stack of weights is the left factor"
    tokens = [(matmul.a, right == 2)] + ([(matmul.b, False)] if right == 2 else [])
    if any(matrix.transposed is not turned for matrix, turned in tokens):
        return "grouped: tokens are the columns of an operand"
    return None


def _rows(matmul: Matmul) -> str | None:
    sizes = (matmul.m, matmul.n, matmul.k)
    # experts need our kernels there
    if any(map(is_data, sizes)) and (matmul.offs is None or compat.triton.reorders()):
        return "rows that are counted from data (experts: grouped_mm needs no count)"
    return NO_ROWS if any(isinstance(size, int) and size == 0 for size in sizes) else None


def flippable(matmul: Matmul) -> bool:
    """True for a plain product (2-D, without groups and addend) whose sizes fit for the result's transpose
    only. The number of rows is free, that of columns is not."""
    plain = matmul.offs is None and matmul.addend is None and value(matmul.node).dim() == 2
    return plain and not _fits(matmul.n) and _fits(matmul.m)


def _fits(size: object) -> bool:
    return isinstance(size, int) and size % 16 == 0


def misaligned(matmul: Matmul) -> str | None:
    """Why the sizes do not fit FP8 tensor cores, None if they do."""
    operand = matmul.weight_operand
    sizes = (operand.rows, operand.shape[1]) if operand is not None else (matmul.m, matmul.n)
    if not all(map(_fits, sizes)):
        return f"not a multiple of 16: {' x '.join(map(str, sizes))}"
    if not _fits(matmul.n):
        return f"not a multiple of 16: {matmul.n} columns of output"
    # contracted rows are padded, in both operands; any other size has to fit as it is
    if not (matmul.a.transposed and not matmul.b.transposed) and not _fits(matmul.k):
        return f"not a multiple of 16: contracts over {matmul.k}"
    return None


def unfit(weight: Matrix | None, recipe: Recipe) -> str | None:
    """Why the blocks of a recipe do not fit an expert's weight; None if they do. A block that reaches into
    the next matrix has no scale of its own."""
    size = max(recipe.weight_block)
    if weight is None or weight.stack <= 1 or not size or not (weight.rows % size or weight.shape[1] % size):
        return None
    return f"not a multiple of {size}: {weight.rows} x {weight.shape[1]}, the blocks of an expert's weight"


def late(matmul: Matmul) -> str | None:
    """Why the operands of a matmul have no FP8 copies; None if they may have."""
    given = [matrix.base for matrix, role in matmul.roles if role != "gradient"]
    return "an input that is made in backward" if any(map(compat.dynamo.is_backward, given)) else None


def fits(matmul: Matmul) -> bool:
    """True if the dtype and sizes of a matmul without a weight fit FP8, so that a warning is worthwhile."""
    large = hint(matmul.k) >= 128 and max(hint(matmul.m), hint(matmul.n)) >= 128
    return large and objection(matmul) is None and misaligned(matmul) is None
