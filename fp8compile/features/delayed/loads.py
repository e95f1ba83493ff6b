"""Weights that were loaded: `load_state_dict` of a module whose weights have scaling state.

The histories are of other weights then (after a rollback from a loss spike, say). So the slots of these
weights start cold, with the next call of the graphs that read them. State that was loaded with the weights,
before or after them, stays as it is. Weights that are copied in another way overflow or underflow, which
scales follow a call later. So do those of the second model that a compiled function is called with: nothing
on the stack tells that it is a model's.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

from torch import nn

from ... import compat, process
from .arena import LOCK, Arenas
from .weight_state import find_state

_listening: WeakSet[nn.Module] = WeakSet()


class _LoadListener:
    """A hook of `load_state_dict`. A model that is saved whole must load where this package is not installed,
    so there the hook is one of the standard library that takes anything and does nothing."""

    def __call__(self, module: nn.Module, _keys: Any) -> None:
        with LOCK:
            process.of(Arenas).clear()
            for weight in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                for slot in find_state(weight).slots.values():
                    slot.restart()

    def __deepcopy__(self, _memo: Any) -> _LoadListener:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


def listen(modules: Iterable[nn.Module]) -> None:
    """Notice weights that are loaded into these modules, and into those inside of them."""
    for module in (part for whole in modules for part in whole.modules()):
        if module not in _listening:
            _listening.add(module)
            module.register_load_state_dict_post_hook(_LoadListener())


def listen_to_callers() -> None:
    """As `listen`, for the modules that are being called: code compiled for one module may serve others."""
    listen(module for module in compat.dynamo.called() if module not in _listening)
