"""The operators on a CPU by C++ of ours: one walk over a tensor, where plain torch takes many.

`load` puts them in the place of the reference operators, whose results are the same to the bit, but for the
signs of NaN. It is called where Inductor has compiled for a CPU, and takes Inductor's compiler and flags. A
graph for a CPU calls operators: of plain torch in their place, Inductor would write many loops, each of which
takes a C++ compiler up to a second.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..devices.formats import E4M3, E5M2
from ..logs import get_logger, say_once
from . import ops, products

logger = get_logger(__name__)

MATRIX = (c_void_p, c_int64, c_int64, c_int64)  # with its rows, columns, and elements from a row to the next
BLOCKS = (c_void_p, c_int64, c_int64, c_int64, c_int64)
FACTOR = (c_void_p, c_int64)
SIGNATURES = {  # after a choice of type, and before the number of threads
    "fp8_encode": (*MATRIX, *BLOCKS, c_int64, c_float, c_void_p, c_void_p, c_int64),
    "fp8_decode": (*MATRIX, *BLOCKS, c_void_p),
    "fp8_amaxes": (*MATRIX, *BLOCKS),
    "fp8_finish": (c_void_p, c_int64, c_int64, *FACTOR, *FACTOR, c_void_p, c_void_p),
}
FORMATS = (E4M3.dtype, E5M2.dtype)  # what the C++ knows; the others are AMD GPUs' own
MOST_KEPT = 2**23  # numbers of a tensor that a thread keeps the memory of
ALL = (0, 0)  # the block that is the whole matrix


def load() -> None:
    """From here on, the operators on a CPU run in C++. Compiles it, if that was not done on this machine."""
    with _lock:
        _load()


@functools.cache
def _load() -> None:
    try:
        _library()
    except Exception as error:  # whatever a compiler may say
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        slow = f"fp8: casts on this CPU are slow, because their C++ was not compiled: {why}"
        say_once(logger, logging.WARNING, slow)
        return
    for function in (amax, amax_blocks, quantize, quantize_both, scaled_mm, block_mm, dequantize):
        torch.library.impl(f"{ops.NAMESPACE}::{function.__name__}", "CPU")(function)


_lock = threading.Lock()


@functools.cache
def _library() -> Any:
    source = Path(__file__).with_name("cpu_kernels.cpp").read_text(encoding="utf-8")
    library = compat.inductor.cpp_library(source)
    for name, kinds in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = (c_int64, *kinds, c_int64), None
    return library


def _run(name: str, kind: bool, *args: Any) -> None:
    pointers = (x.data_ptr() if isinstance(x, Tensor) else x for x in args)
    getattr(_library(), name)(kind, *pointers, torch.get_num_threads())


def _numbers(x: Tensor) -> Tensor:
    """In a dtype that the C++ reads."""
    return x if x.dtype in (torch.float32, torch.bfloat16) else x.to(torch.float32)


def _matrix(x: Tensor) -> tuple[Any, ...]:
    """[R, C], or a copy of it whose rows lie in memory, as arguments."""
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, *x.shape, x.stride(0)


def _blocks(one_each: Tensor, block: Sequence[int], shape: Sequence[int], turned: bool) -> tuple[Any, ...]:
    """One number a block of a copy, as arguments. `shape`: of the matrix that is walked over, of which the
    copy may be `turned`."""
    if one_each.dim() == 1:
        return one_each, *(max(size, 1) for size in shape), 0, 0
    (high, wide), (down, right) = block, one_each.stride()
    if turned:
        high, wide, down, right = wide, high, right, down
    high, wide = (size or max(whole, 1) for size, whole in zip((high, wide), shape, strict=True))
    return one_each, high, wide, down, right


def amax(x: Tensor, rows: Tensor | None = None) -> Tensor:
    x = _numbers(x if rows is None else ops.ordered(x, rows))
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1]) if x.dim() and x.numel() else x.reshape(1, -1)
    return _amaxes(x.t() if x.stride(0) == 1 else x, x.new_zeros(1, dtype=torch.int32), ALL, False)


def amax_blocks(x: Tensor, transposed: bool, block: Sequence[int], rows: Tensor | None = None) -> Tensor:
    made = ops._amaxes(x, transposed, block, rows)
    x = ops.ordered(x, rows) if transposed and rows is not None else x
    return _amaxes(_numbers(x), torch.zeros_like(made, dtype=torch.int32), block, transposed)


def _amaxes(x: Tensor, bits: Tensor, block: Sequence[int], turned: bool) -> Tensor:
    x, *sizes = _matrix(x)
    _run("fp8_amaxes", x.dtype == torch.bfloat16, x, *sizes, *_blocks(bits, block, x.shape, turned))
    return bits.view(torch.float32)


def _cast(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    fp8_max: float,
    block: Sequence[int],
    plain: bool,
    turned: bool,
) -> tuple[Any, Any]:
    """Both layouts of x, or the one that is asked for."""
    x, *sizes = _matrix(_numbers(x))
    padded = ops.padded_rows(x.shape[0])
    copy = x.new_empty(x.shape, dtype=dtype) if plain else None
    other = x.new_empty([x.shape[1], padded], dtype=dtype) if turned else None
    scales = _blocks(scale, block, x.shape, not plain)
    kind = x.dtype == torch.bfloat16
    _run("fp8_encode", kind, x, *sizes, *scales, dtype == E5M2.dtype, fp8_max, copy, other, padded)
    return copy, other


def quantize(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    fp8_max: float,
    transposed: bool,
    block: Sequence[int] = ALL,
    rows: Tensor | None = None,
) -> Tensor:
    if dtype not in FORMATS:
        return ops.OPERATORS[ops.quantize](x, scale, dtype, fp8_max, transposed, block, rows)
    if not transposed:
        return _cast(x, scale, dtype, fp8_max, block, True, False)[0]
    if rows is not None:
        x = ops.ordered(x, rows)
    return _cast(x, scale, dtype, fp8_max, block, False, True)[1]


def quantize_both(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    fp8_max: float,
    transposed_scale: Tensor | None = None,
    block: Sequence[int] = ALL,
    rows: Tensor | None = None,
    transposed_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    if dtype in FORMATS and scale.dim() == 1 and transposed_scale is None and rows is None:
        return _cast(x, scale, dtype, fp8_max, ALL, True, True)
    other = scale if transposed_scale is None else transposed_scale
    plain = quantize(x, scale, dtype, fp8_max, False, block)
    return plain, quantize(x, other, dtype, fp8_max, True, transposed_block or block, rows)


class _Memory(threading.local):
    """What a product needs for a moment, float32: memory that is new costs more than to write it."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        if size > MOST_KEPT:
            return torch.empty(shape, dtype=torch.float32)
        if name not in self.kept or self.kept[name].numel() < size:
            with torch.inference_mode(False):
                self.kept[name] = torch.empty(size, dtype=torch.float32)
        return self.kept[name][:size].view(shape)


_memory = _Memory()


def _values(
    copy: Tensor, inverse: Tensor | None = None, block: Sequence[int] = ALL, made: Tensor | None = None
) -> Tensor:
    """FP8 values in float32 (in `made`), times the inverses of their scales, if they are given."""
    if copy.dtype not in FORMATS:
        wide = copy.to(torch.float32)
        return wide if inverse is None else wide * ops.spread(inverse, copy.shape, block)
    made = copy.new_empty(copy.shape, dtype=torch.float32) if made is None else made
    copy, *sizes = _matrix(copy)
    factors = (None, 1, 1, 0, 0) if inverse is None else _blocks(inverse, block, copy.shape, False)
    _run("fp8_decode", copy.dtype == E5M2.dtype, copy, *sizes, *factors, made)
    return made


def dequantize(data: Tensor, inv: Tensor, dtype: torch.dtype, block: Sequence[int] = ALL) -> Tensor:
    return _values(data, inv, block).to(dtype)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_inv: Tensor,
    b_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    return _product(a, None, ALL, b, None, ALL, a_inv * b_inv, None, bias, out_dtype)


def block_mm(
    a: Tensor,
    b: Tensor,
    a_inv: Tensor,
    b_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    a_block: Sequence[int],
    b_block: Sequence[int],
) -> Tensor:
    of_rows, of_columns = a_block[1] == 0, b_block[1] == 0
    rows = a_inv.reshape(-1) if of_rows else a_inv.new_ones(1)
    columns = b_inv.reshape(-1) if of_columns else None
    left, right = (None if of_rows else a_inv), (None if of_columns else b_inv)
    return _product(a, left, a_block, b, right, b_block, rows, columns, bias, out_dtype)


def _product(
    a: Tensor,
    a_inv: Tensor | None,
    a_block: Sequence[int],
    b: Tensor,
    b_inv: Tensor | None,
    b_block: Sequence[int],
    of_rows: Tensor,
    of_columns: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """a @ b^T, times factors, one a row and column or one for all, plus bias, rounded once."""
    x = _values(a, a_inv, a_block, _memory("a", *a.shape))
    y = _values(b, b_inv, b_block, _memory("b", *b.shape))
    out = products.multiplied(x, y, _memory("product", a.shape[0], b.shape[0]))
    kind = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    made = torch.empty(out.shape, dtype=kind)
    rows, columns = map(_factor, (of_rows, of_columns))
    bias = None if bias is None else bias.to(torch.float32).contiguous()
    _run("fp8_finish", kind == torch.bfloat16, out, *out.shape, *rows, *columns, bias, made)
    return made.to(out_dtype)


def _factor(x: Tensor | None) -> tuple[Any, int]:
    return (None, 0) if x is None else (x, x.stride(0) if x.numel() > 1 else 0)
