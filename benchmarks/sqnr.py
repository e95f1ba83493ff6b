"""How much precision do FP8 matmuls lose? Signal to quantization noise by recipe, role and kind of data.

    python -m benchmarks.sqnr                              # all recipes, 3 seeds, about 2 minutes of one core
    python -m benchmarks.sqnr --recipe rowwise --seeds 1
    python -m benchmarks.sqnr --show --update notes/accuracy.md

A float32 model runs forward and backward twice on the same data: in high precision and by
`torch.compile(model, backend="fp8")`. The ratio is 10 log10(|reference|^2 / |reference - FP8|^2) in dB, for
the output y, the input's gradient dx and the weights' gradients. 6 dB are one bit. The models are one linear,
and a SwiGLU block of three linears. Ratios are taken at the third step, when delayed scaling uses the scales
of the first two. Every step has different data.

normal           x and dy are standard normal
outliers         as normal, but 1% of the elements of x and dy, at random places, are 50 times larger
outlier tokens   as normal, but 1% of the tokens (all of their x) are 10,000 times larger. The ratio is that
                 of the other tokens: it shows how outliers hurt the rest of a tensor. Weights' gradients are
                 left out, because they consist almost only of the outlier tokens

Graphs are interpreted on a CPU: FP8 values are exact, products are exact, sums are float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.config.recipe import RECIPES

from . import machine
from .interpreted import interpreted
from .results import RESULTS
from .show import Progress, table
from .tables import number, update

PATH = RESULTS / "sqnr.jsonl"  # not a .json: those are results of `benchmarks.train`
DATA = ("normal", "outliers", "outlier tokens")
TOKENS, WIDTH, HIDDEN = 512, 256, 512
STEPS = 3
EXACT = 100.0  # dB; above it, only the order of float32 sums differs: the matmul was not FP8


class SwiGlu(nn.Module):
    """silu(gate(x)) * up(x), then down; [tokens, width] -> the same."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


ARMS: dict[str, dict[str, Any]] = {
    "delayed": {"recipe": "delayed"},
    "tensorwise": {"recipe": "tensorwise"},
    "tensorwise, e4m3": {"recipe": "tensorwise", "fp8_format": "e4m3"},
    **{recipe: {"recipe": recipe} for recipe in RECIPES if recipe not in ("delayed", "tensorwise")},
    "mxfp8, weight_tiles": {"recipe": "mxfp8", "weight_tiles": True},
}
MODELS = {"linear": lambda: nn.Linear(WIDTH, HIDDEN, bias=False), "swiglu": lambda: SwiGlu(WIDTH, HIDDEN)}
ROLES = {"linear": ("y", "dx", "weight"), "swiglu": ("y", "dx", "gate.weight", "up.weight", "down.weight")}


class Point(NamedTuple):
    model: str
    data: str
    arm: str


def built(model: str) -> nn.Module:
    """The model with normal weights that preserve the variance of their input."""
    made = MODELS[model]()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
    return made


def data_of(kind: str, shape: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    """A tensor, and a mask of its tokens that are not outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    where, usual = torch.rand(shape, generator=generator), torch.ones(shape[0], dtype=torch.bool)
    if kind == "outliers":
        x = torch.where(where < 0.01, 50.0 * x, x)
    elif kind == "outlier tokens":
        usual = where[:, 0] > where[:, 0].kthvalue(max(1, shape[0] // 100)).values
        x = torch.where(usual.unsqueeze(1), x, 10_000.0 * x)
    return x, usual


def ratio(reference: Tensor, test: Tensor) -> float:
    """Signal to noise in dB; infinite if there is no noise."""
    reference, test = reference.double(), test.double()
    noise = (reference - test).square().sum()
    return float(10.0 * torch.log10(reference.square().sum() / noise)) if noise > 0.0 else float("inf")


def measure(point: Point, seed: int = 0) -> dict[str, float]:
    """dB by role, at the last of `STEPS` steps."""
    model = built(point.model)
    ratios: dict[str, float] = {}
    with interpreted():
        fp8 = torch.compile(model, backend="fp8", options=ARMS[point.arm])
        for step in range(STEPS):
            x, usual = data_of(point.data, (TOKENS, WIDTH), 1000 * seed + step)
            results = []
            for run in (model, fp8):
                model.zero_grad()
                leaf = x.clone().requires_grad_()
                y = run(leaf)
                dy, _ = data_of(
                    point.data if point.data == "outliers" else "normal", y.shape, 1000 * seed + 500 + step
                )
                y.backward(dy)
                gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
                results.append({"y": y.detach()[usual], "dx": leaf.grad[usual], **gradients})
            ratios = {role: ratio(results[0][role], results[1][role]) for role in results[0]}
    _assert_fp8(model, point)
    return {
        role: ratios[role]
        for role in ROLES[point.model]
        if point.data != "outlier tokens" or role in ("y", "dx")
    }


def _assert_fp8(model: nn.Module, point: Point) -> None:
    """Check that only the matmuls that the recipe keeps in high precision are in high precision."""
    for record in fp8compile.report(model).matmuls:
        kept = point.arm == "rowwise_with_gw_hp" and record.gemm == "wgrad"
        assert (record.decision == "fp8") != kept, f"{point}: {record}"


def read(path: Path = PATH) -> dict[Point, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {Point(line["model"], line["data"], line["arm"]): line for line in lines}


def write(lines: dict[Point, dict[str, Any]], path: Path = PATH) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for _, line in sorted(lines.items())))


def tabled(lines: dict[Point, dict[str, Any]]) -> str:
    """Markdown: one table per kind of data, with one line per arm."""
    parts = []
    for data in DATA:
        columns = [(model, role) for model, roles in ROLES.items() for role in roles]
        columns = [
            x
            for x in columns
            if any(x[1] in line["db"] for point, line in lines.items() if point[:2] == (x[0], data))
        ]
        rows = [
            [arm, *(cell(lines, Point(model, data, arm), role) for model, role in columns)] for arm in ARMS
        ]
        rows = [row for row in rows if any(row[1:])]
        if rows:
            head = [data, *(f"{model} {title(role)}" for model, role in columns)]
            parts.append(table(rows, head, markdown=True) + "\n")
    return "\n".join(parts)


def title(role: str) -> str:
    return role if role in ("y", "dx") else "dw" if role == "weight" else "d" + role.removesuffix(".weight")


def cell(lines: dict[Point, dict[str, Any]], point: Point, role: str) -> str:
    values = lines[point]["db"].get(role) if point in lines else None
    if values is None:
        return ""
    mean = statistics.fmean(values)
    return "exact" if mean > EXACT else number(mean, ".1f")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", action="append", choices=tuple(ARMS), help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument(
        "--out", type=Path, default=PATH, help="one line of JSON a recipe, model and kind of data"
    )
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table into this page")
    given = parser.parse_args(argv)
    points = [Point(model, data, arm) for arm in given.recipe or ARMS for model in MODELS for data in DATA]
    points = [] if given.show else points
    progress = Progress(len(points), "sqnr")
    lines = read(given.out)
    for point in points:
        progress(" ".join(point), 0)
        torch.compiler.reset()
        runs = [measure(point, seed) for seed in range(given.seeds)]
        db = {role: [round(run[role], 3) for run in runs] for role in runs[0]}
        about = {"tokens": TOKENS, "date": machine.now(), **machine.commit(), "versions": machine.versions()}
        lines[point] = {**point._asdict(), "db": db, **about}
        write(lines, given.out)
        progress(" ".join(point))
    progress.close()
    body = tabled(lines)
    print(body)
    if given.update:
        update(given.update, "sqnr", body)


if __name__ == "__main__":
    main()
