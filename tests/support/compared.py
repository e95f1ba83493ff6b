"""Nine healthy models for `fp8compile.compare`, each with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import models

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
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), "logits": logits}


class Classifier(nn.Module):
    """Patches by a convolution, then blocks and a head (a ViT), or a head on the flattened patches."""

    def __init__(self, *layers: nn.Module, norm: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, 8)
        self.norm = nn.BatchNorm2d(WIDTH) if norm else nn.Identity()
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.patches(images)).flatten(2).transpose(1, 2)
        return self.classifier(self.layers(x).mean(1))


class Normed(nn.Module):
    """A norm before and after each matmul, and on the gates."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + F.rms_norm(linear(norm(x)), (WIDTH,))
        return x


def _to_one(y: Tensor) -> Tensor:
    return (y - 1).square().mean()


def _labels(y: Tensor) -> Tensor:
    return F.cross_entropy(y, torch.arange(y.shape[0]) % 10)


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _tokens() -> Tensor:
    return torch.randint(0, TOKENS, (4, TIME), generator=torch.Generator().manual_seed(1))


def _gpt(causal: bool = True) -> nn.Module:
    return models.GptLayer(WIDTH, 4, causal)


def _llama() -> nn.Module:
    return models.LlamaLayer(WIDTH, 4, 2, 256)


def _frozen() -> nn.Module:
    """A frozen stack below a trained one."""
    base, top = (models.Stack(models.ResidualMlp(), last()) for last in (models.ResidualMlp, models.Mlp))
    return models.Stack(base.requires_grad_(False), top)


HEALTHY: dict[str, Callable[[], Case]] = {
    "gpt": lambda: Case(models.make(lambda: LanguageModel(_gpt(), _gpt())), (_tokens(),)),
    "llama": lambda: Case(models.make(lambda: LanguageModel(_llama(), rms=True)), (_tokens(),)),
    "vit": lambda: Case(models.make(lambda: Classifier(_gpt(False))), (_noise(8, 3, 32, 32),), _labels),
    "conv": lambda: Case(
        models.make(lambda: Classifier(models.Mlp(), nn.ReLU(), norm=True)), (_noise(8, 3, 32, 32),), _labels
    ),
    "tied": lambda: Case(models.make(lambda: LanguageModel(_gpt(), tied=True)), (_tokens(),)),
    "lora": lambda: Case(models.make(lambda: models.Stack(models.Lora(), models.Lora())), (_noise(64, WIDTH),), _to_one),
    "moe": lambda: Case(
        models.make(lambda: models.Stack(models.ResidualMlp(), models.Moe(), models.ResidualMlp()), torch.bfloat16),
        (_noise(2, TIME, WIDTH).bfloat16(),),
        _to_one,
    ),
    "frozen": lambda: Case(models.make(_frozen), (_noise(64, WIDTH),), _to_one),
    "normed": lambda: Case(models.make(Normed), (_noise(64, WIDTH),), _to_one),
}
