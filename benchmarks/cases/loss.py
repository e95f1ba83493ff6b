"""Every arm trains GPT-2 124M on real text, from the same weights on the same batches: loss curves and the
gap to bf16.

Training goes on from round to round, and each round ends with the loss on held-out text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from . import gpt2
from .base import Batch, Case, Fit, Point, Static

LR, WARMUP_STEPS = 6e-4, 50


def point(config: Any, batch: int, variant: Mapping[str, Any]) -> Point:
    def batches(device: str, dtype: torch.dtype) -> Iterator[Batch]:
        return gpt2.example().batches(gpt2.text()[0], config, batch, variant["seed"], device)

    def validate(model: nn.Module, device: str) -> float:
        return gpt2.example().evaluate(model, gpt2.text()[1], config, batch, device)

    return replace(
        gpt2.point(config, batch, variant),
        batches=batches,
        validate=validate,
        schedule=lambda step: LR * min(1.0, (step + 1) / WARMUP_STEPS),
        clip=1.0,
        lr=LR,
    )


def points(size: str, variant: Mapping[str, Any], fit: Fit) -> list[Point]:
    return [point(gpt2.config(size), variant["batch"] if size == "full" else 2, variant)]


def static(variant: Mapping[str, Any]) -> list[Static]:
    return []  # nothing to estimate: the step is that of gpt2-124m


LOSS = Case(
    name="loss",
    title="GPT-2 124M trained on the standard library's sources",
    variants={"batch": 16, "seed": 0, "compile": "whole", "weights": "fp32"},
    points=points,
    static=static,
    continues=True,
)
