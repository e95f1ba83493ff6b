"""The compiled graphs of this process, and which of them read a parameter."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ..ir.records import GraphReport

if TYPE_CHECKING:
    from torch import Tensor


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

    def graph(self, index: int) -> GraphReport:
        """One graph. KeyError if clear() has dropped it."""
        with self._lock:
            return self._graphs[index]

    def attach(self, index: int, parameters: Iterable[Tensor]) -> None:
        """Say that graph `index` reads `parameters` too. An index that clear() has dropped is ignored."""
        from torch.utils.weak import TensorWeakRef  # plain weakrefs may die while C++ still holds the tensor

        references: list[Callable[[], Tensor | None]] = [TensorWeakRef(parameter) for parameter in parameters]
        with self._lock:
            if index in self._parameters:
                known = [(reference, reference()) for reference in (*self._parameters[index], *references)]
                alive = {id(parameter): reference for reference, parameter in known if parameter is not None}
                self._parameters[index] = list(alive.values())

    def graphs(self) -> dict[int, tuple[GraphReport, set[int]]]:
        """Every graph by its index, with the ids of the tensors that it reads and that are alive."""
        with self._lock:
            known = [(i, graph, list(self._parameters[i])) for i, graph in self._graphs.items()]
        return {i: (graph, {id(tensor) for ref in refs if (tensor := ref()) is not None}) for i, graph, refs in known}

    def clear(self) -> None:
        """Forget every graph."""
        with self._lock:
            self._graphs.clear()
            self._parameters.clear()


LEDGER = Ledger()
