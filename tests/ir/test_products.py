"""The reference operators' matmuls on a GPU, without one: what they call there, and the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fp8compile.ir import grouped, ops, products
from tests.support.harness import sqnr
from tests.support.operands import BF16, F32, LINE, MX_BLOCK, MX_TILE, SQUARE, ends, operand
from tests.support.reference_casts import FNUZ, OCP

aten = torch.ops.aten
ENCODINGS = tuple(dtype for dtype, _ in (*OCP, *FNUZ))
ROW, WHOLE = (1, 0), (0, 0)
PAIRS = [(WHOLE, WHOLE), (ROW, ROW), (ROW, WHOLE), (LINE, SQUARE), (LINE, LINE)]
PAIRS += [(MX_BLOCK, MX_TILE), (ROW, SQUARE)]


class Seen(TorchDispatchMode):
    """The operators that were called, and the dtype and number of elements of each tensor that they made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[torch.dtype]]] = []
        self.made: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = [x for x in args if isinstance(x, Tensor)]
        if isinstance(result, Tensor):  # not the device of one
            self.calls.append((function, [x.dtype for x in given]))
            if not any(x.untyped_storage()._cdata == result.untyped_storage()._cdata for x in given):
                self.made.append((result.dtype, result.numel()))
        return result


def on_cuda(call: Callable[..., Tensor], *given: Tensor) -> tuple[Seen, Tensor]:
    """What a call does with CUDA tensors like these."""
    there = mock.patch("torch._subclasses.fake_tensor.init_gpu_context", lambda *_: None, create=True)
    with there, FakeTensorMode(), Seen() as seen:
        moved = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in given]
        return seen, call(*moved)


@pytest.mark.parametrize(
    ("pair", "bias"), [*zip(PAIRS, itertools.cycle([F32, None, BF16]), strict=False)], ids=str
)
def test_what_a_matmul_calls_on_cuda(pair: tuple[Any, Any], bias: torch.dtype | None) -> None:
    """One matmul, of a bf16 copy of each operand; no float32 tensor is larger than the result, which is
    scaled in place."""
    m, n, k = 48, 80, 528  # no size is a multiple of 128
    (a, a_inv), (b, b_inv) = operand(m, k, pair[0]), operand(n, k, pair[1])
    more = [] if bias is None else [torch.zeros(n, dtype=bias)]

    def call(a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, bias: Tensor | None = None) -> Tensor:
        if pair == (WHOLE, WHOLE):
            return products.product(a, b, a_inv, b_inv, bias, BF16, False)
        return products.block_product(a, b, a_inv, b_inv, bias, BF16, False, *pair)

    seen, result = on_cuda(call, a, b, a_inv, b_inv, *more)
    assert result.shape == (m, n) and result.dtype == BF16
    assert [call for call in seen.calls if "mm" in call[0]._opname] == [(aten.mm.dtype, [BF16, BF16])]
    assert len([size for dtype, size in seen.made if dtype == BF16 and size > m * n]) == 2
    assert all(size <= m * n for dtype, size in seen.made if dtype.itemsize >= 4)
    assert sum(dtype == F32 and size == m * n for dtype, size in seen.made) == 1


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The GPU's branch, on the CPU, where torch has no `mm.dtype`: an exact one. Yields its operands."""
    calls: list[tuple[Tensor, Tensor]] = []

    def exact(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        calls.append((a, b))
        return (a.double() @ b.double()).to(dtype)

    monkeypatch.setattr(products, "on_tensor_cores", lambda x: True)
    for name in ("scaled_mm", "block_mm"):  # a CPU may have others, of C++
        monkeypatch.setattr(ops, name, ops.OPERATORS[getattr(ops, name)])
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm.dtype", exact, "CPU")
        yield calls


def whole_numbers(rows: int, k: int, dtype: torch.dtype, seed: int) -> Tensor:
    """FP8 values whose sums of products are exact in float32, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-200, 201, (rows, k), generator=generator).float().to(dtype)


def operators(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Calls of the three operators that multiply, with arguments. All results are exact in float32."""
    k = 144
    a, b, stack = (whole_numbers(rows, k, dtype, seed) for seed, rows in enumerate((48, 80, 3 * 80)))
    half, small = torch.tensor([0.5]), torch.tensor([2.0**-9])
    calls: list[tuple[Any, ...]] = [(ops.scaled_mm, a, b, half, small, None, F32, False)]
    for pair in PAIRS[1:]:
        inverses = [operand(rows, k, block)[1] for rows, block in zip((48, 80), pair, strict=True)]
        inverses = [torch.where(inverse > 1, 2.0, 0.5) for inverse in inverses]
        calls.append((ops.block_mm, a, b, *inverses, torch.arange(80).to(BF16), BF16, False, *pair))
    one, line, tiles = torch.ones(1), torch.tensor([[0.5, 2.0]]), torch.tensor([[[4.0, 0.25]]])
    of_a, of_b, product = line.expand(48, 2), line.expand(80, 2), grouped.grouped_mm
    stack, tiles, offs = stack.view(3, 80, k), tiles.expand(3, 1, 2), ends([16, 0, 32])
    for weights in (stack, stack.transpose(1, 2).contiguous().transpose(1, 2)):
        calls.append((product, a, weights, one, one, offs, F32, False, WHOLE, WHOLE))
        calls.append((product, a, weights, of_a, tiles, offs, F32, False, LINE, SQUARE))
    columns = ends([128, 0, 16])
    calls.append((product, a, b, one, one, columns, BF16, False, WHOLE, WHOLE))
    calls.append((product, a, b, of_a, of_b, columns, BF16, False, LINE, LINE))
    return calls


@pytest.mark.parametrize("dtype", ENCODINGS, ids=str)
def test_the_same_bits_as_on_a_cpu(
    dtype: torch.dtype, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where float32 sums are exact, bf16 copies give the bits of float32 ones; and every operator multiplies
    in one place."""
    expected = [operator(*given) for operator, *given in operators(dtype)]
    calls = request.getfixturevalue("as_on_cuda")
    monkeypatch.setattr(torch, "mm", None)  # nobody else multiplies
    for (operator, *given), before in zip(operators(dtype), expected, strict=True):
        calls.clear()
        assert torch.equal(operator(*given), before) and before.any()
        assert len(calls) == (2 if operator is grouped.grouped_mm else 1)  # none for the empty group
        assert all(x.dtype == BF16 for pair in calls for x in pair)


@pytest.mark.parametrize("pair", [(LINE, SQUARE), (LINE, LINE), (ROW, SQUARE)], ids=str)
def test_scales_of_blocks_that_are_no_powers_of_two(
    pair: tuple[Any, Any], request: pytest.FixtureRequest
) -> None:
    """Values are rounded once to bf16: an error of about 52 dB, where FP8's own is 28."""
    (a, a_inv), (b, b_inv) = operand(200, 528, pair[0]), operand(144, 528, pair[1], seed=1)
    generator = torch.Generator().manual_seed(2)
    inverses = [x * (1 + torch.rand(x.shape, generator=generator)) for x in (a_inv, b_inv)]
    given = a, b, *inverses, None, F32, False, *pair
    expected = products.block_product(*given)
    request.getfixturevalue("as_on_cuda")
    assert 50 < sqnr(expected, products.block_product(*given)) < 80
