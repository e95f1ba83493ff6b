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
from .products import ScaledProduct
from .schemas import FP8Copy, copies_of

logger = get_logger(__name__)

MATRIX = (c_void_p, c_int64, c_int64, c_int64)  # with its rows, columns, and elements from a row to the next
BLOCKS = (c_void_p, c_int64, c_int64, c_int64, c_int64)
FACTOR = (c_void_p, c_int64)
SIGNATURES = {  # after a choice of type, and before the number of threads
    "fp8_encode": (*MATRIX, *BLOCKS, c_int64, c_int64, c_float, c_void_p, c_void_p, c_int64),
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


def _cast(made: FP8Copy, x: Tensor, plain: bool, turned: bool) -> tuple[Any, Any]:
    """Both layouts of x, or the one that is asked for."""
    x, *sizes = _matrix(_numbers(x))
    padded = ops.padded_rows(x.shape[0])
    copy = x.new_empty(x.shape, dtype=made.dtype) if plain else None
    other = x.new_empty([x.shape[1], padded], dtype=made.dtype) if turned else None
    scales = _blocks(made.scale, made.block, x.shape, not plain)
    kind, wide = x.dtype == torch.bfloat16, made.dtype == E5M2.dtype
    _run("fp8_encode", kind, x, *sizes, *scales, wide, made.divide, made.fp8_max, copy, other, padded)
    return copy, other


def quantize(*given: Any) -> Tensor:
    (made,) = copies_of(ops.quantize, given)
    if made.dtype not in FORMATS:
        return ops.OPERATORS[ops.quantize](*given)
    if not made.transposed:
        return _cast(made, made.source, True, False)[0]
    x = made.source if made.rows is None else ops.ordered(made.source, made.rows)
    return _cast(made, x, False, True)[1]


def quantize_both(*given: Any) -> tuple[Tensor, Tensor]:
    plain, late = copies_of(ops.quantize_both, given)
    one = plain.scale is late.scale and plain.scale.dim() == 1
    if one and plain.dtype in FORMATS and plain.rows is None:
        return _cast(plain, plain.source, True, True)
    return quantize(*plain.args), quantize(*late.args)


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
    if data.dim() == 2:
        return _values(data, inv, block).to(dtype)
    if inv.dim() > 1 and block[0] and data.shape[1] % block[0]:  # blocks begin anew with each matrix
        return ops.values(data, inv, dtype, block)
    one = data.reshape(-1, data.shape[-1]), inv.reshape(-1, inv.shape[-1]) if inv.dim() > 1 else inv
    return _values(*one, block).to(dtype).view(data.shape)


def scaled_mm(*given: Any) -> Tensor:
    x = ScaledProduct(*given)
    return _product(x, None, None, x.a_inv * x.b_inv, None)


def block_mm(*given: Any) -> Tensor:
    x = ScaledProduct(*given)
    of_rows, of_columns = x.a_block[1] == 0, x.b_block[1] == 0
    rows = x.a_inv.reshape(-1) if of_rows else x.a_inv.new_ones(1)
    columns = x.b_inv.reshape(-1) if of_columns else None
    return _product(x, None if of_rows else x.a_inv, None if of_columns else x.b_inv, rows, columns)


def _product(
    given: ScaledProduct,
    a_inv: Tensor | None,
    b_inv: Tensor | None,
    of_rows: Tensor,
    of_columns: Tensor | None,
) -> Tensor:
    """a @ b^T, times factors, one a row and column or one for all, plus bias, rounded once."""
    x = _values(given.a, a_inv, given.a_block, _memory("a", *given.a.shape))
    y = _values(given.b, b_inv, given.b_block, _memory("b", *given.b.shape))
    out = products.multiplied(x, y, _memory("product", x.shape[0], y.shape[0]))
    kind = torch.bfloat16 if given.out_dtype == torch.bfloat16 else torch.float32
    made = torch.empty(out.shape, dtype=kind)
    rows, columns = map(_factor, (of_rows, of_columns))
    bias = None if given.bias is None else given.bias.to(torch.float32).contiguous()
    _run("fp8_finish", kind == torch.bfloat16, out, *out.shape, *rows, *columns, bias, made)
    return made.to(given.out_dtype)


def _factor(x: Tensor | None) -> tuple[Any, int]:
    return (None, 0) if x is None else (x, x.stride(0) if x.numel() > 1 else 0)
