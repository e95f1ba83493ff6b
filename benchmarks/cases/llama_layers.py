"""Llama-3-8B decoder layers, as many as fit, one sequence per forward: one device's work when many train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..models import LLAMA_8B, LLAMA_TINY, LlamaBlock, LlamaShape, Stack
from .base import Case, Fit, Point, Static, noise, stack_static, weights

PARAMETERS = 218_112_000  # per layer
STATE_BYTES = {"bf16": 8, "fp32": 16}  # weight, gradient and two moments, for each parameter
SAVED_BYTES = 110_000  # saved for backward, per token and layer; a tenth of it with checkpointing


def point(layers: int, variant: Mapping[str, Any], shape: LlamaShape = LLAMA_8B) -> Point:
    length = variant["seq"]
    return Point(
        label="",
        build=lambda: Stack(lambda: LlamaBlock(shape, length), layers, bool(variant["ckpt"])),
        batches=noise((1, length, shape.width)),
        tokens=length,
        dtype=weights(variant),
        accumulate=variant["accum"],
        compile=variant["compile"],
        note=f"{layers} layers",
    )


def points(size: str, variant: Mapping[str, Any], fit: Fit) -> list[Point]:
    if size == "tiny":
        return [
            point(
                variant["layers"] or 2, {**variant, "seq": 64, "accum": min(2, variant["accum"])}, LLAMA_TINY
            )
        ]
    kept = PARAMETERS * STATE_BYTES[variant["weights"]]
    active = variant["seq"] * SAVED_BYTES * (0.1 if variant["ckpt"] else 1.0)
    return [point(variant["layers"] or fit.layers(kept, active, LLAMA_8B.layers), variant)]


def static(variant: Mapping[str, Any]) -> list[Static]:
    return stack_static(lambda shown: point(shown, {**variant, "compile": "whole"}), LLAMA_8B.layers)


LAYERS = Case(
    name="llama-8b-layers",
    title="Llama-3-8B decoder layers, one sequence a forward",
    variants={"seq": 8192, "ckpt": 0, "accum": 1, "layers": 0, "compile": "block", "weights": "bf16"},
    points=points,
    static=static,
    goal=lambda variant: {8192: 1.45, 2048: 1.40}.get(variant["seq"]),
)
