"""One linear, forward and backward: fprop, dgrad and wgrad with their casts.

`linear` is the suite of 12 matmuls of TransformerEngine's GEMM benchmark: the four linears of a layer of a 5B
model (4096 wide, 16384 hidden) at M = 31 x 512 = 15872 tokens. `linear:grid=6` is the never-slower map: M, N
and K over six sizes each, 216 cells, against bf16. `grid=3` takes every other size. `part=1` and `part=2` are
halves of a map, for a device that is lent for a short time; the picture puts them together.

A small linear is over before the CPU has launched the next kernel. So this case compares the time that the
device is busy (`busy_ms`, the sum of the kernels' times) and reports the wall time beside it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch

from ..models import OneLinear
from .base import Case, Fit, Point, Static, noise, normal

TOKENS = 31 * 512
SUITE = {"qkv": (4096, 3 * 4096), "proj": (4096, 4096), "fc1": (4096, 16384), "fc2": (16384, 4096)}  # K, N
GRID_M = (1024, 2048, 4096, 8192, 16384, 32768)
GRID_NK = (512, 1024, 2048, 4096, 8192, 16384)


def point(label: str, m: int, n: int, k: int) -> Point:
    def grad(device: str, dtype: torch.dtype) -> torch.Tensor:
        return normal((m, n), 2, device, dtype)

    return Point(
        label=label,
        build=lambda: OneLinear(k, n),
        batches=noise((m, k), count=1),
        tokens=m,
        optimizer=False,
        grad=grad,
        meta={"m": m, "n": n, "k": k},
    )


def grid(count: int) -> list[Point]:
    """`count`**3 cells in a fixed random order, so that a part of a run has cells from all of the map."""
    step = len(GRID_M) // count
    sizes = [(m, n, k) for m in GRID_M[::step] for n in GRID_NK[::step] for k in GRID_NK[::step]]
    random.Random(0).shuffle(sizes)
    return [point(f"{m}x{n}x{k}", m, n, k) for m, n, k in sizes]


def points(size: str, variant: Mapping[str, Any], fit: Fit) -> list[Point]:
    if variant["grid"] not in (0, 1, 2, 3, 6):
        raise ValueError(
            "linear:grid is 1, 2, 3 or 6 sizes for each of M, N and K, or 0 for the suite of 12 matmuls"
        )
    if size == "tiny":
        return [point("fc1", 32, 256, 128)] if not variant["grid"] else [point("32x128x256", 32, 128, 256)]
    if variant["part"] not in (0, 1, 2):
        raise ValueError("linear:part is 1 or 2, or 0 for both")
    if variant["grid"]:
        cells = grid(variant["grid"])
        return cells[variant["part"] - 1 :: 2] if variant["part"] else cells
    return [point(name, TOKENS, n, k) for name, (k, n) in SUITE.items()]


def static(variant: Mapping[str, Any]) -> list[Static]:
    return [
        Static(lambda shown, p=p: p, layers=1, extrapolate=False)
        for p in points("full", variant, Fit(memory=0, arms=1))
    ]


LINEAR = Case(
    name="linear",
    title="linears, forward and backward with their casts",
    variants={"grid": 0, "part": 0},
    points=points,
    static=static,
    goal=lambda variant: 0.98 if variant["grid"] else None,
)
