"""Writes the table of options in docs/cli.md from click's descriptions: `python -m
tests.project.command_options`"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from fp8compile.cli import cli

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
TABLE = re.compile(r"(?<=<!-- table: options -->\n).*?(?=<!-- end -->)", re.S)
HEAD = "| option | of | meaning |\n|---|---|---|\n"


def commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} ")
        else:
            yield prefix + name, command


def row(option: click.Option) -> tuple[str, str]:
    """The option as it is typed, and its meaning."""
    names = [f"{name} {option.metavar}" if option.metavar else name for name in option.opts]
    spelled = ", ".join(f"`{name}`".replace("|", "\\|") for name in (*names, *option.secondary_opts))
    default = f" Default: {option.default}." if option.show_default else ""
    return spelled, f"{option.help}{default}"


def table() -> str:
    of: dict[tuple[str, str], list[str]] = {}
    for name, command in commands(cli):
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                of.setdefault(row(option), []).append(f"`{name}`")
    return HEAD + "".join(
        f"| {option} | {', '.join(names)} | {meaning} |\n" for (option, meaning), names in of.items()
    )


def page() -> str:
    return TABLE.sub(lambda _: table(), PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
