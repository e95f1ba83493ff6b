"""The whole Llama-3.2-1B and -3B: tied embeddings, all layers, output head, cross-entropy, AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .. import models
from ..models import Llama, LlamaShape
from .base import Case, Point, Static, tokens, weights


def point(shape: LlamaShape, variant: Mapping[str, Any]) -> Point:
    length, batch = variant["seq"], variant["batch"]
    return Point(
        build=lambda: Llama(shape, length, bool(variant["ckpt"])),
        batches=tokens(batch, length, shape.vocabulary),
        tokens=batch * length,
        dtype=weights(variant),
        accumulate=variant["accum"],
        compile=variant["compile"],
        note=f"{shape.layers} layers",
    )


def case(name: str, title: str, shape: LlamaShape, goal: float) -> Case:
    def full_or_tiny(size: str, variant: Mapping[str, Any]) -> Point:
        if size == "full":
            return point(shape, variant)
        small = {**variant, "seq": 64, "batch": 2, "accum": min(2, variant["accum"])}
        return point(models.LLAMA_TINY, small)

    def static(variant: Mapping[str, Any]) -> Static:
        few = {**variant, "compile": "whole"}
        return Static(lambda shown: point(replace(shape, layers=shown), few), shape.layers, extrapolate=True)

    return Case(
        name=name,
        title=title,
        variants={"seq": 4096, "batch": 2, "ckpt": 0, "accum": 1, "compile": "block", "weights": "bf16"},
        point=full_or_tiny,
        static=static,
        goal=lambda variant: goal,
    )


LLAMA_1B = case("llama-1b", "Llama-3.2-1B, whole model", models.LLAMA_1B, 1.25)
LLAMA_3B = case("llama-3b", "Llama-3.2-3B, whole model", models.LLAMA_3B, 1.35)
