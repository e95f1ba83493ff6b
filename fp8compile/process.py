"""What this process knows, in one place: one object of each class, made when it is first asked for.

`of(Ledger)` is the list of compiled graphs, `of(Records)` has the records of parameters, and so on. What
belongs to a model, a graph or a checkpoint is kept there, or weakly by it, and goes with it.

Two things are kept elsewhere, because `set_aside` must not hide them: facts of the training, which are the
steps that optimizers have taken, with the callbacks that wait for them (`runtime.optimizer_steps`), and the
rules that the user has switched (`features.schedule`); and which features there are (`extension`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Extras:
    """Values by their class."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[type, Any] = {}

    def get(self, kind: type[T]) -> T | None:
        return self._values.get(kind)

    def of(self, kind: type[T]) -> T:
        """The value of this class; a new one, if there is none. Threads that ask at once get the same one."""
        found = self._values.get(kind)
        return self._values.setdefault(kind, kind()) if found is None else found

    def put(self, value: object) -> None:
        self._values[type(value)] = value

    def pop(self, kind: type) -> None:
        self._values.pop(kind, None)


_OWN = _process = Extras()


def of(kind: type[T]) -> T:
    """This process's object of that class."""
    return _process.of(kind)


def is_set_aside() -> bool:
    """True inside of `set_aside`."""
    return _process is not _OWN


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Inside, the process is as if nothing had been compiled, for a try. What happens inside is forgotten."""
    global _process
    before, _process = _process, Extras()
    try:
        yield
    finally:
        _process = before
