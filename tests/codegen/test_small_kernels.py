"""The kernels that reduce partial results, in Triton's interpreter; and their machine code, with that of the
kernel that moves the scaling state (`tests/runtime/test_arena.py`)."""

from __future__ import annotations

import math

import pytest
import torch

from fp8compile.codegen import launch, triton_kernels
from fp8compile.features.delayed import arena, triton_move
from fp8compile.ir import ops
from tests.support.interpreter import Interpreted
from tests.support.machine_code import SHARED, TARGETS, compile_function, resources

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def programs(count: int, block: int) -> tuple[int, int, int]:
    return -(-count // block), 1, 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 31), (64, 32), (130, 100), (512, 257)])
def test_column_sums(rows, columns, dtype):
    partial = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    total = torch.full((columns + 1,), math.nan, dtype=DTYPES[dtype])
    (config,) = launch.PARTIAL_SUMS
    kernel = Interpreted(triton_kernels.fp8_column_sums, config)
    kernel[programs(columns, config[1])](partial=partial, total=total, ROWS=rows, COLUMNS=columns)
    expected = partial.double().sum(0)
    rounding = 2**-8 * expected.abs().max() if dtype == "bf16" else 0.0
    assert (total[:columns].double() - expected).abs().max() <= 1e-5 * rows + rounding
    assert total[columns].isnan()


@pytest.mark.parametrize(
    ("tensors", "count", "known"),
    [(1, 1, True), (3, 100, True), (4, 2048, True), (1, 100, False), (3, 5000, False), (4, 1, False)],
)
def test_raised_amaxes(tensors, count, known):
    """NaN wins over infinity, with either sign; other numbers of the vector stay."""
    generator = torch.Generator().manual_seed(count)
    rows = [torch.rand(count, generator=generator) * 10.0**i for i in range(tensors)]
    if tensors > 1:
        rows[1][count // 2] = math.inf
    if tensors > 2:
        rows[2][count // 2], rows[2][-1] = math.inf, -torch.tensor(math.nan)
    vector = torch.zeros(launch.APART * tensors, dtype=torch.int32)
    (config,) = launch.RAISED
    numbers = range(launch.Launcher.MOST_RAISED)
    given = {f"rows{i}": rows[i] if i < tensors else None for i in numbers}
    given |= {f"amax{i}": vector[4 * i :] if i < tensors else None for i in numbers}
    given |= {"n": None, "COUNT": count} if known else {"n": count, "COUNT": None}
    Interpreted(triton_kernels.fp8_raise, config)[programs(count, config[0])](**given)
    expected = torch.stack([x.amax() for x in rows])
    found = vector.view(torch.float32)[:: launch.APART]
    assert torch.equal(found.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
    assert not vector.view(tensors, -1)[:, 1:].any()


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_they_compile_to_machine_code(target):
    """Nothing spills."""
    rows = {f"rows{i}": "*fp32" for i in range(3)} | {f"amax{i}": "*i32" for i in range(3)} | {"n": "i32"}
    page = {"page": "*fp32", "scales": "*fp32", "amaxes": "*i32", "parts": "*i32"}
    sums = {"partial": "*fp32", "total": "*bf16"}
    functions = [
        ("fp8_column_sums", sums, {"ROWS": 256, "COLUMNS": 4096}, *launch.PARTIAL_SUMS),
        ("fp8_raise", rows, {"COUNT": None, "rows3": None, "amax3": None}, *launch.RAISED),
    ]
    for history in (1, 16, 1024, arena.LONGEST):
        config = (*arena.configuration(history), arena.WARPS)
        functions.append(("fp8_move", page, {"LENGTH": history}, config))
    for name, types, constants, (height, width, warps) in functions:
        constants = {**constants, "BLOCK_R": height, "BLOCK_C": width}
        jitted = getattr(triton_move if name == "fp8_move" else triton_kernels, name)
        took = resources(compile_function(jitted, types, constants, TARGETS[target], num_warps=warps))
        assert not took.spills and took.shared <= SHARED[target], (name, constants, took)


@pytest.mark.parametrize("rows, columns", [(1, 1), (16, 64), (33, 70), (128, 512)])
def test_a_copy_is_transposed(rows, columns):
    """Also between rows that are further apart, as parts of larger matrices are. The padding is zero."""
    padded = ops.padded_rows(rows)
    x = torch.randn(rows, columns + 8).to(torch.float8_e4m3fn)[:, :columns]
    y = torch.full((columns, padded + 16), 7.0).to(torch.float8_e4m3fn)
    for known in (True, False):
        sizes = {"rows": None, "padded": None, "ROWS": rows, "PADDED": padded, "TO": padded + 16}
        if not known:
            sizes |= {"rows": rows, "padded": padded, "ROWS": None, "PADDED": None}
        y.fill_(7.0)
        run = Interpreted(triton_kernels.fp8_transpose, (16, 64, 1))
        grid = -(-padded // 16) * -(-columns // 64)
        run[(grid,)](x=x, y=y, COLUMNS=columns, FROM=columns + 8, **sizes)
        expected = torch.nn.functional.pad(x.float().t(), (0, padded - rows))
        assert torch.equal(y[:, :padded].float(), expected)
        assert y[:, padded:].float().eq(7).all()
