"""Avoids two races in torch between threads that compile. Any backend that has an entry point, or traces, meets them."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

_tracing: int | None = None  # the thread that is tracing; Dynamo's lock on compiling admits one at a time


class _Registered(dict):
    """Backends by name. The one called `again` may be registered more than once, because `again in self` is always false. A
    look-up also asks that, and then loads the backend's entry point, if there is one; the first registration removes it."""

    again = ""
    looked_up: Callable[[], None]

    def __contains__(self, name: object) -> bool:
        if name == self.again:
            self.looked_up()
        return name != self.again and super().__contains__(name)


def register_again(name: str, looked_up: Callable[[], None]) -> None:
    """Two threads that look up a backend for the first time both load its entry point and register it, and the second
    registration fails: let it pass. To be called while the backend is imported, because both threads wait for that.
    `looked_up()` is called here, and whenever somebody looks up the backend."""
    registry: Any = importlib.import_module("torch._dynamo.backends.registry")
    if not isinstance(registry._COMPILER_FNS, _Registered):
        registry._COMPILER_FNS = _Registered(registry._COMPILER_FNS)
        registry._COMPILER_FNS.again, registry._COMPILER_FNS.looked_up = name, looked_up
    looked_up()


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """To be put around a `make_fx` of ours. Up to 2.13 one flag of the process says that fx is tracing, and a compiled function
    that another thread calls meanwhile raises. (Compiling is serialized: one thread at a time is in here.)"""
    global _tracing
    before, _tracing = _tracing, threading.get_ident()
    try:
        yield
    finally:
        _tracing = before


def ask_by_thread() -> None:
    """Make compiled functions ask whether their own thread is tracing, as torch 2.15 does."""
    flags: Any = importlib.import_module("torch.fx._symbolic_trace")
    asked = flags.is_fx_symbolic_tracing
    if hasattr(flags, "_is_fx_tracing_flag"):  # else the flag belongs to a thread
        flags.is_fx_symbolic_tracing = lambda: _tracing in (None, threading.get_ident()) and asked()
