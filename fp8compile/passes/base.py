"""What every pass has in common: a name, one log line, its time, and a dump of the graph after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from torch.fx import Graph

from .. import compat
from ..logs import dump, get_logger

logger = get_logger(__name__)
T = TypeVar("T")


def run_pass(name: str, graph: Graph, run: Callable[[], T]) -> T:
    """Run one pass over `graph`: check the graph, log what it did, write the graph after it (FP8COMPILE_DUMP, tlparse)."""
    start = time.perf_counter()
    with compat.symbolic_kernels():
        result = run()
    graph.lint()
    logger.debug("%s: %s, %.1f ms", name, _brief(result), 1e3 * (time.perf_counter() - start))
    dump(f"{name}.txt", lambda: str(graph))
    return result


def _brief(result: object) -> str:
    return f"{len(result)}" if hasattr(result, "__len__") else str(result)
