"""Tables and names as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(rows: Sequence[Sequence[Any]], head: Sequence[str], markdown: bool = False) -> str:
    """The table as text: the first column is aligned to the left, the others to the right."""
    from tabulate import tabulate  # where it is missing, `device.sh` says so

    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    align = ["left", *["right"] * (len(head) - 1)]
    layout = "github" if markdown else "simple"
    return tabulate(cells, head, tablefmt=layout, colalign=align, disable_numparse=True)


def not_done(names: Sequence[str], most: int = 5) -> list[str]:
    """The line that names what there was no time for: the first few, and how many more. [] if nothing."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return [f"not done in time: {', '.join(names[:most])}{more}"] if names else []
