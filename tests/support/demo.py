"""examples/train_gpt.py with a smaller GPT and without Inductor: for tests that start it, alone or with
torchrun.

The first argument names a file for the losses of both runs, to which each process adds its number; the others
are the demo's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

import train_gpt

from tests.support.harness import interpreted

TINY = train_gpt.Config(layers=1, width=256, heads=2, context=32, vocabulary=256, steps=10, batch_size=8)


def main(file: str, arguments: list[str]) -> None:
    train, losses = train_gpt.train, {}

    def without_inductor(*args: Any, backend: str, **kwargs: Any) -> train_gpt.Run:
        with interpreted() if backend == "fp8" else contextlib.nullcontext():
            run = train(*args, backend="fp8" if backend == "fp8" else None, **kwargs)
        losses[run.name] = [run.train_losses, run.val_losses]
        return run

    train_gpt.train = without_inductor
    train_gpt.CONFIGS["small"] = TINY
    train_gpt.print_estimate = lambda name, *_: print(f"estimate of {name}")
    train_gpt.main(arguments)
    rank = os.environ.get("RANK", "0")
    with open(f"{file}.{rank}", "w", encoding="utf-8") as out:
        json.dump(losses, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
