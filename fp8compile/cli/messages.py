"""Errors of the command line: a line on stderr that names the command, below the user's traceback, if any."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import click

from ..errors import is_foreign, met, user_frames

if TYPE_CHECKING:
    import torch


class Failed(click.ClickException):
    """A request that cannot be fulfilled; exit status 1."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.ctx = click.get_current_context()


def usage(message: str) -> click.UsageError:
    """Wrong usage of the current command; exit status 2."""
    return click.UsageError(message, click.get_current_context())


def torch_device(name: str) -> torch.device:
    """The device that --device names, as torch names it."""
    import torch

    try:
        return torch.device(name)
    except RuntimeError:
        raise usage(f"--device {name!r} is not a device as torch names it, such as cuda:0") from None


def complain(message: str, status: int, where: str = "fp8compile", color: bool | None = None) -> int:
    """Print an error of the command `where`; returns `status`. `color` None: colours where allowed."""
    click.echo(f"{where}: {click.style('error:', fg='red')} {message}", err=True, color=color)
    return status


def traceback_of(error: BaseException) -> str:
    """The traceback of `error` from the user's first frame on, as if the user's code made the call."""
    trace = error.__traceback__
    while trace is not None and is_foreign(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def user_traceback(error: BaseException) -> str:
    """The traceback of `error` with the user's frames only; "" if it has no frame of the user's code."""
    theirs = user_frames(error)
    said = met(error)
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(theirs)]
    lines += [f"{type(said).__name__}: {said}" if str(said) else type(said).__name__]
    return "".join(lines).rstrip() if theirs else ""
