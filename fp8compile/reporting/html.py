"""`report.to_html()`: a report as one HTML page that needs nothing else, and works without JavaScript.

A bar for each layer: its length is the layer's share of the FLOPs, its colour the decision. The decision, its rule and its
reason are in words beside the bar, on hover, and in full when the row is opened. Equal layers of repeated blocks are one row,
whose details list them one by one. Then the graph of the matmuls (`diagram`) and the operators that hide matmuls. The page of
an estimate begins with the time of a step (`Timing`), which its own module fills in.

`layers` has the numbers and words, report.html.jinja the markup. Every text goes through jinja2's escaping: a module may be
called anything. The page forbids itself to load anything, by its Content-Security-Policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..ir.records import GraphReport
from . import diagram
from .layers import Row, Split, flops, hidden_rows, layers_of, matmul_split, microseconds, rows_of, share
from .outside import WHY_OUTSIDE

if TYPE_CHECKING:
    from markupsafe import Markup


@dataclass(frozen=True)
class Section:
    """A graph of the report, ready to be shown."""

    graph: GraphReport
    rows: tuple[Row, ...]
    splits: tuple[Split, ...]
    opaque: tuple[tuple[str, str, str, int], ...]  # (module, op, why, how often)
    diagram: diagram.Diagram | None

    @property
    def share(self) -> str:
        return share(self.graph.matmuls)

    @property
    def dynamic(self) -> bool:
        return any(record.dynamic for record in self.graph.matmuls)

    @property
    def timed(self) -> bool:
        return any(row.times for row in self.rows)

    @property
    def weighed(self) -> str:
        """How many matmuls the times are of."""
        count = sum(len(layer.records) for row in self.rows if row.times for layer in row.layers)
        total = len(self.graph.matmuls)
        return "all matmuls" if count == total else f"{count} of {total} matmuls; the others were decided without"


@dataclass(frozen=True)
class TimedPart:
    """A part of the model in both precisions: times and their ratio in words, and as bars."""

    name: str
    times: str
    speedup: str
    splits: tuple[Split, ...]

    @property
    def hover(self) -> str:
        lines = [f"{self.name}: {self.times}, {self.speedup}"]
        lines += [f"{s.name}: {', '.join(f'{part.name} {part.time}' for part in s.parts) or 'nothing'}" for s in self.splits]
        return "\n".join(lines)


@dataclass(frozen=True)
class Timing:
    """The time of a step: in all, by part of the model, and a table of all numbers, whose first row is its head."""

    notes: tuple[str, ...]
    splits: tuple[Split, ...]
    parts: tuple[TimedPart, ...]
    table: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Page:
    """What the template shows. An estimate has a `timing`."""

    title: str
    headline: str
    summary: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    timing: Timing | None = None
    outside: tuple[tuple[str, str, str, int], ...] = ()  # (parameter, class, size, how many)
    why_outside: str = WHY_OUTSIDE


def title(kind: str, graphs: Iterable[GraphReport]) -> str:
    """ "fp8compile report: GPT, training"."""
    names = ", ".join(dict.fromkeys(graph.name for graph in graphs if not graph.note))
    return f"fp8compile {kind}{': ' + names if names else ''}"


def section(graph: GraphReport) -> Section:
    """The rows, times and picture of one graph."""
    layers = layers_of(graph.matmuls)
    rows = rows_of(layers)
    return Section(graph, rows, matmul_split(rows), tuple(hidden_rows(graph.opaque)), diagram.draw(graph, layers))


def render(page: Page, path: str | Path | None = None) -> str:
    """The page as HTML, also written to `path` if given."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from .. import __version__

    loader = PackageLoader(__package__, ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(us=microseconds, flops=flops, breakable=_breakable)
    text = environment.get_template("report.html.jinja").render(page=page, version=__version__)
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def _breakable(name: str) -> Markup:
    """The name as markup that may be broken after a dot."""
    from markupsafe import Markup, escape

    return Markup(".<wbr>").join(escape(part) for part in name.split("."))
