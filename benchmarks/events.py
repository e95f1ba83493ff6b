"""How long do gradients take to recover from a sudden change? `python -m benchmarks.events`.

A training of 20 steps on random data, with delayed scaling, and an event at step 8. For each event: the
lowest SQNR (dB) of any weight's gradient against float32, before it and in the steps from it on. Two models
of six blocks: with norms and residuals, and plain deep layers with ReLU, where a layer that saturates hides
that the next one's input has grown, too. No weight moves, so that both sides have the same ones.

`--soak` trains the model with norms for 1,500 steps to the outputs of another one, from three seeds, in
float32 and in FP8: the learning rate restarts halfway, the inputs of one step are 30 times as large, and the
loss of another is 1e4 times too large.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import tables
from .show import table

STEPS, AT, WIDTH, ROWS, SHOWN = 20, 8, 128, 256, 8
EVENTS = {
    "inputs 30 times, one step": lambda step: (30.0 if step == AT else 1.0, 1.0),
    "inputs 30 times, for good": lambda step: (30.0 if step >= AT else 1.0, 1.0),
    "inputs 1/1000, for good": lambda step: (1e-3 if step >= AT else 1.0, 1.0),
    "loss 1e4 times": lambda step: (1.0, 1e4 if step >= AT else 1.0),
    "loss 1e-4 times": lambda step: (1.0, 1e-4 if step >= AT else 1.0),
    "all weights 6 times": lambda step: (1.0, 1.0),  # see `lowest`
}


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        nn.init.kaiming_normal_(self.up.weight, nonlinearity="relu")
        nn.init.kaiming_normal_(self.down.weight, nonlinearity="linear")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def sqnr(exact: Tensor, found: Tensor) -> float:
    error = (exact - found).square().sum().clamp_min(1e-38)
    return 10 * math.log10(max(float(exact.square().sum() / error), 1e-9))


def lowest(block: Callable[[], nn.Module], event: str) -> list[float]:
    """The lowest SQNR of a gradient in each step."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    exact = nn.Sequential(*(block() for _ in range(6)))
    model = copy.deepcopy(exact)
    options: dict[str, Any] = {"policy": {"rules": [{"fp8": "on"}]}}
    run = torch.compile(model, backend="fp8", options=options)
    found = []
    for step in range(STEPS):
        inputs, loss = EVENTS[event](step)
        if event.startswith("all weights") and step == AT:
            with torch.no_grad():
                for weight in (*model.parameters(), *exact.parameters()):
                    if weight.dim() == 2:
                        weight.mul_(6)
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)) * inputs
        for side, call in ((model, run), (exact, exact)):
            side.zero_grad()
            (call(x).square().mean() * loss).backward()
        pairs = zip(exact.parameters(), model.parameters(), strict=True)
        found.append(min(sqnr(a.grad, b.grad) for a, b in pairs if a.dim() == 2))  # type: ignore[arg-type]
    return found


LONG, RESTART, LARGE, LOUD, LAST = 1500, 750, 500, 1000, 100  # steps


def trained(seed: int, fp8: bool) -> float:
    """The mean loss of the last steps."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model, teacher = (nn.Sequential(*(Norms() for _ in range(4))) for _ in range(2))
    options: dict[str, Any] = {"policy": {"rules": [{"fp8": "on"}]}}
    run = torch.compile(model, backend="fp8", options=options) if fp8 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(LONG):
        for group in optimizer.param_groups:
            group["lr"] = 5e-4 * (1 + math.cos(math.pi * (step % RESTART) / RESTART)) + 1e-5
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10000 * seed + step))
        x = x * (30.0 if step == LARGE else 1.0)
        with torch.no_grad():
            y = teacher(x)
        loss = (run(x) - y).square().mean()
        (loss * (1e4 if step == LOUD else 1.0)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return sum(found[-LAST:]) / LAST


def soaked() -> str:
    lines = [
        [name, *(f"{trained(seed, fp8):.5f}" for seed in range(3))]
        for name, fp8 in (("float32", False), ("FP8", True))
    ]
    return table(lines, ["1,500 steps", "seed 0", "seed 1", "seed 2"], True) + "\n"


def tables_of() -> str:
    lines = []
    for name, block in (("with norms", Norms), ("plain", Plain)):
        for event in EVENTS:
            found = [f"{x:.0f}" for x in lowest(block, event)]
            lines.append([name, event, min(found[4:AT], key=float), " ".join(found[AT : AT + SHOWN])])
    return table(lines, ["model", "event at step 8", "before, dB", "from step 8 on, dB"], True) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.events", description=__doc__.split("\n")[0])
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table into this page")
    parser.add_argument("--soak", action="store_true", help="the long training instead")
    args = parser.parse_args(argv)
    logging.disable(logging.INFO)
    made = soaked() if args.soak else tables_of()
    if args.update:
        tables.update(args.update, "soaked" if args.soak else "events", made)
    else:
        print(made, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
