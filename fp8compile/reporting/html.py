"""`report.to_html()`: a report or an estimate as one HTML page that needs nothing else, and works without JavaScript.

A bar for each layer: its length is the layer's share of the FLOPs, its colour the decision; what was decided, by which rule
and why is in words beside it, on hover, and in full when the row is opened. Layers of repeated blocks that are alike are one
row, whose details list them one by one. Then the graph of the matmuls (`diagram`) and the ops that hide matmuls. An estimate
adds the time of a step before and after, in parts and for each part of the model.

`rows` has the numbers and words, report.html.jinja the markup. Every text goes through jinja2's escaping: a module may be
called anything. The page forbids itself to load anything, by its Content-Security-Policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ir.records import FP8, GraphReport, MatmulRecord
from . import diagram
from . import outside as left_out
from .layers import (  # fmt: skip
    GEMMS,
    Layer,
    Part,
    Row,
    Split,
    flops,
    joined,
    layers_of,
    matmul_split,
    microseconds,
    pattern,
    percent,
    rows_of,
    scaled,
    share,
    size_of,
)
from .report import Report

if TYPE_CHECKING:
    from markupsafe import Markup

    from ..dryrun.estimate import Cost, Estimate

_LETTERS = {"fprop": "F", "dgrad": "D", "wgrad": "W", "matmul": "M"}


@dataclass(frozen=True)
class Section:
    """A graph of the report, ready to be shown."""

    graph: GraphReport
    rows: tuple[Row, ...]
    splits: tuple[Split, ...]
    diagram: diagram.Diagram

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

    @property
    def opaque(self) -> list[tuple[str, str, str, int]]:
        """(module, op, why, how often), modules that differ in their number only joined."""
        names: dict[tuple[Any, ...], list[str]] = {}
        for record in self.graph.opaque:
            names.setdefault((pattern(record.fqn), record.op, record.reason), []).append(record.fqn)
        return [(joined(list(dict.fromkeys(fqns))), op, why, len(fqns)) for (_, op, why), fqns in names.items()]


@dataclass(frozen=True)
class TimedPart:
    """A part of the model in both precisions, as an estimate has it."""

    name: str
    bf16: Cost
    fp8: Cost
    splits: tuple[Split, ...] = ()

    @property
    def speedup(self) -> str:
        return f"{self.bf16.seconds / self.fp8.seconds:.2f}×" if self.fp8.seconds and self.bf16.seconds else "–"

    @property
    def times(self) -> str:
        return f"{microseconds(1e6 * self.bf16.seconds)} → {microseconds(1e6 * self.fp8.seconds)}"

    @property
    def hover(self) -> str:
        lines = [f"{self.name}: {self.times}, {self.speedup}"]
        lines += [f"{s.name}: {', '.join(f'{part.name} {part.time}' for part in s.parts) or 'nothing'}" for s in self.splits]
        return "\n".join(lines)


@dataclass(frozen=True)
class Page:
    """What the template shows."""

    title: str
    headline: str
    summary: str
    sections: tuple[Section, ...]
    facts: tuple[tuple[str, str], ...] = ()
    splits: tuple[Split, ...] = ()
    parts: tuple[TimedPart, ...] = ()
    notes: tuple[str, ...] = ()
    outside: tuple[tuple[str, str, str, int], ...] = ()  # (parameter, class, size, how many)
    why_outside: str = left_out.WHY_OUTSIDE


def page(thing: Report | Estimate, path: str | Path | None = None) -> str:
    """The HTML page of a report, or of an estimate; also written to `path` if given. ImportError if jinja2 is not installed."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["us"] = microseconds
    environment.filters["breakable"] = _breakable
    environment.filters["flops"] = flops
    content = _of_report(thing) if isinstance(thing, Report) else _of_estimate(thing)
    text = environment.get_template("report.html.jinja").render(page=content)
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def _of_report(report: Report) -> Page:
    from .. import __version__

    devices = dict.fromkeys(graph.device for graph in report.graphs if graph.device)
    facts = [("graphs", str(len(report.graphs))), ("matmuls", str(len(report.matmuls)))]
    facts += [("decided for", device) for device in devices]
    whole = ", of what was compiled" if report.outside else ""
    headline = f"{percent(report.fp8_flop_fraction)} of matmul FLOPs in FP8{whole}" if report.matmuls else "No matmuls"
    facts += [(left_out.OUTSIDE, f"{len(report.outside)} weights")] if report.outside else []
    names = ", ".join(dict.fromkeys(graph.name for graph in report.graphs if not graph.note))
    return Page(
        f"fp8compile report{': ' + names if names else ''}",
        headline,
        report.summary(),
        tuple(map(section, report.graphs)),
        (*facts, ("fp8compile", __version__)),
        outside=tuple(left_out.rows(report.outside)),
    )


def _of_estimate(found: Estimate) -> Page:
    from .. import __version__

    whole = TimedPart("all", found.bf16, found.fp8, _splits([("bf16", found.bf16), ("FP8", found.fp8)]))
    longest = max((cost.seconds for layer in found.layers for cost in (layer.bf16, layer.fp8)), default=0.0)
    parts = [
        TimedPart(layer.name, layer.bf16, layer.fp8, _splits([("bf16", layer.bf16), ("FP8", layer.fp8)], longest))
        for layer in found.layers
        if layer.bf16.seconds or layer.fp8.seconds
    ]
    facts = (
        ("device", found.device),
        ("matmul FLOPs in FP8", percent(found.report.fp8_flop_fraction)),
        ("kernels", f"{found.bf16.kernels:.0f} → {found.fp8.kernels:.0f}"),
        ("moved outside of matmuls", f"{_gigabytes(found.bf16.bytes_outside_matmuls)} → "
                                     f"{_gigabytes(found.fp8.bytes_outside_matmuls)}"),
        ("kept for backward", f"{_gigabytes(found.bf16.kept_for_backward)} → {_gigabytes(found.fp8.kept_for_backward)}"),
        ("fp8compile", __version__),
    )  # fmt: skip
    names = ", ".join(dict.fromkeys(graph.name for graph in found.report.graphs if not graph.note))
    return Page(
        f"fp8compile estimate{': ' + names if names else ''}",
        f"{found.speedup:.2f}× on {found.device}, estimated",
        found.summary(),
        tuple(map(section, found.report.graphs)),
        facts,
        whole.splits,
        (*parts, whole),
        ("A roofline over the kernels that both compilations launch: no measurement. It leaves out the optimizer, "
         "communication and the host. A kernel that serves several parts of the model counts for one of them, a cast "
         "where its copy is read: what a part gains may show at its neighbour.", *found.notes),
    )  # fmt: skip


def _splits(costs: Sequence[tuple[str, Cost]], longest: float = 0.0) -> tuple[Split, ...]:
    """The time of each in parts; widths are of `longest` (seconds), or of the longest of these."""
    splits = []
    for name, cost in costs:
        rest = max(0.0, cost.seconds - cost.matmul_seconds - cost.attention_seconds)
        casts = cost.fp8_matmul_seconds > 0
        times = [
            ("FP8 matmuls", "fp8", cost.fp8_matmul_seconds),
            ("other matmuls" if casts else "matmuls", "high", cost.matmul_seconds - cost.fp8_matmul_seconds),
            ("attention", "attention", cost.attention_seconds),
            ("casts and other" if casts else "other", "casts" if casts else "other", rest),
        ]
        splits.append(Split(name, tuple(Part(what, kind, 1e6 * seconds) for what, kind, seconds in times)))
    return scaled(splits, 1e6 * longest)


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.3g} GB"


def section(graph: GraphReport) -> Section:
    """The rows, times and diagram of one graph."""
    layers = layers_of(graph.matmuls)
    rows = rows_of(layers)
    return Section(graph, rows, matmul_split(rows), _diagram(graph, layers))


def _breakable(name: str) -> Markup:
    """The name as markup that may be broken after a dot."""
    from markupsafe import Markup, escape

    return Markup(".<wbr>").join(escape(part) for part in name.split("."))


# --- graph ----------------------------------------------------------------------------------------


def _diagram(graph: GraphReport, layers: Sequence[Layer]) -> diagram.Diagram:
    """A node for each matmul of forward, with the decisions of its backward."""
    backward = {i for i, record in enumerate(graph.matmuls) if record.gemm in ("dgrad", "wgrad")}
    reached = set(backward)
    below: dict[int, list[int]] = {}
    for a, b in graph.edges:
        below.setdefault(a, []).append(b)
    queue = list(backward)
    while queue:  # products without a weight belong to backward if a gradient flows into them
        for b in below.get(queue.pop(), ()):
            if b not in reached:
                reached.add(b)
                queue.append(b)
    layer_of = {id(record): layer for layer in layers for record in layer.records}
    nodes = {}
    for i, record in enumerate(graph.matmuls):
        if record.gemm == "fprop" or (record.gemm == "matmul" and i not in reached):
            layer = layer_of[id(record)]
            related = layer.records if record.gemm == "fprop" else (record,)
            nodes[i] = diagram.Node(
                record.fqn or "(root)",
                size_of(record).replace(" × ", "×"),
                tuple(_chip(gemm, related) for gemm in GEMMS if any(r.gemm == gemm for r in related)),
                f"{layer.name}\n{size_of(record)}\n{layer.why}",
                record.gemm == "fprop",
            )
    return diagram.draw(nodes, graph.edges, graph.index)


def _chip(gemm: str, records: Sequence[MatmulRecord]) -> tuple[str, str, str]:
    those = [record for record in records if record.gemm == gemm]
    fp8 = all(record.decision == FP8 for record in those)
    what = those[0].how if fp8 else next(r.reason for r in those if r.decision != FP8)
    words = f"{gemm}: {'FP8' if fp8 else 'high precision'}" + (f", {what}" if what else "")
    return _LETTERS[gemm], "fp8" if fp8 else "high", words
