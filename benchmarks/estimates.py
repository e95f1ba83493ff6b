"""Make all estimates without a GPU anew, and the tables and pages that show them: `make estimates`.

    python -m benchmarks.estimates --torchao .whl --old .venv-2.11.0/bin/python
    python -m benchmarks.estimates --list                 # the commands, and what each takes
    python -m benchmarks.estimates --only experts pages   # some of them

After a change of kernels, of the cost model or of a GPU's rates. One command after the other; one that fails
is named at the end. The last one writes the tables into docs/, notes/ and README.md. What their prose says
about figures, people write: `git diff docs notes README.md` shows where. Results that a new one replaces are
removed.

`--torchao`: its wheel, or a folder with it; without, its arms are rows with an error. `--old`: Python with
torch 2.11, whose Triton 3.6 torchao's experts need; without, they are such a row.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from . import results
from .pool import ROOT

PEERS = "torchao-tensorwise,torchao-rowwise"
UPDATE = "bf16-packed,fp8-delayed-update"
ARMS = f"bf16,{PEERS},fp8-delayed,fp8-tensorwise,fp8-rowwise,fp8-blockwise,{UPDATE}"
CACHED = f"bf16,{PEERS},fp8-delayed,fp8-delayed-cached,fp8-tensorwise-cached,fp8-rowwise-cached,{UPDATE}"
EXPERTS = "bf16,torchao-experts,fp8-delayed,fp8-delayed-fast-accum,fp8-delayed-all,fp8-rowwise-all,"
EXPERTS += f"{UPDATE},fp8-delayed-update-fast-accum,fp8-delayed-fastest"
HELD = "bf16,dequantized,fp8-held-blocks,fp8-held-rows,fp8-held-tensor"
CASES = "gpt2-124m llama-8b-layers llama-8b-layers:seq=2048 ffn-half dit "
CASES += "llama-8b-layers:ckpt=1 ffn-full llama-1b llama-3b"
PAGES = "docs/benchmarks.md docs/experts.md docs/how-to/fp8-checkpoint.md docs/index.md README.md "
PAGES += "notes/benchmarks.md"


class Command(NamedTuple):
    """`minutes`: of one core. `peers`: the command takes torchao; `old`: by the old torch."""

    name: str
    minutes: float
    arguments: str
    peers: bool = False
    old: bool = False


def train(name: str, minutes: float, arms: str, cases: str, old: bool = False) -> Command:
    given = " ".join(f"--case {case}" for case in cases.split())
    return Command(name, minutes, f"train --static --arms {arms} {given}", "torchao" in arms, old)


COMMANDS = (
    train("steps", 32, ARMS, CASES),
    train("accumulation", 5, CACHED, "llama-8b-layers:seq=2048,accum=8"),
    train("experts", 8, EXPERTS, "moe moe:tokens=32768 moe:experts=mixtral", old=True),
    train("held", 4, HELD, "qwen3-8b-lora"),
    Command("kernels", 5, "kernels --static"),
    Command("tables", 0.2, f"tables --update {PAGES}"),
    Command("pages", 0.5, "support"),
)


def remove_older(folder: Path) -> list[Path]:
    """Remove the results in a folder of estimates that a later one replaces."""
    newest: dict[str, Path] = {}
    old = []
    for path in sorted(folder.glob("*.json"), key=lambda path: results.read([path])[0]["date"]):
        (result,) = results.read([path])
        if result["name"] in newest:
            old.append(newest[result["name"]])
        newest[result["name"]] = path
    for path in old:
        path.unlink()
    return old


def main(argv: Sequence[str] | None = None) -> int:
    names = [command.name for command in COMMANDS]
    parser = argparse.ArgumentParser(prog="benchmarks.estimates", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names)
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--torchao", metavar="PATH", help="torchao's wheel, or a folder with it")
    parser.add_argument("--old", metavar="PYTHON", default=sys.executable, help="with torch 2.11")
    args = parser.parse_args(argv)
    failed = []
    for name, minutes, arguments, peers, old in COMMANDS:
        if name not in args.only:
            continue
        python = args.old if old else sys.executable
        flags = ["--torchao", args.torchao] if peers and args.torchao else []
        command = [python, "-m", *f"benchmarks.{arguments}".split(), *flags]
        print(f"{name} (about {minutes:g} minutes): {' '.join(command)}", flush=True)
        began = time.monotonic()
        if not args.list and subprocess.run(command, cwd=ROOT).returncode:
            failed.append(name)
        if not args.list:
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    if not args.list:
        remove_older(results.RESULTS / "described-nvidia-h200")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
