"""LoRA on Qwen3-8B, with a base that its arms hold in bf16 or in FP8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..models import LLAMA_TINY, QWEN3_8B, Llama, LlamaBlock, LlamaShape, Stack, adapted
from .base import Case, Point, Static, noise, tokens

TINY = replace(LLAMA_TINY, kv_heads=2, qk_norm=True)  # 128 divides all sides of its weights


def layers(count: int, variant: Mapping[str, Any], shape: LlamaShape = QWEN3_8B) -> Point:
    length, batch = variant["seq"], variant["batch"]
    return Point(
        build=lambda: adapted(Stack(lambda: LlamaBlock(shape, length), count, bool(variant["ckpt"]))),
        batches=noise((batch, length, shape.width)),
        tokens=batch * length,
        compile=variant["compile"],
        note=f"{count} layers",
    )


def whole(count: int, variant: Mapping[str, Any]) -> Point:
    """With embedding and head."""
    length, batch, shape = variant["seq"], variant["batch"], replace(QWEN3_8B, layers=count)
    return Point(
        build=lambda: adapted(Llama(shape, length, bool(variant["ckpt"]))),
        batches=tokens(batch, length, shape.vocabulary),
        tokens=batch * length,
    )


def full_or_tiny(size: str, variant: Mapping[str, Any]) -> Point:
    if size == "tiny":
        return layers(2, {**variant, "seq": 64, "batch": 1}, TINY)
    return layers(variant["layers"], variant)


QWEN3_LORA = Case(
    name="qwen3-8b-lora",
    title="LoRA of rank 16 on Qwen3-8B",
    variants={"seq": 4096, "batch": 2, "ckpt": 0, "layers": 1, "compile": "block"},
    point=full_or_tiny,
    static=lambda variant: Static(lambda count: whole(count, variant), QWEN3_8B.layers, extrapolate=True),
)
