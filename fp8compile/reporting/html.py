"""`report.to_html()`: a report as one self-contained HTML page that works without JavaScript.

Each layer has a bar. The length of the bar is the layer's share of the FLOPs, its colour is the decision. The
decision, its rule and its reason stand beside the bar and on hover; an opened row shows them in full. Equal
layers of repeated blocks are one row, whose details list them one by one. The graph of the matmuls
(`diagram`) and the operators that hide matmuls follow. The page of an estimate begins with the time of a step
(`Timing`), which `dryrun.estimate_result` fills in.

`layers` computes the numbers and words, report.html.jinja is the markup. jinja2 escapes every text, because a
module may have any name. The page's Content-Security-Policy forbids it to load anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..ir.records import GraphReport
from . import diagram
from .layer_rows import Row, flops, layers_of, microseconds, rows_of, share
from .record_tables import RecordTable, tables
from .time_bars import Split, matmul_split


@dataclass(frozen=True)
class Section:
    """A graph of the report, ready to be shown."""

    graph: GraphReport
    rows: tuple[Row, ...]
    splits: tuple[Split, ...]
    tables: tuple[RecordTable, ...]
    diagram: diagram.Diagram | None

    @property
    def weighed(self) -> str:
        """How many matmuls the times cover."""
        count = sum(len(layer.records) for row in self.rows if row.times for layer in row.layers)
        total = len(self.graph.matmuls)
        return "all matmuls" if count == total else f"{count} of {total} matmuls; the others have no estimate"


@dataclass(frozen=True)
class TimedPart:
    """A part of the model in both precisions: its times and their ratio, as words and as bars."""

    name: str
    times: str
    speedup: str
    splits: tuple[Split, ...]

    @property
    def hover(self) -> str:
        lines = [f"{self.name}: {self.times}, {self.speedup}"]
        for split in self.splits:
            times = ", ".join(f"{part.name} {microseconds(part.us)}" for part in split.parts)
            lines.append(f"{split.name}: {times or 'nothing'}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Timing:
    """The time of a step: in total, by part of the model, and as a table of all numbers under its header."""

    notes: tuple[str, ...]
    splits: tuple[Split, ...]
    parts: tuple[TimedPart, ...]
    table: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class HtmlPage:
    """The data that the template shows. Only an estimate has a `timing`."""

    title: str
    headline: str
    summary: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    tables: tuple[RecordTable, ...] = ()
    timing: Timing | None = None


def title(what: str, graphs: Iterable[GraphReport]) -> str:
    """ "fp8compile report: GPT, training"."""
    names = ", ".join(dict.fromkeys(graph.name for graph in graphs if not graph.note))
    return f"fp8compile {what}{': ' + names if names else ''}"


def section(graph: GraphReport) -> Section:
    """The rows, times and diagram of one graph."""
    layers = layers_of(graph.matmuls)
    rows = rows_of(layers)
    of_graph = tuple(tables((*graph.opaque, *graph.added)))
    return Section(graph, rows, matmul_split(rows), of_graph, diagram.draw(graph, layers))


def render(page: HtmlPage, path: str | Path | None = None) -> str:
    """The page as HTML, also written to `path` if given."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from .. import __version__

    loader = PackageLoader(__package__, ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(us=microseconds, flops=flops, share=share)
    text = environment.get_template("report.html.jinja").render(page=page, version=__version__)
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
