"""Operators for matmuls of groups of rows: the tokens of experts.

A mixture of experts sorts its tokens by expert. `offs` (int32 `[E]`, non-decreasing) are the ends of the
experts' rows in x `[M, K]`: expert e has the rows from offs[e - 1] (0 before the first) to offs[e]. Sizes of
groups are data, known on the device alone; M and E are known when a graph is compiled. Rows from offs[-1] on
belong to no expert.

    group_order(offs, M, align)             the padded order: rows [P], ends [E], groups [P / align], int32
    group_amax(x, offs, rows, groups)       [M, C] -> [E, C]: the amax of each column in each group
    of_groups(scale, groups)                [E, C] -> [C, P / align]: these scales, one for each `align` rows
    grouped_mm(a, b, a_inv, b_inv, offs, ...)

A wgrad contracts over the rows of each group, and tensor cores take a multiple of 16 of them. So the
transposed copies that it reads have an order of their own, the *padded order*, in which each group begins at
a multiple of `align`, with zeros between:

    rows of x       0 0 0 1 1 | 2 2 ..            offs [3, 5, ..], align 4
    padded order    0 0 0 . 1 1 . . 2 2 ..        rows [0, 1, 2, -1, 3, 4, -1, -1, ..]

A group without rows has `align` zeros there: with nothing to contract, some of ATen's kernels leave the
result of its wgrad unwritten (pytorch#172439). To mask it afterwards would read and write the gradient of the
whole stack. The length P depends on M, E and `align` alone: no size depends on data, and nothing waits for
the device. Each row of x has its place, also the rows of no group: those come last, as -2 - row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from ..errors import Fp8CompileError
from . import ops
from .ops import define_op

ALIGN = 16  # rows; tensor cores contract over multiples of it


def taken(x: Tensor, index: Tensor) -> Tensor:
    """x[index], by rows. (Subscripts access the device, which may be a described GPU that is not there.)"""
    return torch.ops.aten.index.Tensor(x, [index])


def padded_size(rows, count: int, align: int):
    """P, an upper bound of the length of the padded order. Takes int or SymInt."""
    return (rows + align - 1) // align * align + count * align


def _group_order(offs: Tensor, rows, align: int) -> tuple[Tensor, Tensor, Tensor]:
    made = functools.partial(torch.empty, dtype=torch.int32, device=offs.device)
    size = padded_size(rows, offs.shape[0], align)
    return made(size), made(offs.shape[0]), made(size // align)


@define_op("group_order(Tensor offs, SymInt rows, int align) -> (Tensor, Tensor, Tensor)", _group_order)
def group_order(offs: Tensor, rows, align: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three int32 tensors: the row of x at each place of the padded order; the ends of the groups there; and
    the group of each `align` places, E for those of no group."""
    borders(offs, rows)
    return order_of_groups(offs, rows, align)


def order_of_groups(offs: Tensor, rows, align: int) -> tuple[Tensor, Tensor, Tensor]:
    """`group_order`. The row is -1 in the padding, and -2 - row for a row that belongs to no group."""
    offs = offs.to(torch.int64)
    count = offs.shape[0]
    starts = torch.nn.functional.pad(offs, (1, 0))
    sizes = torch.cat([offs, torch.full_like(offs[:1], rows)]) - starts
    padded = (sizes + align - 1) // align * align
    padded = torch.where(torch.arange(count + 1, device=offs.device) < count, padded.clamp(min=align), padded)
    ends = padded.cumsum(0)
    place = torch.arange(padded_size(rows, count, align), device=offs.device)
    group = (place.unsqueeze(1) >= ends).sum(1).clamp(max=count)
    within = place - taken(ends - padded, group)
    row = taken(starts, group) + within
    # ends that make no sense lead nowhere outside
    inside = (within < taken(sizes, group)) & (row >= 0) & (row < rows)
    row = torch.where(inside, torch.where(group < count, row, -2 - row), -1)
    blocks = group.view(-1, align).select(1, 0).clone()
    return row.to(torch.int32), ends.narrow(0, 0, count).to(torch.int32), blocks.to(torch.int32)


@define_op(
    "group_amax(Tensor x, Tensor offs, Tensor rows, Tensor groups) -> Tensor",
    lambda x, offs, *_: torch.empty(offs.shape[0], x.shape[1], dtype=torch.float32, device=x.device),
)
def group_amax(x: Tensor, offs: Tensor, rows: Tensor, groups: Tensor) -> Tensor:
    """The amax of each column in each group, float32; 0 for an empty group. Kernels walk the padded order."""
    made = torch.zeros(offs.shape[0], x.shape[1], dtype=torch.float32, device=x.device)
    for group, (start, end) in enumerate(borders(offs, x.shape[0])):
        if end > start:
            made[group] = x[start:end].abs().amax(0).to(torch.float32)
    return made


def scales_of_groups(scale: Tensor, groups: Tensor) -> Tensor:
    """For each `align` rows of the padded order: the scales of their group; for no group, the last one's."""
    return taken(scale, groups.clamp(max=scale.shape[0] - 1)).t().contiguous()


of_groups = define_op("of_groups(Tensor scale, Tensor groups) -> Tensor")(scales_of_groups)


def _product(
    a: Tensor, b: Tensor, _a_inv: Tensor, _b_inv: Tensor, offs: Tensor, out_dtype: torch.dtype, *_
) -> Tensor:
    shape = [a.shape[0], b.shape[1]] if b.dim() == 3 else [offs.shape[0], a.shape[0], b.shape[0]]
    return torch.empty(shape, dtype=out_dtype, device=a.device)


@define_op(
    "grouped_mm(Tensor a, Tensor b, Tensor a_inv, Tensor b_inv, Tensor offs, ScalarType out_dtype, bool "
    "fast_accum, int[] a_block, int[] b_block) -> Tensor",
    _product,
)
def grouped_mm(
    a: Tensor,
    b: Tensor,
    a_inv: Tensor,
    b_inv: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
    a_block: Sequence[int],
    b_block: Sequence[int],
) -> Tensor:
    """Products of FP8 values, one a group, with the contracted dimension last in both operands.

    b `[E, N, K]` (fprop, dgrad): `offs` divides the rows of a `[M, K]`; the rows of group e are multiplied
    with b[e]^T, and the result is `[M, N]`. Rows of no group are zeros here, and hold any value in lowered
    graphs, as after `aten._grouped_mm`. b `[C, P]` (wgrad): `offs` divides the columns of a `[R, P]` and of
    b; the result is `[E, R, C]`, zeros for an empty group (which has columns in the padded order, and in
    lowered graphs must have).

    Inverses of scales: [1] for one; b_inv `[E, N / block rows, K / block columns]`, also `[E, 1, 1]` for one
    a matrix; a_inv `[M, K / block columns]`; in a wgrad `[R, P / block columns]`, or with blocks of (1, 0)
    one a row of each group, `[E, R]`.
    """
    rows_grouped = b.dim() == 3
    made = torch.zeros_like(_product(a, b, a_inv, b_inv, offs, out_dtype))
    for group, (start, end) in enumerate(borders(offs, a.shape[0 if rows_grouped else 1])):
        if end == start:
            continue
        if rows_grouped:
            x, y = a[start:end], b[group]
            x_inv = a_inv if a_inv.dim() == 1 else a_inv[start:end]
            y_inv = b_inv if b_inv.dim() == 1 else b_inv[group]
        else:
            x, y = a[:, start:end], b[:, start:end]
            x_inv = _of_group(a_inv, a_block, group, start, end)
            y_inv = _of_group(b_inv, b_block, group, start, end)
        result = ops.block_mm(x, y, x_inv, y_inv, None, out_dtype, fast_accum, a_block, b_block)
        if rows_grouped:
            made[start:end] = result
        else:
            made[group] = result
    return made


def _of_group(inverse: Tensor, block: Sequence[int], group: int, start: int, end: int) -> Tensor:
    """The inverses that a wgrad reads for the columns from `start` to `end`."""
    if inverse.dim() == 1:
        return inverse
    return inverse[:, start // block[1] : -(-end // block[1])] if block[1] else inverse[group].unsqueeze(1)


def borders(offs: Tensor, size: int) -> list[tuple[int, int]]:
    """The first row of each group and the one after its last. Reads the device.

    Raises Fp8CompileError if `offs` decrease, or are more than `size`."""
    ends = [0, *offs.tolist()]
    pairs = list(zip(ends, ends[1:], strict=False))
    if any(start > end for start, end in pairs) or ends[-1] > size:
        wrong = f"offs of a grouped matmul have to rise from 0 to at most {size}, not {ends[1:]}"
        raise Fp8CompileError(wrong)
    return pairs


def order_of(node: Node) -> Node | None:
    """The padded order that one of our operators was given: its argument `rows`."""
    position = _ROWS.get(node.target)  # type: ignore[arg-type]
    return None if position is None or len(node.args) <= position else node.args[position]  # type: ignore[return-value]


_ROWS = {ops.amax: 1, ops.amax_blocks: 3, ops.quantize: 6, ops.quantize_both: 6, group_amax: 2}
ALL = (group_order, group_amax, of_groups, grouped_mm)
