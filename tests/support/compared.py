"""Healthy models for `fp8compile.compare`, each with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import models
from tests.support.harness import noise

WIDTH, TIME, TOKENS = 128, 16, 160


class Case(NamedTuple):
    model: nn.Module
    args: tuple[Any, ...]
    loss: Callable[[Any], Tensor] | None = None


class LanguageModel(nn.Module):
    """Embedding, layers, norm and head; returns the loss of the next token, as `loss` of a dict."""

    def __init__(self, *layers: nn.Module, tied: bool = False, rms: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.02 if tied else 1.0)
        self.layers = nn.ModuleList(layers)
        self.norm = (nn.RMSNorm if rms else nn.LayerNorm)(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def _to_one(y: Tensor) -> Tensor:
    return (y - 1).square().mean()


def _tokens() -> Tensor:
    return torch.randint(0, TOKENS, (4, TIME), generator=torch.Generator().manual_seed(1))


HEALTHY: dict[str, Callable[[], Case]] = {
    "gpt": lambda: Case(
        models.make(lambda: LanguageModel(models.GptLayer(WIDTH, 4, True), tied=True)), (_tokens(),)
    ),
    "llama": lambda: Case(
        models.make(lambda: LanguageModel(models.LlamaLayer(WIDTH, 4, 2, 256), rms=True)), (_tokens(),)
    ),
    "lora": lambda: Case(
        models.make(lambda: models.Stack(models.Lora(), models.Lora())), (noise(64, WIDTH),), _to_one
    ),
    "moe": lambda: Case(
        models.make(
            lambda: models.Stack(models.ResidualMlp(), models.Moe(), models.ResidualMlp()), torch.bfloat16
        ),
        (noise(2, TIME, WIDTH, dtype=torch.bfloat16),),
        _to_one,
    ),
}
