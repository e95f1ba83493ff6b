"""What all hooks use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

Patched = contextlib.AbstractContextManager[Any]


@contextlib.contextmanager
def noting(owner: Any, name: str, note: Callable[..., Any]) -> Iterator[list[Any]]:
    """`note(result, *args, **kwargs)` of each call of `owner.name` inside; a method's first one is `self`."""
    found: list[Any] = []
    stock = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        found.append(note(result, *args, **kwargs))
        return result

    with mock.patch.object(owner, name, call):
        yield found


@contextlib.contextmanager
def in_process(value: Any) -> Iterator[Any]:
    """Inside, this is the process's object of its class."""
    from fp8compile import process

    with mock.patch.dict(process._process._values, {type(value): value}):
        yield value
