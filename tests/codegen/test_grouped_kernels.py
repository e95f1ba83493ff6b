"""Kernels that walk the rows of groups, against the reference operators bit by bit: any sizes of groups, by
Triton's interpreter. And stacks of matrices, where each matrix has scales of its own for its columns."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from fp8compile.ir import grouped, ops
from tests.codegen.test_block_kernels import E4M3, assert_kernels, check, made_of, scales
from tests.support.groups import Made, Source, unfused
from tests.support.kernel_checks import assert_bits
from tests.support.operands import ends

ROWS, COUNT, COLUMNS = 230, 6, 72
ALIGN = {"delayed": 16, "rowwise": 16, "blockwise": 128, "mxfp8": 32}
KERNELS = {
    "delayed": ["copy transposed amax"],
    "rowwise": ["copy row column_amax", "transposed"],
    "blockwise": ["copy transposed blocks blocks"],
    "mxfp8": ["copy transposed blocks blocks"],
}


def copies(x: Tensor, offs: Tensor, scale: Tensor, recipe: str) -> tuple[Tensor, ...]:
    """Both copies of a tensor with groups of rows, its amaxes or inverse scales, as in the joint graph."""
    rows, _, groups = grouped.group_order(offs, x.shape[0], ALIGN[recipe])
    if recipe == "delayed":
        return *ops.quantize_both(x, scale, *E4M3, None, [0, 0], rows), ops.amax(x, rows)
    if recipe == "rowwise":
        own = ops.current_scale(ops.amax_blocks(x, False, [1, 0], rows), 448.0, 0, False)
        column = ops.current_scale(grouped.group_amax(x, offs, rows, groups), 448.0, 0, False)
        plain = ops.quantize(x, own, *E4M3, False, [1, 0], rows)
        turned = ops.quantize(x, grouped.of_groups(column, groups), *E4M3, True, [1, 16], rows)
        return plain, turned, ops.inverse(own), ops.inverse(column)
    block = [1, ALIGN[recipe]]
    amaxes = [ops.amax_blocks(x, turned, block, rows) for turned in (False, True)]
    made = [ops.current_scale(amax, 448.0, 0, True) for amax in amaxes]
    return *ops.quantize_both(x, made[0], *E4M3, made[1], block, rows), *map(ops.inverse, made)


def kernel(recipe: str, producer: str, config: tuple[int, int, int] | None = None) -> Made:
    def call(x: Tensor, gate: Tensor, token: Tensor, offs: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        if producer == "silu":
            x = (F.silu(gate.float()) * x.float()).to(torch.bfloat16)
        elif producer == "gather":
            x = x[token]
        return copies(x, offs, scale, recipe)

    made = made_of(call, inputs([ROWS] + [0] * (COUNT - 1)), config=config)
    assert_kernels(made, *KERNELS[recipe])
    return made


def inputs(sizes: list[int], seed: int = 0) -> tuple[Tensor, ...]:
    data = "extreme" if seed % 2 else "normal"
    x, gate = (Source(ROWS, COLUMNS, torch.bfloat16, data).full() for _ in range(2))
    token = torch.randint(ROWS, (ROWS,), generator=torch.Generator().manual_seed(seed))
    return x, gate, token, ends(sizes), torch.tensor([3.0])


def compare(made: Made, sizes: list[int], seed: int = 0, other: GraphModule | None = None) -> None:
    given, inside = inputs(sizes, seed), sum(sizes)
    with torch.no_grad():
        expected, got = made.oracle(*given), (other or made.fused)(*given)
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        if a.shape[0] == ROWS:  # rows of no group hold any value
            a, b = a[:inside], b[:inside]
        assert_bits(a, b, f"{sizes}, result {i}")


@pytest.mark.cases(test=5, slow=2)
@pytest.mark.parametrize(
    ("recipe", "producer"),  # an exponential comes from another library, and its last bit moves scales
    [("delayed", "silu"), *itertools.product(KERNELS, ["memory", "gather"])],
)
def test_groups(recipe: str, producer: str) -> None:
    """The same graph lowered without generated kernels gives the oracle's bits, too."""
    made = kernel(recipe, producer)
    of_no_rows = ([0] * 6, [0, 0, ROWS, 0, 0, 0]) if producer == "memory" else ()
    for sizes in (*of_no_rows, [1, 15, 16, 17, 181, 0], [129, 0, 63, 1, 0, 32]):
        compare(made, sizes)
    if producer == "memory":
        compare(made, [129, 0, 63, 1, 0, 32], other=unfused(made.oracle))


TILES = {"delayed": (32, 128, 4), "rowwise": (128, 32, 8), "blockwise": None, "mxfp8": (32, 128, 4)}


@pytest.mark.cases(test=2, slow=2)
@pytest.mark.parametrize(("recipe", "tile"), TILES.items())
def test_any_sizes_of_groups(recipe: str, tile: Any) -> None:
    made = kernel(recipe, "gather" if tile is None else "memory", tile)

    @settings(max_examples=6, deadline=None, derandomize=True, database=None)
    @given(ends=st.lists(st.integers(0, ROWS), min_size=COUNT, max_size=COUNT), seed=st.integers(0, 9))
    def compared(ends: list[int], seed: int) -> None:
        ends = sorted(ends)
        compare(made, [end - start for start, end in zip([0, *ends], ends, strict=False)], seed)

    compared()


def test_nan_and_infinity_stay_in_their_group() -> None:
    sizes = [30, 0, 100, 50, 20, 10]
    made, given = kernel("rowwise", "memory"), inputs(sizes)
    given[0][35, 7], given[0][150, 9] = torch.nan, torch.inf
    given[0][sum(sizes) :] = torch.nan
    with torch.no_grad():
        expected, got = made.oracle(*given), made.fused(*given)
    for a, b in list(zip(expected, got, strict=True))[1:]:
        assert_bits(*((a, b) if a.shape[0] != ROWS else (a[: sum(sizes)], b[: sum(sizes)])), "with NaN")
    assert got[3].shape == (COUNT, COLUMNS) and got[3].isfinite().all()  # the inverse of no number: 1


@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize(
    ("rows", "dtype"), [(48, torch.bfloat16), (144, torch.float32), (256, torch.bfloat16)]
)
def test_stacks(rows: int, dtype: torch.dtype) -> None:
    """[E * R, C]: scales of rows, and of the columns of each matrix."""

    def call(w: Tensor) -> tuple[Tensor, ...]:
        own, inverse = scales(w, False, [1, 0], False)
        column = ops.current_scale(ops.amax_blocks(w, False, [rows, 1]), 448.0, 0, False)
        plain, turned = ops.quantize_both(w, own, *E4M3, column.permute(1, 0), [1, 0], None, [1, rows])
        return plain, turned, inverse, ops.inverse(column)

    made = made_of(call, (Source(3 * rows, 136, dtype).full(),))
    assert_kernels(made, "copy row column_amax", "transposed")
    for data in ("normal", "extreme"):
        got = check(made, (Source(3 * rows, 136, dtype, data).full(),))
    assert not torch.equal(got[3][0], got[3][1])
