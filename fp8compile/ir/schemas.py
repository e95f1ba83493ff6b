"""Typed views of the operators that cast and multiply: nothing else knows the order of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from ..config.recipe import Block
from . import grouped, ops
from .ops import FP8Copy as FP8Copy  # others import it from here, and the next one
from .products import ScaledProduct as ScaledProduct


def copies_of(target: Any, args: Sequence[Any]) -> tuple[FP8Copy, ...]:
    """What an operator makes of these arguments: one copy, or both layouts, plain first; () for any other."""
    if target is ops.quantize:
        copy = FP8Copy(*args)
        return (copy._replace(transposed=bool(copy.transposed), block=tuple(copy.block)),)  # type: ignore[arg-type]
    return ops.both_layouts(*args) if target is ops.quantize_both else ()


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
