"""What cannot be done, and how that is said: one line on stderr that names the command, below the user's own traceback."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from pathlib import Path

import click


class Failed(click.ClickException):
    """Something that was asked for and cannot be done; exit status 1."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.ctx = click.get_current_context()


def usage(message: str) -> click.UsageError:
    """Wrong usage of the current command; exit status 2."""
    return click.UsageError(message, click.get_current_context())


def complain(message: str, status: int, where: str = "fp8compile", color: bool | None = None) -> int:
    """Print an error of the command `where`; returns `status`. `color` is None for what the terminal, or the context, can."""
    click.echo(f"{where}: {click.style('error:', fg='red')} {message}", err=True, color=color)
    return status


def traceback_of(error: BaseException) -> str:
    """The traceback of `error` from the user's first frame on, as Python would print it if the user had made the call."""
    trace = error.__traceback__
    while trace is not None and _foreign(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def user_traceback(error: BaseException) -> str:
    """The traceback of `error` with the user's frames only, "" if it never was in the user's code.

    Where Dynamo was tracing, the user's code had no frames of its own: its errors carry those they would have been.
    """
    frames = [*traceback.extract_tb(error.__traceback__), *(getattr(error, "real_stack", None) or ())]
    theirs = [frame for frame in frames if not _foreign(frame.filename)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(theirs), one_line(error)]
    return "".join(lines) if theirs else ""


def one_line(error: BaseException) -> str:
    """Like "ValueError: what it said first", whatever the length of the message. Dynamo's: the error that it met."""
    text = str(error)
    met = re.search(r"""Explanation: .*\bgot (\w+)\((['"])(.*)\2,?\)$""", text, re.MULTILINE)
    if met:
        return f"{met[1]}: {met[3]}"
    said = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _foreign(filename: str) -> bool:
    """Whether a frame is ours, torch's, the import system's, or of code without a file."""
    folders = [Path(__file__).parents[1], Path(importlib.__file__).parent]
    folders += map(Path, getattr(sys.modules.get("torch"), "__path__", ()))
    return filename.startswith("<") or any(map(Path(filename).absolute().is_relative_to, folders))
