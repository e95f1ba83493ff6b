"""Stacked Linear, GELU, Linear, LayerNorm blocks, 4096 wide, that learn a sine from 16384 points a batch.

24 blocks have 3.2e9 parameters, 48 have 6.4e9. Weights and optimizer state are bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..models import SineRegression
from .base import Case, Point, Static, noise, stack_static, weights

WIDTH, BATCH = 4096, 16384


def point(count: int, variant: Mapping[str, Any], width: int = WIDTH, batch: int = BATCH) -> Point:
    return Point(
        build=lambda: SineRegression(width, count),
        batches=noise((batch, width), target=torch.sin),
        tokens=batch,
        dtype=weights(variant),
        compile=variant["compile"],
        note=f"{count} blocks",
    )


def case(name: str, count: int) -> Case:
    def full_or_tiny(size: str, variant: Mapping[str, Any]) -> Point:
        return point(count, variant) if size == "full" else point(2, variant, width=128, batch=64)

    def static(variant: Mapping[str, Any]) -> Static:
        return stack_static(lambda shown: point(shown, {**variant, "compile": "whole"}), count)

    return Case(
        name=name,
        title=f"{count} feed-forward blocks, {WIDTH} wide, batch {BATCH}",
        variants={"compile": "block", "weights": "bf16"},
        point=full_or_tiny,
        static=static,
        goal=lambda variant: 1.55,
    )


HALF = case("ffn-half", 24)
FULL = case("ffn-full", 48)
