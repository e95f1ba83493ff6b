"""The report of compiled graphs: every matmul with its decision and reason, and every op that hides matmuls.
docs/report.md shows one."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import process
from ..extension import features
from ..ir.records import FP8, GraphReport, MatmulRecord, OpaqueRecord, TableRecord, as_dicts, of_key
from ..runtime.ledger import Ledger
from ..runtime.parameters import share_records
from . import html, outside
from .columns import aligned
from .layer_rows import Row, decided, fraction, gemms, layers_of, percent, repeated, rows_of, share, sizes_of
from .outside import OutsideRecord
from .record_tables import briefs, tables

if TYPE_CHECKING:
    from torch import nn


class Report:
    """The matmuls of compiled graphs. ``str()`` is a table, ``summary()`` a line, ``to_dict()`` is for JSON.

    In the report of one model, `outside` lists the matrices of linears and other modules that no compiled
    graph reads, and `added` what features say of its parameters. Each of their kinds is an attribute, too:
    `gathered` is what FSDP2 gathers for each parameter, where `fp8_all_gather` was asked for.
    """

    def __init__(
        self,
        graphs: Iterable[GraphReport] = (),
        empty: str = "",
        note: str = "",
        outside: Iterable[OutsideRecord] = (),
        added: Iterable[TableRecord] = (),
        notes: Iterable[str] = (),
    ) -> None:
        """`empty`: the text of a report without graphs. `note`: ends the summary. `notes`: lines below it."""
        self.graphs: tuple[GraphReport, ...] = tuple(graphs)
        self.outside: tuple[OutsideRecord, ...] = tuple(outside)
        self.added: tuple[TableRecord, ...] = tuple(added)
        self._empty = empty or "nothing was compiled"
        self._note = note
        self.notes: tuple[str, ...] = tuple(notes)

    def __getattr__(self, name: str) -> tuple[Any, ...]:
        return of_key(self.__dict__.get("added", ()), name, of_model=True)

    @property
    def matmuls(self) -> list[MatmulRecord]:
        """Every matmul of every graph, in graph order."""
        return [record for graph in self.graphs for record in graph.matmuls]

    @property
    def opaque(self) -> list[OpaqueRecord]:
        """Every op that hides matmuls, in graph order."""
        return [record for graph in self.graphs for record in graph.opaque]

    @property
    def _counted(self) -> Report:
        """The training graphs only; all graphs if every graph has a note (evaluation)."""
        return Report([graph for graph in self.graphs if not graph.note] or self.graphs)

    @property
    def fp8_flop_fraction(self) -> float:
        """FLOPs of the FP8 matmuls over FLOPs of all matmuls, in the training graphs; 0.0 when there are
        none. Matmuls with the weights in `outside` are not counted: how often they run is unknown.

        Graphs for evaluation are in high precision by design: they count only in a report without others.
        """
        return fraction(self._counted.matmuls)

    def summary(self) -> str:
        """One line: "84 of 87 matmuls, 99.1% of matmul FLOPs; 3 kept: 2 output head, 1 under 128 wide"."""
        if not self.graphs:
            return self._empty
        counted = self._counted
        of_what = " of what was compiled" if self.outside and counted.matmuls else ""
        parts = [share(counted.matmuls) + of_what]
        high = [_rule(record.reason) for record in counted.matmuls if record.decision != FP8]
        if high:
            parts.append(f"{len(high)} kept: {_counts(high)}")
        if counted.opaque:
            parts.append(f"not rewritten: {_counts(map(_family, counted.opaque))}")
        if not self.matmuls:
            parts += dict.fromkeys(graph.note for graph in self.graphs if graph.note)
        parts += [outside.brief(self.outside)] if self.outside else []
        parts += briefs([*self.added, *(record for graph in counted.graphs for record in graph.added)])
        parts += [self._note] if self._note else []
        return "; ".join(parts)

    def table(self, collapse: bool = True) -> str:
        """A table of the matmuls. Gemms of a weight with one decision share a line; sizes: the forward's.

        Equal layers of repeated blocks share a line, "h.0-11.mlp.fc (x12)". A graph for evaluation is one
        line. With ``collapse=False`` every layer of every graph has its own line.
        """
        head = "\n* ".join([f"fp8: {self.summary()}", *self.notes])
        parts = [head, *(_graph_text(graph, collapse) for graph in self.graphs)]
        parts += [outside.text(self.outside)] if self.outside else []
        return "\n\n".join([*parts, *map(str, tables(self.added))])

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts, lists, strings and numbers."""
        return {
            "summary": self.summary(),
            "notes": list(self.notes),
            "fp8_flop_fraction": self.fp8_flop_fraction,
            "graphs": [
                {
                    "index": graph.index,
                    "name": graph.name,
                    "note": graph.note,
                    "device": graph.device,
                    "remarks": list(graph.remarks),
                    "cold_calls": graph.cold_calls,
                    "later_cold_calls": graph.later_cold_calls,
                    "edges": [list(edge) for edge in graph.edges],
                    "matmuls": [{**dataclasses.asdict(r), "flops": r.flops} for r in graph.matmuls],
                    "opaque": [dataclasses.asdict(record) for record in graph.opaque],
                    **as_dicts(graph.added, of_model=False),
                }
                for graph in self.graphs
            ],
            "outside": [dataclasses.asdict(record) for record in self.outside],
            **as_dicts(self.added, of_model=True),
        }

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained HTML page, also written to `path` if given."""
        devices = dict.fromkeys(graph.device for graph in self.graphs if graph.device)
        facts = [("graphs", str(len(self.graphs))), ("matmuls", str(len(self.matmuls)))]
        facts += [("decided for", device) for device in devices]
        facts += [(outside.OUTSIDE, f"{len(self.outside)} weights")] if self.outside else []
        whole = ", of what was compiled" if self.outside else ""
        headline = "No matmuls"
        if self.matmuls:
            headline = f"{percent(self.fp8_flop_fraction)} of matmul FLOPs in FP8{whole}"
        facts += [(what, said) for what, _, said in (brief.partition(": ") for brief in briefs(self.added))]
        page = html.HtmlPage(
            html.title("report", self.graphs),
            headline,
            "; ".join([self.summary(), *self.notes]),
            tuple(facts),
            tuple(map(html.section, self.graphs)),
            (*outside.page_tables(self.outside), *tables(self.added)),
        )
        return html.render(page, path)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<fp8compile.Report: {self.summary()}>"


def report(model: nn.Module | None = None) -> Report:
    """The report of all compiled graphs, or of the graphs that read a parameter or buffer of `model`. With
    `model`, the report also lists the weights of the model that no graph reads.

    `model` may be the original module, a part of it, or the wrapper that torch.compile or DDP made of it.
    torch.compile is lazy: a graph is listed after the call that compiled it. TypeError if it is no module.
    """
    module = all(callable(getattr(model, name, None)) for name in ("parameters", "buffers"))
    if model is not None and not module:
        raise TypeError(f"report() takes a torch.nn.Module or None, not {type(model).__name__}")
    tensors = [] if model is None else [*model.parameters(), *model.buffers()]
    if not process.of(Ledger):
        why = "torch.compile compiles at the first call, and leaves out what it cannot trace"
        return Report(empty=f"nothing was compiled yet ({why})")
    share_records(tensors)
    from ..passes.try_matmuls import Attempts  # imported late, because it imports Dynamo

    notes = process.of(Attempts).replaced
    graphs = process.of(Ledger).graphs()
    if model is None:
        return Report((graph.at(reads.values()) for graph, reads in graphs.values()), notes=notes)
    mine = set(map(id, tensors))
    chosen = [(graph, reads) for graph, reads in graphs.values() if reads.keys() & mine]
    if not chosen:
        others = f"none of the {len(graphs)} compiled graphs reads a parameter of this {type(model).__name__}"
        why = (
            "a graph that reads other tensors in their place, as with torch.func.functional_call, is only "
            "listed by report()"
        )
        return Report(empty=f"{others} ({why})")
    left_out = outside.find(model, set().union(*(reads for _, reads in chosen)))
    added = [record for feature in features() for record in feature.records(tensors)]
    mine_at = ((graph, (prefix for key, prefix in reads.items() if key in mine)) for graph, reads in chosen)
    placed = (graph.at(prefixes) for graph, prefixes in mine_at)
    return Report(placed, outside=left_out, added=added, notes=notes)


# -- text --


def _rule(reason: str) -> str:
    """A reason without details: "under 128 wide" for "under 128 wide (64)", "dtype" for "dtype: float64"."""
    return re.split(r"\s*[(:;]", reason, maxsplit=1)[0] or "no reason given"


def _family(hidden: OpaqueRecord) -> str:
    """The common name of an operator, such as "attention", if its reason is one; else its own name."""
    return hidden.op.removeprefix("aten.").removesuffix(".default") if ":" in hidden.reason else hidden.reason


def _counts(what: Iterable[str]) -> str:
    """ "2 output head, 1 under 128 wide"."""
    return ", ".join(f"{count} {name}" for name, count in Counter(what).most_common())


def _graph_text(graph: GraphReport, collapse: bool) -> str:
    head = f"graph {graph.index}: {graph.name}: "
    if graph.note and collapse:
        count = len(graph.matmuls)
        return head + (f"{count} matmul{'s' * (count > 1)}, " if count else "no matmuls, ") + graph.note
    text = head + share(graph.matmuls) + (f" ({graph.note})" if graph.note else "")
    shown = rows_of(layers_of(graph.matmuls), collapse)
    rows = [_cells(row, line) for row in shown for line in row.first.lines]
    if rows:
        text += "\n" + aligned(("module", "gemm", "m", "n", "k", "share", "decision"), rows, "<<>>>><")
    if any(record.dynamic for record in graph.matmuls):
        text += "\n* dynamic shape: sizes of the call that was compiled"
    text += "".join(f"\n* {remark}" for remark in graph.remarks)
    if later := graph.later_cold_calls:
        calls, whose = ("1 cold call", "its") if later == 1 else (f"{later} cold calls", "their")
        text += f"\n* {calls} after the first of {whose} weights: unfused, as in eager mode"
    added = tables(graph.added)
    text += "".join(f"\n\n{table}" for table in added)
    gap = "\n\n" if added else "\n"
    return text + "".join(f"{gap}{table}" for table in tables(graph.opaque, collapse))


def _cells(row: Row, line: Sequence[MatmulRecord]) -> tuple[str, ...]:
    """The cells of a line of the table. Sizes are those of one forward gemm, the share that of all layers."""
    first, layers = line[0], len(row.layers)
    m, n, k, batch = sizes_of(first)
    m = f"{batch} x {m}" if batch else m
    flops = layers * sum(record.flops for record in line)
    share = percent(flops / row.total if row.total else 0.0)
    return row.name + repeated(layers), gemms(line), m, n, k, share, decided(line)
