"""Every arm trains GPT-2 124M on real text, from the same weights on the same batches: loss curves and the
gap to bf16.

Training goes on from round to round, and each round ends with the loss on held-out text. `text=tokens` are
the tokens of `benchmarks.corpus`, which lie on the device; `text=bytes` needs no file. Where the number of
steps is known (`--seconds`), the learning rate falls to a tenth, like a cosine.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import corpus
from . import gpt2
from .base import Batch, Case, Point

LR, WARMUP_STEPS = 6e-4, 50


@functools.cache
def tokens() -> tuple[Tensor, Tensor]:
    """(training, validation) tokens, int32. ValueError if there is no file of them."""
    return gpt2.example().split_text(corpus.read(), 1024)


def rate(step: int, steps: int) -> float:
    """The learning rate of a step of `steps` (0: nobody knows how many)."""
    fallen = 1 - math.cos(math.pi * min(1.0, step / steps)) if steps else 0.0
    return LR * min(1.0, (step + 1) / WARMUP_STEPS) * (1 - 0.45 * fallen)


def on_device(text: Tensor, config: Any, batch: int, seed: int, device: str) -> Iterator[Batch]:
    """Batches of `train_gpt.batches`, by the same seed, of a text that lies on the device."""
    generator, steps = torch.Generator().manual_seed(seed), torch.arange(config.context + 1, device=device)
    text = text.to(device)
    while True:
        starts = torch.randint(len(text) - config.context, (batch,), generator=generator).to(device)
        chunk = text[starts[:, None] + steps].long()
        yield chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()


def point(config: Any, batch: int, variant: Mapping[str, Any]) -> Point:
    by_token = variant["text"] == "tokens"
    text = tokens if by_token else gpt2.text
    if by_token:
        config = replace(config, vocabulary=corpus.VOCABULARY)

    def batches(device: str, dtype: torch.dtype) -> Iterator[Batch]:
        make = on_device if by_token else gpt2.example().batches
        return make(text()[0], config, batch, variant["seed"], device)

    def validate(model: nn.Module, device: str) -> float:
        return gpt2.example().evaluate(model, text()[1], config, batch, device)

    return replace(
        gpt2.point(config, batch, variant),
        batches=batches,
        validate=validate,
        schedule=rate,
        clip=1.0,
        lr=LR,
        note=f"{config.layers} layers, {variant['text']}",
    )


def full_or_tiny(size: str, variant: Mapping[str, Any]) -> Point:
    if size == "tiny":
        text = variant["text"] if corpus.place().is_file() else "bytes"
        return point(gpt2.config(size), 2, {**variant, "text": text})
    return point(gpt2.config(size), variant["batch"], variant)


def static(variant: Mapping[str, Any]) -> None:
    return None  # nothing to estimate: the step is that of gpt2-124m


LOSS = Case(
    name="loss",
    title="GPT-2 124M trained on the sources of Python packages",
    variants={"batch": 16, "seed": 0, "text": "bytes", "compile": "whole", "weights": "fp32"},
    point=full_or_tiny,
    static=static,
    continues=True,
)
