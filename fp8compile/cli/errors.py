"""What cannot be done, and how that is said: one line on stderr that names the command."""

from __future__ import annotations

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
