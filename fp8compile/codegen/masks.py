"""Which elements of a tile lie in the matrix, as text of a kernel. Where all tiles are full there is no mask."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from .indexing import Domain

MOST_ROWS, MOST_COLUMNS = 128, 256  # of a tile, in any configuration


@dataclass(frozen=True)
class Masks:
    """Names of masks, "" where everything is inside. `counts`: elements that are inside and in a row of some group."""

    row: str
    col: str
    inside: str
    counts: str

    @classmethod
    def of(cls, domain: Domain) -> Masks:
        ordered = domain.order is not None
        row = "row_inside" if ordered or not _divides(domain.rows, MOST_ROWS) else ""
        col = "" if _divides(domain.columns, MOST_COLUMNS) else "col_inside"
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
