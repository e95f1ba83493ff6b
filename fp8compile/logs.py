"""Logging, dumps, and the names of environment variables: here, because every room may import this module.

``TORCH_LOGS=+fp8compile`` shows everything (+: debug, -: errors only), by torch's handler, in its format.

Loggers live under "fp8compile". INFO is shown by default, so that users who configured nothing see the
summary line. Users who configured logging (a root handler, a handler on "fp8compile", TORCH_LOGS) get the
records from their own handlers only.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from . import process

ROOT = "fp8compile"
DUMP_VARIABLE = "FP8COMPILE_DUMP"
POLICY_VARIABLE = "FP8COMPILE_POLICY"
DEVICES_VARIABLE = "FP8COMPILE_DEVICES"
SKIP_VARIABLE = "FP8COMPILE_SKIP"
VARIABLES = {
    DUMP_VARIABLE: (
        "a folder for the graph after each pass and the source of each kernel, one numbered file each"
    ),
    POLICY_VARIABLE: (
        "the policy where the option `policy` is not given: a file, or the name of a shipped policy"
    ),
    DEVICES_VARIABLE: "the file in which `fp8compile calibrate` keeps what it has measured",
    SKIP_VARIABLE: (
        "names of optional passes to leave out, separated by commas, to find the one that breaks a model"
    ),
}

_numbers = itertools.count()


class Said(set[tuple[str, int, str]]):
    """What `say_once` has logged in this process: logger, level, message or key."""


class DefaultHandler(logging.Handler):
    """Writes to the current sys.stderr, unless another handler gets the record. Looks for others at each
    record, as they may be added after the import, or before it (TORCH_LOGS). Only rank 0 writes INFO."""

    def emit(self, record: logging.LogRecord) -> None:
        info = record.levelno <= logging.INFO
        if self._handled_elsewhere(record.name) or (info and rank() not in (None, 0)):
            return
        try:
            label = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
            sys.stderr.write(f"{label}{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def _handled_elsewhere(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            others = (handler for handler in logger.handlers if handler is not self)
            if not all(isinstance(handler, logging.NullHandler) for handler in others):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def get_logger(name: str) -> logging.Logger:
    """The logger of a module of this package: pass ``__name__``."""
    root = logging.getLogger(ROOT)
    if root.level == logging.NOTSET:  # otherwise the user, or TORCH_LOGS, has chosen
        root.setLevel(logging.INFO)
    if not any(isinstance(handler, DefaultHandler) for handler in root.handlers):
        root.addHandler(DefaultHandler())
    return logging.getLogger(name)


def say_once(logger: logging.Logger, level: int, message: str, key: str = "") -> bool:
    """Log `message` unless this process has already logged it, or another one with this `key`, with this
    logger and level; returns whether it was new."""
    known = (logger.name, level, key or message)
    if known in process.of(Said):
        return False
    process.of(Said).add(known)
    logger.log(level, "%s", message)
    return True


@contextlib.contextmanager
def quiet(least: int = logging.WARNING) -> Iterator[None]:
    """Inside, nothing below `least` is logged, unless the level is DEBUG."""
    root = logging.getLogger(ROOT)
    level = root.level
    if root.getEffectiveLevel() >= logging.INFO:
        root.setLevel(max(level, least))
    try:
        yield
    finally:
        root.setLevel(level)


def rank() -> int | None:
    """This process's rank in torch.distributed (or as the launcher's RANK says), None in a single process."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    launched = os.environ.get("RANK", "")
    return int(launched) if launched.isdecimal() else None


def dump_dir() -> Path | None:
    """Where dumps go: FP8COMPILE_DUMP (a subdirectory a rank in a distributed job), None when unset."""
    value = os.environ.get(DUMP_VARIABLE)
    if not value:
        return None
    path = Path(value).expanduser()
    return path if rank() is None else path / f"rank{rank()}"


def dump(name: str, text: Callable[[], str]) -> None:
    """Write a text to the next numbered file in dump_dir() and hand it to torch's structured trace (tlparse).

    `text` is called only if someone reads. `name` ends the file's name, and has a suffix. A directory that
    cannot be written is a warning: a dump never stops a compilation.
    """
    # torch 2.11-2.15: calls its lambdas only if a trace is collected (TORCH_TRACE, TORCH_COMPILE_DEBUG)
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"fp8compile_{name}", "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )
    directory = dump_dir()
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number in _numbers:
            with contextlib.suppress(FileExistsError):  # of an earlier process
                with open(directory / f"{number:04d}_{name}", "x", encoding="utf-8") as file:
                    file.write(text())
                return
    except OSError as error:
        say_once(get_logger(__name__), logging.WARNING, f"{DUMP_VARIABLE}={directory}: {error}")
