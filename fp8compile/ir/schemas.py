"""Typed views of the operators that cast and multiply: nothing else knows the order of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from ..config.recipe import Block
from . import grouped, ops
from .products import ScaledProduct as ScaledProduct  # others import it from here


class FP8Copy(NamedTuple):
    """One FP8 copy of a matrix: nodes, or values while a graph runs. `item`: its place among the results of
    its operator; None if it is the only one."""

    source: Any
    scale: Any
    dtype: Any
    fp8_max: float
    transposed: bool
    block: tuple[int, int] = (0, 0)
    rows: Any = None  # the order of rows that are divided into groups
    divide: bool = False  # `scale` is the inverse: values are divided by it
    item: int | None = None

    @property
    def args(self) -> tuple:
        """The arguments of `quantize`."""
        order = [] if self.rows is None and not self.divide else [self.rows]
        return (*self[:5], list(self.block), *order, *([True] if self.divide else []))

    def of(self, result: Any) -> Any:
        """This copy, in what the operator has returned."""
        return result if self.item is None else result[self.item]


def copies_of(target: Any, args: Sequence[Any]) -> tuple[FP8Copy, ...]:
    """What an operator makes of these arguments: one copy, or both layouts, plain first; () for any other."""
    if target is ops.quantize:
        copy = FP8Copy(*args)
        return (copy._replace(transposed=bool(copy.transposed), block=tuple(copy.block)),)  # type: ignore[arg-type]
    return _both(*args) if target is ops.quantize_both else ()


def _both(
    x, scale, dtype, fp8_max, other=None, block=(0, 0), rows=None, late=None, divide=False
) -> tuple[FP8Copy, FP8Copy]:
    """With the arguments of `quantize_both`."""
    plain = FP8Copy(x, scale, dtype, fp8_max, False, tuple(block), rows, divide, 0)
    scale = scale if other is None else other
    return plain, plain._replace(transposed=True, item=1, scale=scale, block=tuple(late or block))


def copies_at(node: Node) -> tuple[FP8Copy, ...]:
    return copies_of(node.target, node.args)


def both_args(plain: FP8Copy, late: FP8Copy) -> tuple:
    """The arguments of `quantize_both` for two layouts of one matrix."""
    other = None if late.scale is plain.scale else late.scale
    block = None if late.block == plain.block else list(late.block)
    rows = plain.rows if plain.rows is not None else late.rows
    return (*plain[:4], other, list(plain.block), rows, block, *([True] if plain.divide else []))


class GroupedProduct(NamedTuple):
    """The arguments of `ir.grouped.grouped_mm`. The contracted dimension is the last one: a [M, K] and b [E,
    N, K] of fprop and dgrad, a [R, P] and b [C, P] of wgrad."""

    a: Tensor
    b: Tensor
    a_inv: Tensor
    b_inv: Tensor
    offs: Tensor
    out_dtype: torch.dtype
    fast_accum: bool
    a_block: Block
    b_block: Block


def product_of(node: Node) -> Any:
    """The `ScaledProduct` or `GroupedProduct` that a node asks for, with nodes in place of tensors."""
    args: Any = node.args
    kind = GroupedProduct if node.target is grouped.grouped_mm else ScaledProduct
    return kind(*args[:7], *(Block(*block) for block in args[7:]))
