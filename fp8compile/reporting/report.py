"""What was compiled: a record for every matmul with its decision and reason, and for every op that hides matmuls.

`Ledger` collects one `GraphReport` for each compiled graph; `Report` is what the user gets of them::

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
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import outside
from .outside import OutsideRecord

if TYPE_CHECKING:
    from torch import Tensor, nn

FP8: Literal["fp8"] = "fp8"
HIGH_PRECISION: Literal["high_precision"] = "high_precision"


@dataclass(frozen=True)
class MatmulRecord:
    """One gemm of a graph: ``out[m, n] = a[m, k] @ b[k, n]``, `batch` times, in the sizes of that very gemm.

    So for a linear on M tokens, from K to N features: fprop is (M, N, K), dgrad (M, K, N), wgrad (N, K, M).
    `gemm` "matmul" is one without a weight, as in attention. `reason` is "" for fp8, `recipe` is "" for high precision.
    `dynamic`: some size is symbolic, and the number here is that of the call that was compiled.
    `parameter` names the weight, `rule` the rule of the policy that decided.
    Where a device's description decided: `bf16_us` and `fp8_us` are this gemm's estimated times in either precision, `cast_us`
    its share of the casts (all in microseconds), `break_even_m` the number of tokens from which its layer gains.
    `emulated`: the device has no tensor cores for the recipe; FP8 values are multiplied in bf16, which is exact and not faster.
    """

    fqn: str
    gemm: Literal["fprop", "dgrad", "wgrad", "matmul"]
    m: int
    n: int
    k: int
    decision: Literal["fp8", "high_precision"]
    reason: str = ""
    recipe: str = ""
    batch: int = 1
    op: str = "mm"
    dynamic: bool = False
    parameter: str = ""
    rule: str = ""
    bf16_us: float | None = None
    fp8_us: float | None = None
    cast_us: float | None = None
    break_even_m: int | None = None
    emulated: bool = False

    @property
    def how(self) -> str:
        """The recipe, for people."""
        return f"{self.recipe} (emulated)" if self.emulated else self.recipe

    @property
    def flops(self) -> int:
        """Multiplications and additions: 2 * batch * m * n * k."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class OpaqueRecord:
    """An op that contains matmuls which are not seen one by one, and is not rewritten: attention, convolution, ..."""

    fqn: str
    op: str
    reason: str


@dataclass(frozen=True)
class GraphReport:
    """One compiled graph. `name` is for people, e.g. "GPT, training"; `note` says what holds for all of it.

    `edges` are pairs of positions in `matmuls`: the output of the first reaches the second with no matmul between them.
    `device` names the description that decided what pays, "" if none did. `remarks` are what else there is to say of it.
    """

    index: int
    name: str
    matmuls: tuple[MatmulRecord, ...]
    opaque: tuple[OpaqueRecord, ...] = ()
    note: str = ""
    edges: tuple[tuple[int, int], ...] = ()
    device: str = ""
    remarks: tuple[str, ...] = ()


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
        return _fraction(self._counted.matmuls)

    def summary(self) -> str:
        """One line: "84 of 87 matmuls, 99.1% of matmul FLOPs; 3 kept: 2 output head, 1 under 128 wide"."""
        if not self.graphs:
            return self._empty
        counted = self._counted
        parts = [_share(counted.matmuls) + (" of what was compiled" if self.outside and counted.matmuls else "")]
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


class Ledger:
    """The reports of this process's compiled graphs. Parameters are held weakly: no model is kept alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs: dict[int, GraphReport] = {}
        self._parameters: dict[int, list[Callable[[], Tensor | None]]] = {}
        self._next = 0

    def add(self, graph: GraphReport, parameters: Iterable[Tensor] = ()) -> int:
        """Enter `graph`, which reads `parameters`; returns the index that it gets (its own is replaced)."""
        with self._lock:
            index = self._next
            self._next += 1
            self._graphs[index] = dataclasses.replace(graph, index=index)
            self._parameters[index] = []
        self.attach(index, parameters)
        return index

    def graph(self, index: int) -> Report:
        """The report of one graph."""
        with self._lock:
            return Report([self._graphs[index]] if index in self._graphs else ())

    def attach(self, index: int, parameters: Iterable[Tensor]) -> None:
        """Say that graph `index` reads `parameters` too. An index that clear() has dropped is ignored."""
        from torch.utils.weak import TensorWeakRef  # plain weakrefs may die while C++ still holds the tensor

        references: list[Callable[[], Tensor | None]] = [TensorWeakRef(parameter) for parameter in parameters]
        with self._lock:
            if index in self._parameters:
                known = [(reference, reference()) for reference in (*self._parameters[index], *references)]
                alive = {id(parameter): reference for reference, parameter in known if parameter is not None}
                self._parameters[index] = list(alive.values())

    def report(self, model: nn.Module | None = None) -> Report:
        """The report of every graph, or of those that read a parameter or buffer of `model`, and what of it is in none of them.

        `model` may be the original module, a part of it, or what torch.compile or DDP made of it.
        torch.compile is lazy: a graph is there after the call that compiled it. TypeError if `model` is not a module.
        """
        module = all(callable(getattr(model, name, None)) for name in ("parameters", "buffers"))
        if model is not None and not module:
            raise TypeError(f"report() takes a torch.nn.Module or None, not {type(model).__name__}")
        with self._lock:
            graphs, references = dict(self._graphs), {i: list(refs) for i, refs in self._parameters.items()}
        if not graphs:
            why = "torch.compile compiles at the first call, and leaves out what it cannot trace"
            return Report(empty=f"nothing was compiled yet ({why})")
        if model is None:
            return Report(graphs.values())
        from .. import compat

        tensors = [*model.parameters(), *model.buffers()]
        mine = set(map(id, [*tensors, *compat.read_by_graphs(tensors)]))
        reads = {i: {id(tensor) for ref in references[i] if (tensor := ref()) is not None} for i in graphs}
        chosen = [i for i in graphs if reads[i] & mine]
        if not chosen:
            others = f"none of the {len(graphs)} compiled graphs reads a parameter of this {type(model).__name__}"
            why = "a graph that is given other tensors in their place, as by torch.func.functional_call, is in report() alone"
            return Report(empty=f"{others} ({why})")
        return Report((graphs[i] for i in chosen), outside=outside.find(model, set().union(*(reads[i] for i in chosen))))

    def clear(self) -> None:
        """Forget every graph."""
        with self._lock:
            self._graphs.clear()
            self._parameters.clear()


LEDGER = Ledger()
report = LEDGER.report


# --- text -----------------------------------------------------------------------------------------


def _fraction(matmuls: Sequence[MatmulRecord]) -> float:
    total = sum(record.flops for record in matmuls)
    return sum(record.flops for record in matmuls if record.decision == FP8) / total if total else 0.0


def _percent(fraction: float) -> str:
    """One decimal, but 0.0% and 100.0% only when it is so."""
    shown = round(100 * fraction, 1)
    if 0 < fraction < 1:
        shown = min(max(shown, 0.1), 99.9)
    return f"{shown:.1f}%"


def _share(matmuls: Sequence[MatmulRecord]) -> str:
    if not matmuls:
        return "no matmuls"
    count = sum(record.decision == FP8 for record in matmuls)
    return f"{count} of {len(matmuls)} matmuls, {_percent(_fraction(matmuls))} of matmul FLOPs"


def _rule(reason: str) -> str:
    """A reason without its particulars: "under 128 wide (64)" and "dtype: float64" are counted by their rule."""
    return re.split(r"\s*[(:;]", reason, maxsplit=1)[0] or "no reason given"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())


def _graph_text(graph: GraphReport, collapse: bool) -> str:
    from tabulate import tabulate

    join: Callable[[Sequence[tuple[str, ...]]], list[tuple[str, ...]]] = _collapsed if collapse else list
    text = f"graph {graph.index}: {graph.name}: {_share(graph.matmuls)}" + (f" ({graph.note})" if graph.note else "")
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
    m, n, k = _forward_sizes(first)
    flops, total = sum(record.flops for record in line), sum(record.flops for record in matmuls)
    return (
        first.fqn or "(root)",
        ", ".join(gemm + _times(count) for gemm, count in gemms.items()),
        (f"{first.batch} x " if first.batch > 1 else "") + str(m),
        str(n),
        str(k) + ("*" if first.dynamic else ""),
        f"{flops / 1e9:.3g}",
        _percent(flops / total if total else 0.0),
        first.decision.replace("_", " "),
        first.how if first.decision == FP8 else first.reason,
    )


def _forward_sizes(record: MatmulRecord) -> tuple[int, int, int]:
    """(m, n, k) of the forward gemm that `record` is the dgrad or wgrad of."""
    if record.gemm == "dgrad":
        return record.m, record.k, record.n
    if record.gemm == "wgrad":
        return record.k, record.m, record.n
    return record.m, record.n, record.k


def _times(count: int) -> str:
    return f" (x{count})" if count > 1 else ""


def numbered(name: str) -> tuple[tuple[str, str | None], int | None]:
    """What is before and behind the first number in a module's name, and the number; ((name, None), None) without one."""
    number = re.search(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", name)
    if number is None:
        return (name, None), None
    return (name[: number.start()], name[number.end() :]), int(number.group())


def _collapsed(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Join the rows whose names differ in the first number only: "h.0.fc" ... "h.11.fc" -> "h.0-11.fc"."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        pattern, number = numbered(row[0])
        groups.setdefault((pattern, row[1:]), []).append(number or 0)
    out = []
    for ((before, after), rest), numbers in groups.items():
        out.append((before if after is None else f"{before}{_ranges(numbers)}{after}", *rest))
    return out


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
