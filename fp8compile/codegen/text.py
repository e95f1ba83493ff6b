"""Pieces of a kernel's source: integer expressions, masks, names of dtypes, indentation."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import sympy
import torch

from .indexing import Domain


def integer(expr: sympy.Expr) -> str:
    """An integer expression as text. Raises Unwritable if it has no form in a kernel."""
    if expr.is_Integer or expr.is_Symbol:
        return str(expr)
    if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
        return " * ".join([f"({integer(expr.base)})"] * int(expr.exp))
    kind = type(expr).__name__
    if kind in ("Max", "Min"):  # of one or more arguments: a number of blocks, say
        function = f"tl.{kind.lower()}imum"
        return functools.reduce(lambda a, b: f"{function}({a}, {b})", map(integer, expr.args))
    sign = {"Add": " + ", "Mul": " * ", "FloorDiv": " // ", "Mod": " % ", "PythonMod": " % "}.get(kind)
    if sign is None:
        raise Unwritable(f"the size {expr}")
    return sign.join(integer(x) if x.is_Atom else f"({integer(x)})" for x in expr.args)


class Unwritable(Exception):
    """A group that cannot be written as a kernel."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


# -- masks --

MOST_ROWS, MOST_COLUMNS = 128, 256  # of a tile that is a part of its rows, in any configuration


@dataclass(frozen=True)
class Masks:
    """Names of the masks that say which elements of a tile lie in the matrix, "" where all tiles are full.
    `counts`: elements that are inside and in a row of some group."""

    row: str
    col: str
    inside: str
    counts: str

    @classmethod
    def of(cls, domain: Domain, width: int = MOST_COLUMNS) -> Masks:
        """`width`: what the width of a tile divides."""
        ordered = domain.order is not None
        row = "row_inside" if ordered or not _divides(domain.rows, MOST_ROWS) else ""
        col = "" if _divides(domain.columns, width) else "col_inside"
        inside = "inside" if row and col else row or col
        return cls(row, col, inside, ("counts" if col else "row_counts") if ordered else inside)


def _divides(size: sympy.Expr, block: int) -> bool:
    return bool(size.is_Integer) and size > 0 and int(size) % block == 0


def both(*masks: str) -> str:
    return " & ".join(filter(None, masks))


def guarded(mask: str, other: str = "") -> str:
    """The arguments `mask` and `other` of a load or a store."""
    return f", mask={mask}{f', other={other}' if other else ''}" if mask else ""


def kept(mask: str, value: str, other: str = "0.0") -> str:
    """`value` where the mask is true."""
    return f"tl.where({mask}, {value}, {other})" if mask else value


def bracketed(text: str) -> str:
    return text if text.isidentifier() or text.isdigit() else f"({text})"
