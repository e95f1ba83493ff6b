"""What the command lines of `benchmarks.train`, `kernels` and `matmuls` have in common."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

import torch

from . import machine, results


class Parser(argparse.ArgumentParser):
    """With one line for an error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse(self, given: list[str], static: bool = True) -> argparse.Namespace:
        """The options, with defaults. `static`: the command also estimates."""
        add = self.add_argument
        add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
        add("--size", choices=("full", "tiny"), help="default: full on cuda, tiny on cpu")
        self.set_defaults(static=False)
        if static:
            add("--static", action="store_true", help="estimate for a described GPU instead of measuring")
        add("--json", type=Path, metavar="PATH", help="file, or folder (default: results/<device>/)")
        add("--budget", type=count(1), metavar="SECONDS", help="begin nothing new after this time")
        args = self.parse_args(given, argparse.Namespace(given=given))
        there = torch.cuda.is_available()
        args.device = args.device or ("cuda" if there else "cpu")
        if args.device == "cuda" and not args.static and not there:
            self.error("--device cuda: torch sees no CUDA device here")
        args.size = args.size or ("full" if args.device == "cuda" or args.static else "tiny")
        return args


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
    return folder / f"{machine.slug(result['name'])}{size}-{when}.json"
