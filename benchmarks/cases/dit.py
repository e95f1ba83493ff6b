"""The 28 adaLN-Zero blocks of DiT-XL/2 on 256 x 256 images: 256 tokens of 2 x 2 latents an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..models import DitBlock, Stack
from .base import Batch, Case, Point, Static, noise, stack_static, weights

BLOCKS, WIDTH, HEADS, TOKENS = 28, 1152, 16, 256


def images(batch: int, tokens: int, width: int):
    """Batches of latents [batch, tokens, width] and conditions [batch, width]."""

    def batches(device: str, dtype: torch.dtype) -> Iterator[Batch]:
        latents = noise((batch, tokens, width))(device, dtype)
        conditions = noise((batch, width), seed=100)(device, dtype)
        return ((*x, *c) for x, c in zip(latents, conditions, strict=False))

    return batches


def point(
    blocks: int, variant: Mapping[str, Any], width: int = WIDTH, heads: int = HEADS, tokens: int = TOKENS
) -> Point:
    return Point(
        build=lambda: Stack(lambda: DitBlock(width, heads), blocks),
        batches=images(variant["batch"], tokens, width),
        tokens=variant["batch"] * tokens,
        dtype=weights(variant),
        compile=variant["compile"],
        note=f"{blocks} blocks",
    )


def full_or_tiny(size: str, variant: Mapping[str, Any]) -> Point:
    if size == "full":
        return point(BLOCKS, variant)
    return point(2, {**variant, "batch": 16}, width=128, heads=2, tokens=16)


def static(variant: Mapping[str, Any]) -> Static:
    return stack_static(lambda shown: point(shown, {**variant, "compile": "whole"}), BLOCKS)


DIT = Case(
    name="dit",
    title="DiT-XL/2 blocks, 256 tokens an image",
    variants={"batch": 64, "compile": "block", "weights": "bf16"},
    point=full_or_tiny,
    static=static,
    goal=lambda variant: 1.4,
)
