"""The operators in C++ give the bits of the reference operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8compile.ir import cpu, ops

pytestmark = pytest.mark.compat
BF16 = torch.bfloat16
FORMATS = [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0), (torch.float8_e4m3fnuz, 240.0)]
BLOCKS = [(0, 0), (1, 0), (1, 32), (32, 32), (1, 128), (128, 128), (0, 1)]


def bits(rows: int, columns: int) -> Tensor:
    """Any bits: NaN, infinities and subnormal numbers among them."""
    return torch.randint(-(2**31), 2**31, (rows, columns)).to(torch.int32).view(torch.float32)


def matrices(rows: int, columns: int) -> Iterator[Tensor]:
    yield from (bits(rows, columns), bits(rows, columns).to(BF16), torch.randn(rows, columns).half())
    yield from (torch.randn(columns, rows).t(), torch.randn(rows, 2 * columns)[:, ::2])
    yield torch.randn(rows, columns + 3)[:, :columns].to(BF16)


def same(operator: Any, *args: Any) -> None:
    name = operator._schema.name.split("::")[1]
    got, expected = getattr(cpu, name)(*args), ops.OPERATORS[operator](*args)
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, expected)), strict=True):
        told = f"{name} {[x.shape if isinstance(x, Tensor) else x for x in args]}"
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), told
        a, b = (x.to(torch.float32).nan_to_num(nan=1e30, posinf=2e30, neginf=-2e30) for x in (a, b))
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), told


def scales(rows: Any, columns: Any, block: tuple[int, int], turned: bool = False) -> Tensor:
    """One a block of a matrix, as a weight's transposed copy has them if `turned`."""
    if block == (0, 0):
        return torch.rand(1)
    counts = ops.blocks(rows, block[0]), ops.blocks(columns, block[1])
    return torch.rand(counts[::-1]).t() if turned else 10 * torch.rand(counts)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 1), (17, 64), (130, 33), (300, 128)])
def test_casts_and_amaxes(rows: int, columns: int) -> None:
    for i, x in enumerate(matrices(rows, columns)):
        same(ops.amax, x)
        for j, block in enumerate(BLOCKS):
            form, turned = FORMATS[(i + j) % 3], (i + j) % 2 > 0
            shape = (columns, ops.padded_rows(rows)) if turned else (rows, columns)
            same(ops.amax_blocks, x, turned, block)
            same(ops.quantize, x, scales(*shape, block, turned), *form, turned, block)
        same(ops.quantize_both, x, scales(rows, columns, (0, 0)), *FORMATS[i % 3])
        for args in ((False, (1, 128), None, True), (True, (0, 0), None, True)):  # divided
            shape = (columns, ops.padded_rows(rows)) if args[0] else (rows, columns)
            same(ops.quantize, x, scales(*shape, args[1]), *FORMATS[0], *args)


def test_every_number() -> None:
    """Each bf16 number, ties between neighbours, each code; tensors of other dimensions, without elements."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16).view(256, 256)
    for dtype, fp8_max in FORMATS[:2]:
        codes = torch.arange(256, dtype=torch.uint8).view(1, 256).view(dtype)
        values = codes.to(torch.float32).nan_to_num(0.0, 0.0, 0.0)
        ties = values + torch.linspace(-1, 1, 65).view(-1, 1) * values / 8
        for x in (numbers, ties, torch.empty(0, 5), torch.empty(5, 0)):
            for scale in (1.0, 3.7, 1e20):
                same(ops.quantize_both, x, torch.tensor([scale]), dtype, fp8_max)
        same(ops.dequantize, codes, torch.tensor([1.0]), torch.float32)
    for shape in ((), (7,), (2, 3, 5), (0, 4), (4, 0)):
        same(ops.amax, torch.randn(shape))


@pytest.mark.parametrize(("m", "n", "k"), [(33, 48, 64), (5, 16, 128), (300, 64, 256)])
def test_products(m: int, n: int, k: int) -> None:
    for i, block in enumerate(BLOCKS[:-1]):
        made = (torch.float32, BF16, torch.float16)[i % 3]
        bias = None, torch.randn(n), torch.randn(n).to(BF16)
        a, b = torch.randn(m, k + 16)[:, :k].to(FORMATS[i % 3][0]), torch.randn(n, k).to(FORMATS[0][0])
        same(ops.scaled_mm, a, b, torch.rand(1), torch.rand(1), bias[i // 2], made, False)
        other = BLOCKS[(0, 0, 3, 3, 5, 5)[i]]
        inverses = scales(m, k, block), scales(n, k, other)
        same(ops.block_mm, a, b, *inverses, bias[i // 2], made, False, block, other)
        same(ops.dequantize, a, inverses[0], BF16, block)


@pytest.mark.parametrize("block", [(0, 0), (1, 0), (128, 128)])
@pytest.mark.parametrize("rows", [256, 160])
def test_stacks(rows: int, block: tuple[int, int]) -> None:
    """Blocks begin anew with each matrix."""
    data = torch.randn(3, rows, 144).to(FORMATS[0][0])
    shape = [3, *(-(-size // side) if side else 1 for size, side in zip(data.shape[1:], block, strict=True))]
    inverse = torch.rand(shape if any(block) else 1)
    same(ops.dequantize, data, inverse, BF16, block)
    if any(block):
        each = [ops.dequantize(*pair, BF16, block) for pair in zip(data, inverse, strict=True)]
        assert torch.equal(ops.dequantize(data, inverse, BF16, block), torch.stack(each))
