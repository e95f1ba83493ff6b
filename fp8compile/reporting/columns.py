"""Tables of text, as tabulate's format "simple" has them. A narrow terminal gets wrapped cells."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest

# between words, and after the dots of names; not in numbers such as 0.86
BREAKS = re.compile(r"(\s+|(?<=\.)(?=[^\s\d]))")


def aligned(head: Sequence[str], rows: Iterable[Sequence[object]], sides: str = "") -> str:
    """Rows under their titles. `sides`: "<" (flush left) or ">" (right) for each column; without it all "<".

    If stdout is a terminal, and too narrow, columns that are flush left are wrapped.
    """
    sides = sides or "<" * len(head)
    cells = [[str(cell).strip() for cell in row] for row in rows]
    widths = [max(len(title) + 2, *(len(row[i]) for row in cells), 0) for i, title in enumerate(head)]
    if getattr(sys.stdout, "isatty", bool)():
        columns = zip(head, *cells, strict=True)
        words = [max(len(word) for cell in column for word in BREAKS.split(cell)) for column in columns]
        sized = zip(sides, words, widths, strict=True)
        least = [word if side == "<" else width for side, word, width in sized]
        widths = _fitted(widths, least, shutil.get_terminal_size().columns - 2 * (len(head) - 1))
    lines = []
    for row in [head, ["-" * width for width in widths], *cells]:
        broken = [_broken(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in zip_longest(*broken, fillvalue=""):
            padded = (f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _fitted(widths: list[int], least: list[int], most: int) -> list[int]:
    """The widths of columns, of which the widest become narrower until all fit, or none can."""
    while sum(widths) > most and widths != least:
        _, widest = max((width, i) for i, width in enumerate(widths) if width > least[i])
        widths = [width - (i == widest) for i, width in enumerate(widths)]
    return widths


def _broken(cell: str, width: int) -> list[str]:
    """Lines of at most `width`, of which no word is longer."""
    if len(cell) <= width:
        return [cell]
    lines = [""]
    for part in BREAKS.split(cell):
        if len(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part if lines[-1] else part.lstrip()
    return lines
