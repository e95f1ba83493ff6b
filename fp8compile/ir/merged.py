"""The operators of matmuls that are merged into one (see `features.merge.merge`).

largest(numbers); least(numbers)  [1], [1], .. -> [1] float32: the amax, or scale, of several tensors
side_by_side(parts, dim)          FP8 [R, C1], [R, C2], .. -> [R, C1 + C2 + ..]; the rows with `dim` 0
both_sides(parts, transposed)     the same of the rows, and of the transposed copies along the columns
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .ops import define_op


def largest_of(numbers: Sequence[Tensor]) -> Tensor:
    """NaN if one of them is NaN."""
    return torch.cat(list(numbers)).amax(0, keepdim=True)


def least_of(numbers: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(numbers)).amin(0, keepdim=True)


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """By bytes: not all devices and code generators select and copy FP8 values."""
    return torch.cat([part.view(torch.uint8) for part in parts], dim).view(parts[0].dtype)


largest = define_op("largest(Tensor[] numbers) -> Tensor")(largest_of)
least = define_op("least(Tensor[] numbers) -> Tensor")(least_of)
side_by_side = define_op("side_by_side(Tensor[] parts, int dim) -> Tensor")(joined)


@define_op("both_sides(Tensor[] parts, Tensor[] transposed) -> (Tensor, Tensor)")
def both_sides(parts: Sequence[Tensor], transposed: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One operator, whose first result forward reads: so the partitioner saves the second, not its parts."""
    return joined(parts, 0), joined(transposed, 1)
