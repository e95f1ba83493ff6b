"""Tables of text, as tabulate's format "simple" has them. A terminal that is too narrow gets wrapped cells."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest

NARROWEST = 8  # of a column that is wrapped


class _Wrapper(textwrap.TextWrapper):
    """Breaks names at their dots, too; not numbers such as 0.86."""

    wordsep_simple_re = re.compile(r"(\s+|(?<=\.)(?=[^\s\d]))")


def aligned(head: Sequence[str], rows: Iterable[Sequence[object]], sides: str = "") -> str:
    """Rows under their titles. `sides` has "<" or ">" for each column: flush left, or right. Without: all are flush left.

    If stdout is a terminal, and too narrow, columns that are flush left are wrapped.
    """
    sides = sides or "<" * len(head)
    cells = [[str(cell).strip() for cell in row] for row in rows]
    widths = [max(len(title) + 2, *(len(row[i]) for row in cells), 0) for i, title in enumerate(head)]
    if getattr(sys.stdout, "isatty", bool)():
        widths = _fitted(widths, [side == "<" for side in sides], shutil.get_terminal_size().columns)
    lines = []
    for row in [head, ["-" * width for width in widths], *cells]:
        broken = [_broken(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in zip_longest(*broken, fillvalue=""):
            lines.append("  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)).rstrip())
    return "\n".join(lines)


def _broken(cell: str, width: int) -> list[str]:
    return [cell] if len(cell) <= width else _Wrapper(width, break_on_hyphens=False).wrap(cell)


def _fitted(widths: list[int], wrapped: list[bool], terminal: int) -> list[int]:
    """The widths of columns, of which the widest that can be wrapped become narrower until all fit."""
    for _ in range(sum(widths) + 2 * (len(widths) - 1) - terminal):
        widest = max((i for i, wraps in enumerate(wrapped) if wraps), key=widths.__getitem__, default=None)
        if widest is None or widths[widest] <= NARROWEST:
            break
        widths = [width - (i == widest) for i, width in enumerate(widths)]
    return widths
