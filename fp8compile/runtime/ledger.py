"""The compiled graphs of this process, and which of them read a parameter."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..ir.records import GraphReport, TableRecord
from .parameters import all_records, record_of

if TYPE_CHECKING:
    from torch import Tensor


class Ledger:
    """The reports of this process's compiled graphs. The record of a parameter says which graphs read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs: dict[int, GraphReport] = {}
        self._numbers = itertools.count()

    def add(self, graph: GraphReport) -> int:
        """Add `graph`. Returns its index here, in place of `graph.index`."""
        index = next(self._numbers)
        self._graphs[index] = dataclasses.replace(graph, index=index)
        return index

    def extend(self, index: int, added: Iterable[TableRecord]) -> None:
        """Add records to the report of graph `index`. An index that clear() has dropped is ignored."""
        with self._lock:
            if index in self._graphs:
                self._graphs[index] = self._graphs[index].plus(added)

    def ran_cold(self, index: int, later: bool) -> None:
        """Count a cold call of graph `index`; `later`: not the first one of its weights."""
        with self._lock:
            if (graph := self._graphs.get(index)) is not None:
                every, late = graph.cold_calls + 1, graph.later_cold_calls + later
                self._graphs[index] = dataclasses.replace(graph, cold_calls=every, later_cold_calls=late)

    def graph(self, index: int) -> GraphReport:
        """One graph. KeyError if clear() has dropped it."""
        return self._graphs[index]

    def attach(self, index: int, parameters: Iterable[Tensor], prefix: str = "") -> None:
        """Record that graph `index` reads `parameters`, too, of a part of a model whose names begin with
        `prefix`. An index that clear() has dropped is ignored."""
        if index in self._graphs:
            for parameter in parameters:
                record_of(parameter).graphs[index] = prefix

    def supersede(self, index: int, parameters: Iterable[Tensor]) -> None:
        """Graph `index` was compiled to do what other graphs did with these parameters, for another kind of
        input. They are dropped where no parameter is left that they read."""
        if index not in self._graphs:
            return
        new = self._graphs[index]
        for parameter in parameters:
            mine = record_of(parameter).graphs
            for i in [i for i in mine if i in self._graphs and i != index and _alike(self._graphs[i], new)]:
                del mine[i]
        read = set().union(*(record.graphs for _, record in all_records()))
        for i in [i for i, graph in self._graphs.items() if i not in read and _alike(graph, new)]:
            self._graphs.pop(i)

    def graphs(self) -> dict[int, tuple[GraphReport, dict[int, str]]]:
        """Every graph by its index, with the ids of the tensors that it reads and that are alive: what names
        begin with in their part of a model."""
        graphs = list(self._graphs.items())
        found: dict[int, tuple[GraphReport, dict[int, str]]] = {i: (graph, {}) for i, graph in graphs}
        for key, record in all_records():
            for index in found.keys() & record.graphs:
                found[index][1][key] = record.graphs[index]
        return found

    def __len__(self) -> int:
        """How many graphs there are. Without any, the ledger is false."""
        return len(self._graphs)

    def clear(self) -> None:
        """Forget every graph."""
        self._graphs.clear()
        for _, record in all_records():
            record.graphs.clear()


def _alike(one: GraphReport, other: GraphReport) -> bool:
    """True if these graphs have the same name and the same matmuls."""
    graphs = (graph.at([""]) for graph in (one, other))
    sizes = ([(x.fqn, x.gemm, x.m, x.n, x.k, x.batch) for x in graph.matmuls] for graph in graphs)
    return one.name == other.name and next(sizes) == next(sizes)
