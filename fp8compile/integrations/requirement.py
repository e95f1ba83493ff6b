"""One line, not a traceback, where a host is missing or of a version without what an integration needs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
from collections.abc import Iterator


@contextlib.contextmanager
def host(package: str, least: str, wanted_by: str) -> Iterator[None]:
    """Around the imports of a host. `least` is the oldest version that was tested.

    ImportError: the package is not installed, is older than `least`, or lacks a name that is imported here.
    """
    fix = f"pip install '{package}>={least}'"
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise _cannot(wanted_by, package, str(error), fix) from error
        text = f"{wanted_by} needs {package}, which is not installed: {fix}"
        raise ImportError(text, name=package) from None
    except ImportError as error:
        raise _cannot(wanted_by, package, str(error), fix) from error
    found = version(package)
    if numbers(found) < numbers(least):
        text = f"{wanted_by} needs {package} {least} or newer, and finds {found}: {fix}"
        raise ImportError(text, name=package)


def version(package: str) -> str:
    """The installed version; "0" if the package is importable but not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "0"


def numbers(text: str) -> tuple[int, ...]:
    """(2, 6, 1) of "2.6.1.post0"."""
    return tuple(int(part) for part in re.match(r"[\d.]*", text)[0].strip(".").split(".") if part)  # type: ignore[index]


def _cannot(wanted_by: str, package: str, why: str, fix: str) -> ImportError:
    text = f"{wanted_by} cannot use {package} {version(package)} ({why.splitlines()[0]}): {fix}"
    return ImportError(text, name=package)
