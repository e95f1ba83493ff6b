"""What was compiled: every matmul with its decision and reason, and every op that hides matmuls::

    >>> print(fp8compile.report(model))
    fp8: 3 of 6 matmuls, 27.3% of matmul FLOPs; 3 kept: 3 output head

    graph 0: GPT, training: 3 of 6 matmuls, 27.3% of matmul FLOPs
    module           gemm                   m     n     k  GFLOP  share  decision        why / recipe
    ---------------  -------------------  ---  ----  ----  -----  -----  --------------  ------------
    h.0.attn.c_attn  fprop, dgrad, wgrad  512  3072  1024   9.66  27.3%  fp8             delayed
    lm_head          fprop, dgrad, wgrad  512  8192  1024   25.8  72.7%  high precision  output head
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ir.records import FP8, GraphReport, MatmulRecord, OpaqueRecord, forward_sizes
from ..runtime.ledger import LEDGER
from . import outside
from .layers import fraction, numbered, percent, ranges, share
from .outside import OutsideRecord

if TYPE_CHECKING:
    from torch import nn

class Report:
    """The matmuls of some compiled graphs. ``str()`` is a table, ``summary()`` a line, ``to_dict()`` is for JSON.

    Of a model's report, `outside` lists the linears (and what else has a matrix) that are in no compiled graph.
    """

    def __init__(
        self, graphs: Iterable[GraphReport] = (), empty: str = "", note: str = "", outside: Iterable[OutsideRecord] = ()
    ) -> None:
        """`empty` says why there may be no graph, `note` what else there is to say."""
        self.graphs: tuple[GraphReport, ...] = tuple(graphs)
        self.outside: tuple[OutsideRecord, ...] = tuple(outside)
        self._empty = empty or "nothing was compiled"
        self._note = note

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
        """The training graphs only; all graphs if there is no other than those with a note (evaluation)."""
        return Report([graph for graph in self.graphs if not graph.note] or self.graphs)

    @property
    def fp8_flop_fraction(self) -> float:
        """FLOPs of the FP8 matmuls over FLOPs of all matmuls, in the training graphs; 0.0 when there are none. What is
        `outside` of all graphs has no FLOPs here: nobody knows how often it is called.

        Graphs compiled for evaluation are in high precision by design: they count only in a report that has no others.
        """
        return fraction(self._counted.matmuls)

    def summary(self) -> str:
        """One line: "84 of 87 matmuls, 99.1% of matmul FLOPs; 3 kept: 2 output head, 1 under 128 wide"."""
        if not self.graphs:
            return self._empty
        counted = self._counted
        parts = [share(counted.matmuls) + (" of what was compiled" if self.outside and counted.matmuls else "")]
        kept = Counter(_rule(record.reason) for record in counted.matmuls if record.decision != FP8)
        if kept:
            parts.append(f"{kept.total()} kept: {_counted(kept)}")
        if counted.opaque:
            parts.append(f"not rewritten: {_counted(Counter(record.op for record in counted.opaque))}")
        if not self.matmuls:
            parts += dict.fromkeys(graph.note for graph in self.graphs if graph.note)
        parts += [outside.brief(self.outside)] if self.outside else []
        parts += [self._note] if self._note else []
        return "; ".join(parts)

    def table(self, collapse: bool = False) -> str:
        """The matmuls, a line for the gemms of one weight that share a decision; sizes are the forward gemm's.

        With `collapse`, the lines of repeated blocks that differ in their number only become one: "h.0-11.mlp.fc".
        """
        parts = [f"fp8: {self.summary()}", *(_graph_text(graph, collapse) for graph in self.graphs)]
        return "\n\n".join(parts + ([outside.text(self.outside)] if self.outside else []))

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return {
            "summary": self.summary(),
            "fp8_flop_fraction": self.fp8_flop_fraction,
            "graphs": [
                {
                    "index": graph.index,
                    "name": graph.name,
                    "note": graph.note,
                    "device": graph.device,
                    "remarks": list(graph.remarks),
                    "edges": [list(edge) for edge in graph.edges],
                    "matmuls": [{**dataclasses.asdict(record), "flops": record.flops} for record in graph.matmuls],
                    "opaque": [dataclasses.asdict(record) for record in graph.opaque],
                }
                for graph in self.graphs
            ],
            "outside": [dataclasses.asdict(record) for record in self.outside],
        }

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained HTML page, also written to `path` if given. Needs jinja2."""
        from .html import page

        return page(self, path)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<fp8compile.Report: {self.summary()}>"


def report(model: nn.Module | None = None) -> Report:
    """The report of every graph, or of those that read a parameter or buffer of `model`, and what of it is in none of them.

    `model` may be the original module, a part of it, or what torch.compile or DDP made of it.
    torch.compile is lazy: a graph is there after the call that compiled it. TypeError if `model` is not a module.
    """
    module = all(callable(getattr(model, name, None)) for name in ("parameters", "buffers"))
    if model is not None and not module:
        raise TypeError(f"report() takes a torch.nn.Module or None, not {type(model).__name__}")
    graphs = LEDGER.graphs()
    if not graphs:
        why = "torch.compile compiles at the first call, and leaves out what it cannot trace"
        return Report(empty=f"nothing was compiled yet ({why})")
    if model is None:
        return Report(graph for graph, _ in graphs.values())
    from .. import compat  # here: it imports Dynamo

    tensors = [*model.parameters(), *model.buffers()]
    mine = set(map(id, [*tensors, *compat.read_by_graphs(tensors)]))
    chosen = [(graph, reads) for graph, reads in graphs.values() if reads & mine]
    if not chosen:
        others = f"none of the {len(graphs)} compiled graphs reads a parameter of this {type(model).__name__}"
        why = "a graph that is given other tensors in their place, as by torch.func.functional_call, is in report() alone"
        return Report(empty=f"{others} ({why})")
    left_out = outside.find(model, set().union(*(reads for _, reads in chosen)))
    return Report((graph for graph, _ in chosen), outside=left_out)


# --- text -----------------------------------------------------------------------------------------


def _rule(reason: str) -> str:
    """A reason without its particulars: "under 128 wide (64)" and "dtype: float64" are counted by their rule."""
    return re.split(r"\s*[(:;]", reason, maxsplit=1)[0] or "no reason given"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())


def _graph_text(graph: GraphReport, collapse: bool) -> str:
    from tabulate import tabulate

    join: Callable[[Sequence[tuple[str, ...]]], list[tuple[str, ...]]] = _collapsed if collapse else list
    text = f"graph {graph.index}: {graph.name}: {share(graph.matmuls)}" + (f" ({graph.note})" if graph.note else "")
    rows = join([_row(line, graph.matmuls) for line in _lines(graph.matmuls)])
    if rows:
        head = ("module", "gemm", "m", "n", "k", "GFLOP", "share", "decision", "why / recipe")
        sides = ("left", "left", "right", "right", "right", "right", "right", "left", "left")
        text += "\n" + tabulate(rows, head, tablefmt="simple", colalign=sides, disable_numparse=True)
    if any(record.dynamic for record in graph.matmuls):
        text += "\n* dynamic shape: sizes of the call that was compiled"
    text += "".join(f"\n* {remark}" for remark in graph.remarks)
    if graph.opaque:
        opaque = Counter((record.fqn or "(root)", record.op, record.reason) for record in graph.opaque)
        body = join([(fqn, op + _times(count), reason) for (fqn, op, reason), count in opaque.items()])
        text += "\n" + tabulate(body, ("not rewritten", "op", "why"), tablefmt="simple", disable_numparse=True)
    return text


def _lines(matmuls: Sequence[MatmulRecord]) -> list[list[MatmulRecord]]:
    """The records that share a line of the table: gemms of one weight at one size (in any order of m, n, k)."""
    groups: dict[tuple[Any, ...], list[MatmulRecord]] = {}
    for r in matmuls:
        sizes = tuple(sorted((r.m, r.n, r.k))) if r.gemm != "matmul" else (r.m, r.n, r.k, r.op)
        groups.setdefault((r.fqn, r.gemm == "matmul", sizes, r.batch, r.decision, r.reason, r.how, r.dynamic), []).append(r)
    return list(groups.values())


def _row(line: list[MatmulRecord], matmuls: Sequence[MatmulRecord]) -> tuple[str, ...]:
    order = ("fprop", "dgrad", "wgrad", "matmul")
    gemms = Counter(record.gemm for record in sorted(line, key=lambda record: order.index(record.gemm)))
    first = min(line, key=lambda record: order.index(record.gemm))
    m, n, k = forward_sizes(first)
    flops, total = sum(record.flops for record in line), sum(record.flops for record in matmuls)
    return (
        first.fqn or "(root)",
        ", ".join(gemm + _times(count) for gemm, count in gemms.items()),
        (f"{first.batch} x " if first.batch > 1 else "") + str(m),
        str(n),
        str(k) + ("*" if first.dynamic else ""),
        f"{flops / 1e9:.3g}",
        percent(flops / total if total else 0.0),
        first.decision.replace("_", " "),
        first.how if first.decision == FP8 else first.reason,
    )


def _times(count: int) -> str:
    return f" (x{count})" if count > 1 else ""


def _collapsed(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Join the rows whose names differ in the first number only: "h.0.fc" ... "h.11.fc" -> "h.0-11.fc"."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        pattern, number = numbered(row[0])
        groups.setdefault((pattern, row[1:]), []).append(number or 0)
    out = []
    for ((before, after), rest), numbers in groups.items():
        out.append((before if after is None else f"{before}{ranges(numbers)}{after}", *rest))
    return out
