"""What the command lines of `benchmarks.train` and `benchmarks.kernels` have in common."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

from . import machine, results


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def count(least: int):
    def parse(value: str) -> int:
        if not (value.isascii() and value.isdecimal() and int(value) >= least):
            raise argparse.ArgumentTypeError(f"{value!r} is not a whole number of at least {least}")
        return int(value)

    return parse


def destination(args: argparse.Namespace, result: dict[str, Any]) -> Path:
    """Where the result goes: the file that was asked for, or one named after case, size and time."""
    if args.json and args.json.suffix in (".json", ".jsonl"):
        return args.json
    folder = args.json or results.RESULTS / machine.slug(result["device"]["name"])
    when = result["date"][:19].replace("-", "").replace(":", "").replace("T", "-")
    size = "" if result["size"] == "full" else f"-{result['size']}"
    size += "-instructions" if results.counted(result) else ""
    return folder / f"{machine.slug(result['name'])}{size}-{when}.json"
