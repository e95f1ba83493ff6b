"""One line, not a traceback, where a host is missing or of a version without what an integration needs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
from collections.abc import Iterator


@contextlib.contextmanager
def host(package: str, least: str) -> Iterator[None]:
    """Around the imports of a host, in the module of its name. `least` is the oldest version that was tested.

    ImportError: the package is not installed, is older than `least`, or lacks a name that is imported here.
    """

    def refused(why: str) -> ImportError:
        text = f"fp8compile.integrations.{package} {why}: pip install '{package}>={least}'"
        return ImportError(text, name=package)

    try:
        yield
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise refused(f"needs {package}, which is not installed") from None
        why = str(error).splitlines()[0]
        raise refused(f"cannot use {package} {version(package)} ({why})") from error
    found = version(package)
    if numbers(found) < numbers(least):
        raise refused(f"needs {package} {least} or newer, and finds {found}")


def version(package: str) -> str:
    """The installed version; "0" if the package is importable but not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "0"


def numbers(text: str) -> tuple[int, ...]:
    """(2, 6, 1) of "2.6.1.post0"."""
    return tuple(int(part) for part in re.match(r"[\d.]*", text)[0].strip(".").split(".") if part)  # type: ignore[index]
