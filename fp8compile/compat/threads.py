"""Two races of torch's own between threads that compile, with any backend that comes by an entry point or traces."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from typing import Any

_tracing: int | None = None  # the thread that is tracing, in an order that Dynamo's lock on compiling gives


class _Registered(dict):
    """Backends by name, of which one may be registered more than once. Torch asks whether it lacks the name, and if so whether
    there is an entry point left to load, which is not so behind the first time."""

    again = ""

    def __contains__(self, name: object) -> bool:
        return name != self.again and super().__contains__(name)


def register_again(name: str) -> None:
    """Two threads that look up a backend for the first time load its entry point and register it twice, and the second one
    fails: let it pass. Called while the backend is imported, for which both wait."""
    registry: Any = importlib.import_module("torch._dynamo.backends.registry")
    if not isinstance(registry._COMPILER_FNS, _Registered):
        registry._COMPILER_FNS = _Registered(registry._COMPILER_FNS)
        registry._COMPILER_FNS.again = name


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Around a `make_fx` of ours. Up to 2.13 one flag of the process says that fx is tracing, and a compiled function that
    another thread calls meanwhile raises. (Compiling is serialized: one thread at a time is in here.)"""
    global _tracing
    before, _tracing = _tracing, threading.get_ident()
    try:
        yield
    finally:
        _tracing = before


def ask_by_thread() -> None:
    """Let compiled functions ask whether their own thread traces, as 2.15 does."""
    flags: Any = importlib.import_module("torch.fx._symbolic_trace")
    asked = flags.is_fx_symbolic_tracing
    if hasattr(flags, "_is_fx_tracing_flag"):  # else it is a thread's
        flags.is_fx_symbolic_tracing = lambda: _tracing in (None, threading.get_ident()) and asked()
