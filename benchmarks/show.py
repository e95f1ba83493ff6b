"""Tables and progress bars. Without tabulate the tables are plainer; without tqdm there are no bars."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def table(rows: Sequence[Sequence[Any]], head: Sequence[str], markdown: bool = False) -> str:
    """The table as text: the first column is aligned to the left, the others to the right."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    try:
        from tabulate import tabulate
    except ImportError:
        return _plain(cells, list(head), markdown)
    align = ["left", *["right"] * (len(head) - 1)]
    return tabulate(
        cells, head, tablefmt="github" if markdown else "simple", colalign=align, disable_numparse=True
    )


def _plain(cells: list[list[str]], head: list[str], markdown: bool) -> str:
    widths = [max(len(row[i]) for row in [head, *cells]) for i in range(len(head))]
    edge, gap = ("| ", " | ") if markdown else ("", "  ")

    def line(row: list[str]) -> str:
        padded = [
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        return (edge + gap.join(padded) + (" |" if markdown else "")).rstrip()

    return "\n".join([line(head), line(["-" * w for w in widths]), *map(line, cells)])


class Progress:
    """A bar over a known number of turns, on stderr."""

    def __init__(self, total: int, title: str):
        self.bar: Any = None
        try:
            from tqdm import tqdm
        except ImportError:
            return
        quiet = not sys.stderr.isatty()
        self.bar = tqdm(
            total=total, desc=title, unit="turn", mininterval=10.0 if quiet else 0.2, leave=not quiet
        )

    def __call__(self, what: str, count: int = 1) -> None:
        """Advance the bar by `count` finished turns; `what` happens next."""
        if self.bar is not None:
            self.bar.set_postfix_str(what, refresh=False)
            self.bar.update(count)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
