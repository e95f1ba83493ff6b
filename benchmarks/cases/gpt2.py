"""GPT-2 124M in nanoGPT's configuration (12 layers, 768 wide, vocabulary 50304): batch 64 x 1024, real text.

The model and the text are those of examples/train_gpt.py: float32 weights under bf16 autocast, LayerNorm and
linears with bias, output head tied to the embedding; bytes of the Python standard library's sources.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .base import Batch, Case, Point, Static, weights

sys.path.append(str(Path(__file__).parents[2] / "examples"))

BATCH = 64


@functools.cache
def example():
    """The module examples/train_gpt.py. Imported late: other cases need not have its packages."""
    import train_gpt  # type: ignore[import-not-found]

    return train_gpt


@functools.cache
def text() -> tuple[torch.Tensor, torch.Tensor]:
    """(training, validation) bytes."""
    return example().split_text(example().load_text(), 1024)


def config(size: str):
    given = example().CONFIGS["gpt2-124m"]
    if size == "full":
        return given
    return replace(given, layers=2, width=128, heads=2, context=64, vocabulary=256)


def recorded(config: Any, batch: int, count: int = 8):
    """The first `count` batches of the text in turn, on the device before timing starts."""

    def batches(device: str, dtype: torch.dtype) -> Iterator[Batch]:
        source = example().batches(text()[0], config, batch, 0, device)
        return itertools.cycle(list(itertools.islice(source, count)))

    return batches


def point(config: Any, batch: int, variant: Mapping[str, Any], **more: Any) -> Point:
    return Point(
        build=lambda: example().GPT(config),
        batches=recorded(config, batch),
        tokens=batch * config.context,
        dtype=weights(variant),
        compile=variant["compile"],
        own_init=True,
        note=f"{config.layers} layers",
        **more,
    )


def full_or_tiny(size: str, variant: Mapping[str, Any]) -> Point:
    return point(config(size), variant["batch"] if size == "full" else 2, variant)


def static(variant: Mapping[str, Any]) -> Static:
    full = config("full")

    def few(layers: int) -> Point:
        return point(replace(full, layers=layers), variant["batch"], {**variant, "compile": "whole"})

    return Static(few, full.layers, extrapolate=True)


GPT2 = Case(
    name="gpt2-124m",
    title="GPT-2 124M, batch 64 x 1024",
    variants={"batch": BATCH, "compile": "whole", "weights": "fp32"},
    point=full_or_tiny,
    static=static,
    goal=lambda variant: 1.10,
)
