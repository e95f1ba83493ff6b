"""`report.to_html()`: a report as one self-contained HTML page that works without JavaScript.

docs/cli.md describes the page. That of an estimate begins with the time of a step (`Timing`), which
`dryrun.estimate_result` fills in. `layer_rows` computes the numbers and words, report.html.jinja is the
markup. jinja2 escapes every text, because a module may have any name. The page's Content-Security-Policy
forbids it to load anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..ir.records import FP8, GraphReport
from . import diagram
from .layer_rows import Row, flops, layers_of, microseconds, rows_of, share
from .record_tables import RecordTable, tables


class Part(NamedTuple):
    """A segment of a time bar. `css`: the class that colours it."""

    name: str
    css: str
    us: float


@dataclass(frozen=True)
class Split:
    """Where the time of a step goes, in one precision."""

    name: str
    parts: tuple[Part, ...]

    @property
    def us(self) -> float:
        return sum(part.us for part in self.parts)


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

    @property
    def longest(self) -> float:
        """The microseconds of the widest bar of a part."""
        return max((split.us for part in self.parts for split in part.splits), default=0.0)


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


def split(name: str, parts: Iterable[Part]) -> Split:
    """The bar of these parts; those without time are left out."""
    return Split(name, tuple(part for part in parts if part.us > 0))


def matmul_splits(rows: Sequence[Row]) -> tuple[Split, ...]:
    """The matmuls' time in high precision, and their time as decided; () if no layer has estimated times."""
    timed = [layer for row in rows if row.times for layer in row.layers]
    if not timed:
        return ()
    before, after, casts = map(sum, zip(*(layer.times or () for layer in timed), strict=True))
    high = sum(record.bf16_us or 0.0 for layer in timed for record in layer.records if record.decision != FP8)
    after_parts = (
        Part("FP8 matmuls", "fp8", after - high),
        Part("casts", "casts", casts),
        Part("other matmuls", "high", high),
    )
    return split("high precision", [Part("matmuls", "high", before)]), split("FP8", after_parts)


def section(graph: GraphReport) -> Section:
    """The rows, times and diagram of one graph."""
    layers = layers_of(graph.matmuls)
    rows = rows_of(layers)
    of_graph = tuple(tables((*graph.opaque, *graph.added)))
    return Section(graph, rows, matmul_splits(rows), of_graph, diagram.draw(graph, layers))


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
