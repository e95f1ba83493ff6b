"""Our matmul of groups of rows against `ir.grouped.grouped_mm`: in Triton's interpreter, and as machine code
for each GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.codegen import grouped_gemm, scaled_grouped, triton_grouped
from fp8compile.codegen.inline import Inliner
from fp8compile.codegen.scaled_mm_kind import (
    EMULATED,
    GROUPED,
    LINE,
    MX_BLOCK,
    MX_TILE,
    REFERENCE,
    SQUARE,
    TRITON,
    how_grouped,
)
from fp8compile.config.recipe import ROW, WHOLE, Block
from fp8compile.ir import grouped
from tests.codegen.test_block_gemm import assert_machine_code, compiled, gpu
from tests.support import hooks, interpreter
from tests.support.interpreter import OLD_INTERPRETER
from tests.support.machine_code import SHARED, TARGETS
from tests.support.operands import B200, BF16, E4M3, F32, FNUZ, H100, MI300X, RTX4090, RTX5090, ends

SIZES = [0, 70, 0, 129, 1, 16, 15, 17, 0]
# (a's block, b's block, one scale a matrix of b)
OF_ROWS = [
    (WHOLE, WHOLE, False), (WHOLE, WHOLE, True), (ROW, ROW, False), (ROW, WHOLE, True), (WHOLE, ROW, False),
    (LINE, SQUARE, False), (MX_BLOCK, MX_BLOCK, False), (MX_BLOCK, MX_TILE, False),
]  # fmt: skip
OF_COLUMNS = [(WHOLE, WHOLE), (ROW, ROW), (ROW, WHOLE), (LINE, LINE), (MX_BLOCK, MX_BLOCK)]


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    with hooks.cuda_version(13, 0):
        yield


def test_the_choice() -> None:
    assert how_grouped(None, ROW, ROW) == REFERENCE
    for device in (H100, RTX4090, B200, RTX5090, MI300X):
        for pair in ((WHOLE, WHOLE), (ROW, ROW), (ROW, WHOLE)):
            assert how_grouped(device, *pair) == (GROUPED if device is H100 else TRITON)
        for pair in ((LINE, SQUARE), (LINE, LINE), (MX_BLOCK, MX_BLOCK), (MX_BLOCK, MX_TILE)):
            assert how_grouped(device, *pair) == TRITON
        assert how_grouped(device, SQUARE, LINE) == how_grouped(device, LINE, MX_BLOCK) == EMULATED
        assert how_grouped(device, LINE, SQUARE, launches=False) == EMULATED
    assert how_grouped(H100, ROW, ROW, launches=False) == GROUPED


# -- operands --


def numbers(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """FP8 numbers whose sums are exact in float32 in any order: signs times a few powers of two."""
    return torch.randint(-2, 3, shape, generator=generator).to(F32).to(dtype)


def inverses(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.exp2(torch.randint(-4, 3, shape, generator=generator).to(F32))


def operands(
    sizes: Sequence[int], n: int, k: int, a_block: Block, b_block: Block, matrices: bool = False,
    dtype: torch.dtype = E4M3, beyond: int = 0, seed: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of `grouped_mm` for fprop: what stands in `beyond` rows of no group is NaN."""
    g = torch.Generator().manual_seed(seed)
    m, count = sum(sizes) + beyond, len(sizes)
    a, b = numbers([m, k], dtype, g), numbers([count, n, k], dtype, g)
    if beyond:
        a.view(torch.uint8)[-beyond:] = 0x80 if dtype == FNUZ else 0x7F
    blocks = -(-k // max(1, a_block.columns))
    a_inv = inverses([1] if a_block == WHOLE else [m, 1] if a_block == ROW else [m, blocks], g)
    wide = {WHOLE: [1], ROW: [count, n, 1], SQUARE: [count, -(-n // 128), blocks]}
    wide |= {MX_BLOCK: [count, n, blocks], MX_TILE: [count, n // 32, blocks]}
    b_inv = inverses([count, 1, 1] if matrices else wide[b_block], g)
    return a, b, a_inv, b_inv, ends(sizes), F32, False, list(a_block), list(b_block)


def columns(
    sizes: Sequence[int],
    r: int,
    c: int,
    a_block: Block,
    b_block: Block,
    dtype: torch.dtype = E4M3,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Arguments for a wgrad: groups are padded to multiples of 16 columns, or of a block's; the rest belongs
    to no group."""
    g = torch.Generator().manual_seed(seed)
    align = max(16, a_block.columns, b_block.columns)
    padded = [-(-size // align) * align for size in sizes]
    length = sum(padded) + align
    copies = [numbers([rows, length], dtype, g) for rows in (r, c)]
    for copy in copies:
        copy.view(torch.uint8)[:, sum(padded) :] = 0x80 if dtype == FNUZ else 0x7F
        for size, end, room in zip(sizes, ends(padded).tolist(), padded, strict=True):
            copy.view(torch.uint8)[:, end - room + size : end] = 0
    made = []
    for rows, block in ((r, a_block), (c, b_block)):
        shapes = {WHOLE: [1], ROW: [len(sizes), rows]}
        made.append(inverses(shapes.get(block) or [rows, length // block.columns], g))
    return *copies, *made, ends(padded), F32, False, list(a_block), list(b_block)


# -- the interpreter --


def launched(
    call: Any,
    given: Sequence[Tensor],
    gpu: Any = RTX4090,
    tile: tuple = (64, 32, 4, 1),
    dynamic: bool = False,
) -> GraphModule:
    """A graph with one `grouped_mm`, lowered to a launch that the interpreter runs on the CPU."""
    with hooks.matmuls_for(gpu, tile):
        return interpreter.launched(call, given, grouped.grouped_mm, scaled_grouped.lower_grouped_mm, dynamic)


def assert_kernel(arguments: tuple[Any, ...], rows: int | None = None, **how: Any) -> None:
    """Bit for bit. `rows`: as many are compared; others belong to no group."""
    tensors, rest = arguments[:5], arguments[5:]
    expected = grouped.grouped_mm(*arguments)
    got = launched(functools.partial(_call, rest=rest), tensors, **how)(*tensors)
    assert expected.any() or arguments[4][-1] < 16
    assert torch.equal(expected[:rows], got[:rows]), (expected[:rows] - got[:rows]).abs().max()


def _call(*given: Tensor, rest: tuple[Any, ...]) -> Tensor:
    return grouped.grouped_mm(*given, *rest)


@pytest.mark.cases(test=3, slow=2)
@pytest.mark.parametrize("kinds", OF_ROWS, ids=str)
def test_rows(kinds: tuple) -> None:
    for (n, k), tile in (((48, 144), (64, 32)), (((80, 256), (32, 16))[OF_ROWS.index(kinds) % 2], (16, 128))):
        n, k = n + (n % 32 if kinds[1] == MX_TILE else 0), k + (k % 32 if kinds[0] == MX_BLOCK else 0)
        assert_kernel(operands(SIZES, n, k, *kinds, beyond=5), rows=sum(SIZES), tile=(*tile, 4, 1))


@pytest.mark.cases(test=5, slow=2)
@pytest.mark.parametrize("kinds", OF_COLUMNS, ids=str)
@pytest.mark.parametrize(("rc", "tile"), [((48, 80), (64, 32)), ((16, 32), (16, 128))], ids=str)
def test_columns(kinds: tuple, rc: tuple[int, int], tile: tuple) -> None:
    """An empty group's result is zeros; numbers after the last group are NaN."""
    arguments = columns(SIZES, *rc, *kinds)
    assert_kernel(arguments, tile=(*tile, 4, 1))
    empty = grouped.grouped_mm(*arguments)[SIZES.index(0)]
    assert not empty.any()


@pytest.mark.slow
@pytest.mark.skipif(
    OLD_INTERPRETER, reason="Triton's interpreter has neither `dot_scaled` nor fnuz dtypes before 3.7"
)
@pytest.mark.parametrize(
    ("gpu", "dtype", "kinds"),
    [
        (B200, E4M3, (MX_BLOCK, MX_BLOCK)), (B200, E4M3, (MX_BLOCK, MX_TILE)),
        (MI300X, FNUZ, (WHOLE, WHOLE)), (MI300X, FNUZ, (MX_BLOCK, MX_BLOCK)),
    ],
    ids=str,
)  # fmt: skip
def test_native_mx_and_fnuz(gpu: Any, dtype: torch.dtype, kinds: tuple) -> None:
    assert_kernel(operands(SIZES, 96, 160, *kinds, dtype=dtype, beyond=5), sum(SIZES), gpu=gpu)
    if kinds[1] != MX_TILE:
        assert_kernel(columns(SIZES, 48, 80, *kinds, dtype=dtype), gpu=gpu)


@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize("bad", [[100, 50, 60, 120], [-40, 10, 200, 100], [10, 20, 5000, 90]], ids=str)
def test_ends_that_make_no_sense_lead_nowhere_outside(bad: list[int]) -> None:
    """Operands lie amid NaN: a read outside would show, and so would a write."""
    offs = torch.tensor(bad, dtype=torch.int32)
    rows = grouped.order_of_groups(offs, 120, 16)[0]
    inside = torch.where(rows < -1, -2 - rows, rows)
    assert inside.min() >= -1 and inside.max() < 120
    a, b, a_inv, b_inv, _, *rest = operands([120, 0, 0, 0], 48, 144, ROW, ROW)
    amid = torch.full((360, 144), float("nan")).to(E4M3)
    amid[120:240] = a
    given = (amid[120:240], b, a_inv, b_inv, offs)
    graph = launched(lambda *x: grouped.grouped_mm(*x, *rest), (a, *given[1:]))
    known = torch.zeros(120, dtype=torch.bool)
    for start, end in zip([0, *bad], bad, strict=False):
        known[max(start, 0) : max(0, min(end, 120))] = True
    assert not graph(*given)[known].isnan().any()


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize(("out", "fast"), [(BF16, False), (torch.float16, True)])
def test_dtypes_and_fast_accumulation(out: torch.dtype, fast: bool) -> None:
    *given, _, _, a_block, b_block = operands(SIZES, 48, 144, ROW, ROW)
    assert_kernel((*given, out, fast, a_block, b_block))


DYNAMIC = [(operands, pair) for pair in ((WHOLE, WHOLE), (ROW, ROW), (LINE, SQUARE), (MX_BLOCK, MX_BLOCK))]
DYNAMIC += [(columns, (ROW, ROW)), (columns, (LINE, LINE))]


@pytest.mark.cases(test=1, slow=2)
@pytest.mark.skipif(
    OLD_INTERPRETER, reason="Triton's interpreter takes no argument as the end of a range before 3.7"
)
@pytest.mark.parametrize(("make", "blocks"), DYNAMIC, ids=lambda x: getattr(x, "__name__", str(x)))
def test_numbers_of_tokens_that_only_a_run_knows(make: Any, blocks: tuple) -> None:
    """Traced for one number of tokens, and run with others."""
    first = make(SIZES, 48, 128, *blocks)
    graph = launched(functools.partial(_call, rest=first[5:]), first[:5], dynamic=True)
    for sizes in (SIZES, [3, 0, 0, 77, 1, 0, 0, 100, 30]):
        arguments = make(sizes, 48, 128, *blocks)
        assert torch.equal(grouped.grouped_mm(*arguments), graph(*arguments[:5]))


@pytest.mark.cases(test=1, slow=3)
@pytest.mark.parametrize(
    ("blocks", "dims", "tile", "gpu"),
    [
        # the one copy of a stack with scales of tiles lies as [E, K, N], its scales as [E, K / 32, N / 32]
        ((MX_BLOCK, MX_TILE), (1, 2), (64, 32), RTX4090), ((MX_BLOCK, MX_TILE), (1, 2), (16, 128), B200),
        # the transposed copy of a stack lies as [N, E * K], and its scales, too
        ((MX_BLOCK, MX_TILE), (0, 1), (64, 32), RTX4090), ((ROW, ROW), (0, 1), (64, 32), RTX4090),
        ((LINE, SQUARE), (0, 1), (64, 32), RTX4090), ((MX_BLOCK, MX_BLOCK), (0, 1), (64, 32), RTX4090),
    ],
    ids=str,
)  # fmt: skip
def test_stacks_in_another_order(blocks: tuple, dims: tuple[int, int], tile: tuple, gpu: Any) -> None:
    if gpu is B200 and OLD_INTERPRETER:
        pytest.skip("Triton's interpreter has no `dot_scaled` before 3.7")
    a, b, a_inv, b_inv, offs, *rest = operands(SIZES, 96, 160, *blocks)
    expected = grouped.grouped_mm(a, b, a_inv, b_inv, offs, *rest)

    def call(a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, offs: Tensor) -> Tensor:
        return grouped.grouped_mm(a, b.transpose(*dims), a_inv, b_inv.transpose(*dims), offs, *rest)

    given = (a, b.transpose(*dims).contiguous(), a_inv, b_inv.transpose(*dims).contiguous(), offs)
    assert expected.any() and torch.equal(expected, launched(call, given, gpu, (*tile, 4, 1))(*given))


def test_scales_for_atens_matmul_are_spread_over_rows_and_columns() -> None:
    *tensors, dtype, fast, a_block, b_block = operands(SIZES, 48, 144, WHOLE, WHOLE)
    call = lambda *x: grouped.grouped_mm(*x, dtype, fast, a_block, b_block)  # noqa: E731
    graph = make_fx(call, tracing_mode="fake")(*tensors)
    (node,) = graph.graph.find_nodes(op="call_function", target=grouped.grouped_mm)
    with hooks.matmuls_for(H100):
        scales = scaled_grouped.spread_scales(graph.graph, Inliner())[node]
    (output,) = graph.graph.find_nodes(op="output")
    output.args = (scales,)
    graph.recompile()
    of_a, of_b = graph(*tensors)
    assert torch.equal(of_a, tensors[2].expand(sum(SIZES)))
    assert torch.equal(of_b, tensors[3].expand(len(SIZES), 48))


# -- the padded order --


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    sizes=st.lists(st.integers(0, 40) | st.sampled_from([0, 15, 16, 17, 128]), min_size=1, max_size=40),
    beyond=st.integers(0, 40), align=st.sampled_from([16, 32, 128]),
)  # fmt: skip
def test_the_order_of_groups(sizes: list[int], beyond: int, align: int) -> None:
    offs, m = ends(sizes), sum(sizes) + beyond
    expected = grouped.order_of_groups(offs, m, align)
    call = lambda offs: grouped.group_order(offs, m, align)  # noqa: E731
    made = interpreter.launched(call, (offs,), grouped.group_order, scaled_grouped.lower_order, False)
    for one, other in zip(expected, made(offs), strict=True):
        assert torch.equal(one, other)
    rows, last, groups = expected
    assert sorted(x if x >= 0 else -2 - x for x in rows.tolist() if x != -1) == list(range(m))
    assert all(x % align == 0 for x in last.tolist()) and len(groups) * align == len(rows)
    # a wgrad of each group has what to contract
    assert (last.diff(prepend=torch.zeros(1, dtype=torch.int32)) >= align).all()


# -- machine code --


def compiled_for(target: str, tile: tuple, of_rows: bool, tokens: int | None, kinds: tuple) -> Any:
    """The kernel for a Qwen3-30B-A3B layer."""
    codes = {WHOLE: 0, ROW: 2, LINE: 3, SQUARE: 4, MX_BLOCK: 5, MX_TILE: 7}
    m, k = (tokens, 2048) if of_rows else (2048, tokens)
    stack = {"B_MATRIX": 1536 * 2048, "B_ROW": 2048} if of_rows else {"B_MATRIX": 0, "B_ROW": 0}
    fixed = {"M": m, "N": 1536, "K": k, "E": 128, "LANES": 128, "OF_ROWS": of_rows, **stack, "B_COLUMN": 1}
    fixed |= {"A_KIND": codes[kinds[0]], "B_KIND": codes[kinds[1]], "FAST": kinds[0] == WHOLE}
    fixed |= {"NATIVE_MX": target in ("sm_100", "sm_120"), "EVEN": of_rows or kinds[0] == LINE}
    return compiled(triton_grouped.fp8_grouped, target, tile, {"m": m, "k16": k}, "offs *i32", fixed)


CASES = [
    (True, 65536, (WHOLE, WHOLE)),
    (True, 65536, (ROW, ROW)),
    (True, None, (LINE, SQUARE)),
    (True, 65536, (MX_BLOCK, MX_BLOCK)),
    (True, 65536, (MX_BLOCK, MX_TILE)),
    (False, 67456, (WHOLE, WHOLE)),
    (False, None, (ROW, ROW)),
    (False, 67456, (LINE, LINE)),
    (False, 67456, (MX_BLOCK, MX_BLOCK)),
]


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("target", ["sm_90", *(target for target in TARGETS if target != "sm_90")])
def test_machine_code(target: str) -> None:
    """At the default tile; for sm_90 all cases at each one."""
    for of_rows, m, kinds in CASES if target == "sm_90" else [CASES[i] for i in (0, 2, 4, 6, 8)]:
        tiles = grouped_gemm.configurations(gpu(target), SHARED[target], kinds[1])
        for tile in tiles if target == "sm_90" else tiles[:1]:
            made = compiled_for(target, tile, of_rows, m, kinds)
            assert_machine_code(made, target, (of_rows, kinds, tile), mx=kinds[0] == MX_BLOCK)
