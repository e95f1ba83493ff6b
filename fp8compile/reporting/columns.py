"""Tables of text, as tabulate's format "simple" has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def aligned(head: Sequence[str], rows: Iterable[Sequence[object]], sides: str = "") -> str:
    """Rows under their titles. `sides` has "<" or ">" for each column: flush left, or right. Without: all are flush left."""
    cells = [[str(cell).strip() for cell in row] for row in rows]
    widths = [max(len(title) + 2, *(len(row[i]) for row in cells), 0) for i, title in enumerate(head)]
    lines = [head, ["-" * width for width in widths], *cells]
    columns = list(zip(sides or "<" * len(head), widths, strict=True))
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, (side, width) in zip(line, columns, strict=True)).rstrip() for line in lines
    )
