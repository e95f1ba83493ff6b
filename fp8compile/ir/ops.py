"""The intermediate representation: a handful of functional operators in the namespace `fp8compile::`.

The passes write them into the joint graph and lower them to ATen before Inductor generates code. Their eager
implementations below, plain torch on any device, are the reference: cold calls run on them (`runtime.calls`).

    amax(x)                                         [..] -> [1] float32
    amax_blocks(x, transposed, block)               [R, C] -> one amax a block of the copy
    current_scale(amax, ...)                        the scale from the tensor's own amax
    inverse(scale)                                  1 / scale, which divides back
    served_inverse(amax, ...)                       the inverse of a scale, as servers compute it
    quantize(x, scale, dtype, fp8_max, transposed)  [R, C] -> FP8 [R, C], or [C, R padded to 16]
    quantize_both(x, scale, dtype, fp8_max)         [R, C] -> both of them
    transposed(x8)                                  FP8 [R, C] -> [C, R padded to 16]
    scaled_mm(a, b, a_inv, b_inv, bias, ...)        [M, K], [N, K] -> [M, N]
    block_mm(a, b, a_inv, b_inv, bias, ...)         the same, where an operand has more than one scale
    dequantize(data, inv, dtype)                    a weight that came in FP8 (`ir.gathered_weight`)
    gather(amaxes)                                  several amaxes as one vector
    raised(amaxes, found, rows)                     amaxes that outlive a call, after a call that found these

Layout: both operands of `scaled_mm` have the contracted dimension last ("K-major", what Hopper's FP8 tensor
cores take). A tensor whose rows are contracted (tokens, in wgrad) is quantized transposed, its rows padded
with zeros to a multiple of 16, so any number of tokens will do.

A tensor has one scale, `[1]`, or one a block: `[rows / block rows, columns / block columns]` of the copy,
rounded up. A block size of 0 stands for the whole dimension. Blocks lie along the contracted dimension, so
each layout of a tensor has its own scales. A cast with `divide` gets the inverses of scales, and divides.

A tensor whose rows are divided into groups (the tokens of experts) is given with the `rows` of `ir.grouped`:
only rows of a group count for its amax, and the columns of its transposed copy are in the order of `rows`. In
the other copy the rows of no group hold any value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compat
from ..errors import Fp8CompileError
from .fx_utils import fakes, is_data
from .products import block_product, product, spread
from .scale import inverse_of, scale_of, served_inverse_of

NAMESPACE = "fp8compile"
# all of them, also those of `grouped` and `merged`, with their reference implementations
OPERATORS: dict[Any, Callable] = {}


def define_op(schema: str, fake=None):
    """Make a function the implementation of the operator `fp8compile::<schema>` on every device; returns the
    operator. `fake` returns an empty result of the right shape; given where that is much quicker (a deep
    model has hundreds of the operator)."""
    name, _, signature = schema.partition("(")

    def define(function):
        torch.library.define(f"{NAMESPACE}::{name}", f"({signature}")
        torch.library.impl(f"{NAMESPACE}::{name}", "CompositeExplicitAutograd")(function)
        operator = getattr(getattr(torch.ops, NAMESPACE), name).default
        OPERATORS[operator] = function
        if fake is not None:
            torch.library.register_fake(f"{NAMESPACE}::{name}", fake)
            fakes[operator] = fake
        return operator

    return define


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


def both_layouts(
    x, scale, dtype, fp8_max, other=None, block=(0, 0), rows=None, late=None, divide=False
) -> tuple[FP8Copy, FP8Copy]:
    """With the arguments of `quantize_both`."""
    plain = FP8Copy(x, scale, dtype, fp8_max, False, tuple(block), rows, divide, 0)
    scale = scale if other is None else other
    return plain, plain._replace(transposed=True, item=1, scale=scale, block=tuple(late or block))


def padded_rows(rows):
    """`rows` (int or SymInt) rounded up to a multiple of 16 (at least 16): columns of a transposed copy."""
    if isinstance(rows, int):
        return max(16, -(-rows // 16) * 16)
    return (rows + 15) // 16 * 16


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype, fp8_max: float, divide: bool = False) -> Tensor:
    """`x * scale`, or `x / scale` with `divide`, in float32, saturated to +-fp8_max, rounded to nearest even;
    inf and NaN become NaN."""
    x = x.to(torch.float32)
    if divide:  # in float64 and rounded once: a compiler may approximate a float32 division
        scaled = (x.to(torch.float64) / scale.to(torch.float64)).to(torch.float32)
    else:
        scaled = x * scale
    scaled = scaled.clamp(-fp8_max, fp8_max)
    return torch.where(x.abs() == float("inf"), float("nan"), scaled).to(dtype)


def cast_into(x: Tensor, scale: Tensor, fp8_max: float, rows: Tensor | None, columns: Tensor | None) -> None:
    """Write the cast of x [R, C] to the memory of its copies, FP8 [R, C] and [C, R]; None: not in this
    layout."""
    for copy, transposed in ((rows, False), (columns, True)):
        if copy is not None:
            made = cast(x, scale, copy.dtype, fp8_max).view(torch.uint8)
            copy.view(torch.uint8).copy_(made.t() if transposed else made)


def blocks(size, block: int):
    """How many blocks cover `size` elements."""
    return 1 if block == 0 else (size + block - 1) // block


def one_number(like: Tensor, *_) -> Tensor:
    return torch.empty(1, dtype=torch.float32, device=like.device)


def _like(amax: Tensor, *_) -> Tensor:
    return torch.empty(amax.shape, dtype=torch.float32, device=amax.device)


def _shape(x: Tensor, transposed: bool, order: Tensor | None) -> list:
    if not transposed:
        return list(x.shape)
    return [x.shape[1], padded_rows(x.shape[0]) if order is None else order.shape[0]]


def ordered(x: Tensor, rows: Tensor) -> Tensor:
    """The rows of x in the order of `rows`, `[P, C]`: zeros where that is negative."""
    if is_data(x.shape[0]):
        x = torch.nn.functional.pad(x, (0, 0, 0, 1))  # there may be none: nobody can ask yet
    elif x.shape[0] == 0:
        return x.new_zeros(rows.shape[0], x.shape[1])
    taken = torch.ops.aten.index.Tensor(x, [rows.clamp(min=0)])
    return torch.where((rows >= 0).unsqueeze(1), taken, torch.zeros((), dtype=x.dtype, device=x.device))


def _amaxes(x: Tensor, transposed: bool, block: Sequence[int], order: Tensor | None = None) -> Tensor:
    rows, columns = _shape(x, transposed, order)
    shape = blocks(rows, block[0]), blocks(columns, block[1])
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _copy(*given: Any) -> Tensor:
    x = FP8Copy(*given)
    return torch.empty(_shape(x.source, x.transposed, x.rows), dtype=x.dtype, device=x.source.device)


def _copies(*given: Any) -> tuple[Tensor, Tensor]:
    plain, late = both_layouts(*given)
    return _copy(*plain.args), _copy(*late.args)


def _product(
    a: Tensor, b: Tensor, _a_inv: Tensor, _b_inv: Tensor, _bias: Tensor | None, out_dtype: torch.dtype, *_
) -> Tensor:
    return torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)


@define_op("amax(Tensor x, Tensor? rows=None) -> Tensor", one_number)
def amax(x: Tensor, rows: Tensor | None = None) -> Tensor:
    x = x if rows is None else ordered(x, rows)
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return x.abs().amax().to(torch.float32).reshape(1)


@define_op("amax_blocks(Tensor x, bool transposed, int[] block, Tensor? rows=None) -> Tensor", _amaxes)
def amax_blocks(x: Tensor, transposed: bool, block: Sequence[int], rows: Tensor | None = None) -> Tensor:
    """The amax of each block of a copy of x `[R, C]`: `[R / block rows, C / block columns]`, rounded up."""
    made = _amaxes(x, transposed, block, rows)
    x = ordered(x, rows) if transposed and rows is not None else x
    copy = (x.t() if transposed else x).abs()
    if x.numel() == 0:
        return torch.zeros_like(made)
    sizes = [size or whole for size, whole in zip(block, copy.shape, strict=True)]
    missing = [made.shape[d] * sizes[d] - copy.shape[d] for d in (0, 1)]
    copy = torch.nn.functional.pad(copy, (0, missing[1], 0, missing[0]))
    return copy.reshape(made.shape[0], sizes[0], made.shape[1], sizes[1]).amax((1, 3)).to(torch.float32)


_CURRENT = "current_scale(Tensor amax, float fp8_max, int margin, bool power_of_2=False) -> Tensor"
current_scale = define_op(_CURRENT, _like)(scale_of)
inverse = define_op("inverse(Tensor scale) -> Tensor", _like)(inverse_of)
_SERVED = "served_inverse(Tensor amax, float fp8_max, float least, bool power_of_2=False) -> Tensor"
served_inverse = define_op(_SERVED, _like)(served_inverse_of)


@define_op(
    "quantize(Tensor x, Tensor scale, ScalarType dtype, float fp8_max, bool transposed, int[] block=[0, 0], "
    "Tensor? rows=None, bool divide=False) -> Tensor",
    _copy,
)
def quantize(*given: Any) -> Tensor:
    copy = FP8Copy(*given)
    x = copy.source
    if copy.transposed and copy.rows is not None:
        x = ordered(x, copy.rows).t()
    elif copy.transposed:
        x = torch.nn.functional.pad(x.t(), (0, padded_rows(x.shape[0]) - x.shape[0]))
    scale = spread(copy.scale, x.shape, copy.block)
    return cast(x, scale, copy.dtype, copy.fp8_max, copy.divide).contiguous()


@define_op(
    "quantize_both(Tensor x, Tensor scale, ScalarType dtype, float fp8_max, Tensor? transposed_scale=None, "
    "int[] block=[0, 0], Tensor? rows=None, int[]? transposed_block=None, bool divide=False) -> "
    "(Tensor, Tensor)",
    _copies,
)
def quantize_both(*given: Any) -> tuple[Tensor, Tensor]:
    """`transposed_scale`, `transposed_block`: those of the transposed copy; None: `scale`, `block`."""
    plain, late = both_layouts(*given)
    return quantize(*plain.args), quantize(*late.args)


def _transposed(x: Tensor) -> Tensor:
    return torch.empty(x.shape[1], padded_rows(x.shape[0]), dtype=x.dtype, device=x.device)


def transposition(x: Tensor) -> Tensor:
    """The transposed copy of FP8 values. Rows are padded with zeros, which all FP8 formats encode as 0."""
    rows = x.shape[0]
    missing = padded_rows(rows) - rows
    copy = x.view(torch.uint8).t()
    if not (isinstance(missing, int) and missing == 0):
        copy = torch.nn.functional.pad(copy, (0, missing))
    return copy.contiguous().view(x.dtype)


transposed = define_op("transposed(Tensor x) -> Tensor", _transposed)(transposition)

_PRODUCT = (
    "Tensor a, Tensor b, Tensor a_inv, Tensor b_inv, Tensor? bias, ScalarType out_dtype, bool fast_accum"
)
scaled_mm = define_op(f"scaled_mm({_PRODUCT}) -> Tensor", _product)(product)
block_mm = define_op(f"block_mm({_PRODUCT}, int[] a_block, int[] b_block) -> Tensor", _product)(block_product)


def _dequantized(data: Tensor, _inv: Tensor, dtype: torch.dtype, *_) -> Tensor:
    return torch.empty(data.shape, dtype=dtype, device=data.device)


def values(data: Tensor, inv: Tensor, dtype: torch.dtype, block: Sequence[int] = (0, 0)) -> Tensor:
    """FP8 values [R, C] times the inverses of their scales, one for all or one a block."""
    return (data.to(torch.float32) * spread(inv, data.shape, block)).to(dtype)


_DEQUANTIZE = "dequantize(Tensor data, Tensor inv, ScalarType dtype, int[] block=[0, 0]) -> Tensor"
dequantize = define_op(_DEQUANTIZE, _dequantized)(values)
gather = define_op("gather(Tensor[] amaxes) -> Tensor")(lambda amaxes: torch.cat(amaxes))


# Numbers of `raised`'s amaxes from one to the next. With four, each is 16-byte aligned, so that one kernel of
# ours serves all
APART = 4
UNSEEN = -1  # an amax that no call has raised. As integers, the bits of all amaxes are above it


def _raised(amaxes: Tensor, *_) -> Tensor:
    if compat.autograd.in_compiled_autograd():
        raise Fp8CompileError(
            "this model was compiled with delayed scaling before compiled autograd was on, which now takes "
            "over its backward: its scales would be wrong. Switch compiled autograd on before the first "
            "call, or use recipe 'tensorwise'"
        )
    return torch.empty_like(amaxes)


def raised_of(amaxes: Tensor, found: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """`amaxes`, int32 `[rows, APART]`, raised to `found`, float32 [n] each. The first column has the bits of
    the largest amaxes. `rows`: of the first of each, ascending."""
    pieces, end = [], 0
    for vector, row in zip(found, rows, strict=True):
        if row > end:
            pieces.append(amaxes.new_full((row - end,), UNSEEN))
        pieces.append(vector.view(torch.int32).bitwise_and(0x7FFFFFFF))  # a NaN may have a sign
        end = row + vector.shape[0]
    if not pieces:
        return amaxes.clone()
    seen = torch.nn.functional.pad(torch.cat(pieces), (0, amaxes.shape[0] - end), value=UNSEEN)
    return torch.maximum(amaxes, torch.nn.functional.pad(seen.unsqueeze(1), (0, APART - 1), value=UNSEEN))


raised = define_op("raised(Tensor amaxes, Tensor[] found, int[] rows) -> Tensor", _raised)(raised_of)
