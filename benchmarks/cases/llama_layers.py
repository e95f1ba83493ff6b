"""Llama-3-8B decoder layers, one sequence per forward: one device's work when many train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..models import LLAMA_8B, LLAMA_TINY, LlamaBlock, LlamaShape, Stack
from .base import Case, Point, Static, noise, stack_static, weights


def point(layers: int, variant: Mapping[str, Any], shape: LlamaShape = LLAMA_8B) -> Point:
    length = variant["seq"]
    return Point(
        build=lambda: Stack(lambda: LlamaBlock(shape, length), layers, bool(variant["ckpt"])),
        batches=noise((1, length, shape.width)),
        tokens=length,
        dtype=weights(variant),
        accumulate=variant["accum"],
        compile=variant["compile"],
        note=f"{layers} layers",
    )


def full_or_tiny(size: str, variant: Mapping[str, Any]) -> Point:
    if size == "tiny":
        return point(2, {**variant, "seq": 64, "accum": min(2, variant["accum"])}, LLAMA_TINY)
    return point(variant["layers"], variant)


def static(variant: Mapping[str, Any]) -> Static:
    return stack_static(lambda shown: point(shown, {**variant, "compile": "whole"}), LLAMA_8B.layers)


LAYERS = Case(
    name="llama-8b-layers",
    title="Llama-3-8B decoder layers, one sequence a forward",
    variants={"seq": 8192, "ckpt": 0, "accum": 1, "layers": 8, "compile": "block", "weights": "bf16"},
    point=full_or_tiny,
    static=static,
    goal=lambda variant: {8192: 1.45, 2048: 1.40}.get(variant["seq"]),
)
