"""Where an element of a tensor is, when a kernel walks a matrix [R, C] row by row and column by column.

A tensor in a fused chain is a reshaped view of that matrix ([B, T, C]), a tensor that is broadcast to it
([C], [T, C], [B, T, 1]) or a permuted view. Its *index* has an entry for each dimension, which selects the
element: a `Term` of the row or of the column number, or None for a dimension of one element. The index of a
result determines those of its operands. The index of a tensor in memory, with the tensor's strides,
determines the address.

    x [B, T, C] of B*T rows: (row // T, row % T, col)
    bias [C]: (col,)
    rstd [B, T, 1]: (row // T, row % T, None)

The rows of another matrix may be looked up: in x[i], x has the index (i, col), where i stands for i[row].

A rotary embedding exchanges the halves of a head: cat([x[.., 64:], -x[.., :64]], -1). Both parts have the
index (.., col // 128, col % 64), and the kernel takes the part that col % 128 says. The slices of x, which is
as wide as the whole, are x at (.., (col + 64) % 128) in both parts, so x is read once. (In memory that is
col % 128 + 64 - col // 64 % 2 * 128: so addresses take fewer instructions than with another remainder.)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils._sympy.functions import FloorDiv

from ..ir import ops
from ..ir.fx_utils import FLOATS, PERMUTES, arg, aten, is_tensor, order_of, value
from ..ir.fx_utils import VIEWS as RESHAPES
from .composites import composite
from .expressions import supported
from .scales import FROM_AMAX, of_amax

VIEWS = (*RESHAPES, *PERMUTES, aten.expand.default)  # compute nothing: the operand, at another index
ELSEWHERE = (*VIEWS, aten.index.Tensor, aten.slice.Tensor, *FROM_AMAX)  # one operand, at its own index
REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.var_mean.correction, ops.amax_blocks)


@dataclass(frozen=True)
class Term:
    """`number // divisor % size + shift` of the row or column number (size None: no remainder is needed).
    If it is `turned`, of the number in the other half of `size`."""

    axis: str | Node  # "row", "col", or a tensor with a number for each row: the row of another matrix
    divisor: sympy.Expr
    size: sympy.Expr | None
    shift: int = 0
    turned: bool = False
    part: tuple[int, int] | None = None  # of a whole: the first column, and the width of the whole


Index = tuple[Term | None, ...]


def size_of(size: Any) -> sympy.Expr:
    """int, SymInt or expression -> expression."""
    if isinstance(size, int):
        return _integer(size)
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.sympify(size)


def quotient(size: sympy.Expr, by: int) -> sympy.Expr:
    """size // by."""
    return sympy.Integer(int(size) // by) if size.is_Integer else FloorDiv(size, by)


def quotient_up(size: sympy.Expr, by: int) -> sympy.Expr:
    """size / by, rounded up."""
    return quotient(size + by - 1, by)


_integer = functools.lru_cache(maxsize=4096)(sympy.Integer)


def sizes(node: Node) -> tuple[sympy.Expr, ...]:
    return tuple(map(size_of, node.meta["val"].shape))


def product(factors: Any) -> sympy.Expr:
    return sympy.Mul(*factors)


def padded_rows(rows: sympy.Expr) -> sympy.Expr:
    """`ops.padded_rows` of an expression."""
    padded = quotient(rows + 15, 16) * 16
    return sympy.Integer(max(16, int(padded))) if padded.is_Integer else padded


def same(a: sympy.Expr, b: sympy.Expr) -> bool:
    return a == b or sympy.expand(a - b) == 0


@dataclass(frozen=True)
class Domain:
    """The matrix [rows, columns] that a kernel walks. `order`: the padded order in which it walks rows that
    are divided into groups (`ir.grouped`)."""

    rows: sympy.Expr
    columns: sympy.Expr
    order: Node | None = None

    @property
    def walked(self) -> sympy.Expr:
        """How many rows programs walk over, with padding: the columns of a transposed copy."""
        return padded_rows(self.rows) if self.order is None else sizes(self.order)[0]

    @functools.lru_cache(maxsize=4096)  # noqa: B019  # domains are values, and few
    def full(self, shape: tuple[sympy.Expr, ...]) -> Index | None:
        """The index of a tensor that holds the matrix in row-major order; None if its dimensions do not split
        into those of the rows and those of the columns."""
        for split in range(len(shape) + 1):
            if same(product(shape[:split]), self.rows) and same(product(shape[split:]), self.columns):
                return (*unravel("row", shape[:split]), *unravel("col", shape[split:]))
        return None

    def index(self, node: Node) -> Index:
        """The same of a node that is known to hold the matrix."""
        index = self.full(sizes(node))
        assert index is not None, node
        return index

    def is_full(self, node: Node) -> bool:
        """True if a node has the matrix's elements, in dimensions that split into those of rows and those of
        columns."""
        return is_tensor(node) and self.full(sizes(node)) is not None

    def reshaped(self, index: Index, shape: tuple, source: tuple) -> Index | None:
        """The index of the source of a reshape: the same element in row-major order."""
        if index == self.full(shape):
            return self.full(source)
        for axis, extent in (("row", self.rows), ("col", self.columns)):
            if index == unravel(axis, shape) and same(product(source), extent):
                return unravel(axis, source)
        kept = [(term, size) for term, size in zip(index, shape, strict=True) if size != 1]
        wanted = [size for size in source if size != 1]
        if [size for _, size in kept] != wanted:
            return None
        terms = iter(kept)
        return tuple(None if size == 1 else next(terms)[0] for size in source)

    def operands(self, node: Node, index: Index) -> list[tuple[Node, Index] | Any] | None:
        """The arguments of a node, tensors with their index; None if it cannot be computed in place."""
        if node.op != "call_function":
            return None
        if node.target in ELSEWHERE:
            found = self._elsewhere(node, index)
            return None if found is None else [(arg(node, 0), found)]
        if node.target is aten.cat.default:
            parts = self.parts(node, index)
            if parts is None:
                return None
            return [(x, (*index[:-1], part)) for x, part in zip(arg(node, 0), parts, strict=True)]
        if not supported(node):
            return None
        if whole := composite(node):
            return [(x, _broadcast(index, sizes(node), sizes(x))) for x in whole.arguments]
        if node.target is ops.dequantize:
            return self._dequantized(node, index)
        return [
            (x, _broadcast(index, sizes(node), sizes(x))) if isinstance(x, Node) else x
            for x in node.args[: 1 if node.target in _ONE_OPERAND else None]
            if not isinstance(x, (list, tuple))
        ]

    def _elsewhere(self, node: Node, index: Index) -> Index | None:
        """The index of the operand of a node that computes nothing, or a number a row (scale or inverse)."""
        if node.target in RESHAPES:
            return self.reshaped(index, sizes(node), sizes(arg(node, 0)))
        if node.target in PERMUTES:
            order = order_of(node)
            return tuple(index[order.index(d)] for d in range(len(order)))
        if node.target is aten.expand.default:
            return _broadcast(index, sizes(node), sizes(arg(node, 0)))
        if node.target is aten.index.Tensor:
            return self._looked_up(node, index)
        if node.target is aten.slice.Tensor:
            return self._sliced(node, index)
        return index if index == self.row_index(node) else None

    def _sliced(self, node: Node, index: Index) -> Index | None:
        """The index of the source of a slice of its last dimension. None for a slice that is a matrix by
        itself, which lies in memory as a rule."""
        given: tuple[Any, ...] = (*node.args, *(None, 0, None, None, 1)[len(node.args) :])
        source, dim, start, end, step = given
        width, term = sizes(source)[-1], index[-1]
        last = dim in (-1, len(index) - 1)
        if not last or step != 1 or term is None or not width.is_Integer or self.is_full(node):
            return None
        if not all(isinstance(x, (int, type(None))) for x in (start, end)):
            return None
        first = slice(start, end).indices(int(width))[0]
        begin, whole = term.part or (0, 0)
        if whole == width and 2 * (first - begin) % whole == 0 and _of_one_part(node):
            return (*index[:-1], replace(term, size=width, turned=first != begin, part=None))
        return (*index[:-1], replace(term, shift=term.shift + first, part=None))

    def parts(self, node: Node, index: Index) -> list[Term] | None:
        """The last terms of the indices of the parts that a node puts side by side. None unless they are
        equally wide and lie along the last dimension, as the halves of a rotation do."""
        parts, whole, term = arg(node, 0), sizes(node)[-1], index[-1]
        dim = arg(node, 1) if len(node.args) > 1 else 0
        widths = {sizes(x)[-1] for x in parts}
        if dim not in (-1, len(index) - 1) or not whole.is_Integer or len(widths) > 1:
            return None
        if term is None or replace(term, part=None) != Term("col", sympy.Integer(1), whole):
            return None
        width = widths.pop()
        return [replace(term, size=width, part=(i * int(width), int(whole))) for i in range(len(parts))]

    def _looked_up(self, node: Node, index: Index) -> Index | None:
        """The index of x in x[i], rows of x; None for any other lookup."""
        source, given = arg(node, 0), arg(node, 1)
        rows = given[0] if len(given) == 1 else None
        if not isinstance(rows, Node) or rows.meta["val"].dtype not in (torch.int32, torch.int64):
            return None
        if (len(sizes(source)), len(sizes(rows))) != (2, 1) or self.row_index(rows) is None:
            return None
        if index != self.full(sizes(node)) or index[0] is None:
            return None
        return Term(rows, sympy.Integer(1), None), index[1]

    def _dequantized(self, node: Node, index: Index) -> list[tuple[Node, Index]] | None:
        """FP8 values with their index, and the inverses of their scales: one for all, or one a block."""
        data, inverse = node.args[:2]
        if inverse.meta["val"].dim() == 1:  # type: ignore[union-attr]
            return [(data, index), (inverse, (None,))]  # type: ignore[list-item]
        if len(index) != 2:
            return None  # a stack of matrices
        scales: list[Term | None] = []
        for term, block, count in zip(index, arg(node, 3), sizes(inverse), strict=True):  # type: ignore[arg-type]
            if count == 1 or term is None:
                scales.append(None)
            elif isinstance(term.axis, str) and (term.divisor, term.size, term.shift % block) == (1, None, 0):
                scales.append(Term(term.axis, sympy.Integer(block), None, term.shift // block))
            else:
                return None
        return [(data, index), (inverse, tuple(scales))]  # type: ignore[list-item]

    def reduction(self, node: Node) -> tuple[Node, bool] | None:
        """(source, whether there is one result a row) of a sum, mean, variance or amax over one of the two
        dimensions; None for any other node."""
        if node.op != "call_function" or node.target not in REDUCTIONS:
            return None
        source = arg(node, 0)
        if not is_tensor(source) or value(source).dtype not in FLOATS:
            return None
        index = self.full(sizes(source))
        if node.target is ops.amax_blocks:
            return (source, True) if index is not None and of_amax(node).granularity == "row" else None
        over = arg(node, 1) if len(node.args) > 1 else None
        if index is None or over is None or set(node.kwargs) - {"dtype", "correction", "keepdim"}:
            return None
        if node.kwargs.get("dtype") not in (None, torch.float32):
            return None
        dims = {d % len(index) for d in over}
        axes = [term.axis if term else None for term in index]
        for axis in ("col", "row"):
            wanted = {d for d, a in enumerate(axes) if a == axis}
            if wanted and wanted <= dims and all(axes[d] in (axis, None) for d in dims):
                return source, axis == "col"
        return None

    def row_index(self, node: Node) -> Index | None:
        """The index of a result with one element a row; None if the node has another number of elements."""
        return unravel("row", sizes(node)) if same(product(sizes(node)), self.rows) else None

    def index_of_row(self, node: Node) -> Index:
        """The same of a node that is known to have one element a row."""
        index = self.row_index(node)
        assert index is not None, node
        return index

    def shift(self, node: Node, index: Index) -> sympy.Expr:
        """The part of the offset of an element that is the same for all elements."""
        pairs = zip(index, map(size_of, node.meta["val"].stride()), strict=True)
        return sympy.Add(*(term.shift * stride for term, stride in pairs if term is not None))

    def turn(self, node: Node, index: Index) -> tuple[int, sympy.Expr]:
        """(width, stride): to the element in the other half of so many columns; (0, 0) for none."""
        pairs = zip(index, map(size_of, node.meta["val"].stride()), strict=True)
        found = [(term.size or 0, stride) for term, stride in pairs if term is not None and term.turned]
        return (int(found[0][0]), found[0][1]) if found else (0, sympy.Integer(0))

    def address(
        self, node: Node, index: Index
    ) -> dict[tuple[str | Node, sympy.Expr, sympy.Expr | None], sympy.Expr]:
        """The offset of an element from a tensor's first without its `shift` and `turn`, as terms {(axis,
        divisor, size): stride}. Neighbouring dimensions are merged into one term."""
        pairs = zip(index, map(size_of, node.meta["val"].stride()), strict=True)
        terms = [(term, stride) for term, stride in pairs if term is not None and stride != 0]
        merged: dict[tuple, sympy.Expr] = {}
        for axis in dict.fromkeys(["row", "col", *(term.axis for term, _ in terms)]):
            mine = sorted((x for x in terms if x[0].axis == axis), key=lambda x: -_magnitude(x[0].divisor))
            done: list[tuple[Term, sympy.Expr]] = []
            for term, stride in mine:
                if done:
                    outer, outer_stride = done[-1]
                    fits = term.size is not None and same(outer.divisor, term.divisor * term.size)
                    if fits and same(outer_stride, stride * term.size):
                        size = None if outer.size is None else outer.size * term.size
                        done[-1] = (Term(axis, term.divisor, size), stride)
                        continue
                done.append((term, stride))
            for term, stride in done:
                key = (axis, term.divisor, term.size)
                merged[key] = merged.get(key, sympy.Integer(0)) + stride
        return merged


_ONE_OPERAND = (torch.ops.prims.convert_element_type.default, aten._to_copy.default, aten.clone.default)


def lookups(index: Index) -> list[Node]:
    """The tensors that look up rows."""
    return [term.axis for term in index if term is not None and isinstance(term.axis, Node)]


def _of_one_part(node: Node) -> bool:
    """True if a slice is used for nothing but one of the parts that a node puts side by side."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node.target is aten.cat.default:
            return True
    return False


def in_memory(index: Index) -> Index:
    """The index of a tensor that is read: parts have done their duty."""
    return tuple(term and replace(term, part=None) for term in index)


def varies_with(index: Index) -> str:
    """What a value at this index varies with: "row", "col", "full" for both, "one" for neither."""
    axes = {"row" if isinstance(term.axis, Node) else term.axis for term in index if term is not None}
    return "full" if len(axes) == 2 else next(iter(axes), "one")


@functools.lru_cache(maxsize=4096)
def unravel(axis: str, shape: tuple) -> Index:
    """The index of a tensor whose elements are the rows (`axis` "row") or the columns ("col")."""
    terms: list[Term | None] = []
    outer = True
    for i, size in enumerate(shape):
        if size == 1:
            terms.append(None)
            continue
        terms.append(Term(axis, product(shape[i + 1 :]), None if outer else size))
        outer = False
    return tuple(terms)


def _broadcast(index: Index, shape: tuple, source: tuple) -> Index:
    """The index of an operand that is broadcast from `source` to `shape`."""
    offset = len(shape) - len(source)
    return tuple(
        None if size == 1 and shape[offset + d] != 1 else index[offset + d] for d, size in enumerate(source)
    )


def _magnitude(expr: sympy.Expr) -> float:
    """A number to sort divisors by. (Each divisor is a multiple of the next.)"""
    return float(expr.subs({s: 1009 for s in expr.free_symbols}))
