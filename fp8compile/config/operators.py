"""The matmul operators of ATen: those that policies name, and that the passes look for."""

from __future__ import annotations

from typing import NamedTuple


class MatmulForm(NamedTuple):
    """The positions of the arguments, in `out[.., m, n] = a[.., m, k] @ b[.., k, n] + addend`. `alpha` and
    `beta` of an addend are keyword arguments. `offs`: the ends of the groups of rows, where each group is
    multiplied with its own matrix."""

    a: int
    b: int
    addend: int | None = None
    offs: int | None = None


MATMULS = {
    "mm": MatmulForm(0, 1),
    "addmm": MatmulForm(1, 2, addend=0),
    "bmm": MatmulForm(0, 1),
    "baddbmm": MatmulForm(1, 2, addend=0),
    "_grouped_mm": MatmulForm(0, 1, offs=2),
}
