"""Numbers that FP8 represents exactly: matmuls of them give the same results in FP8 as in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

EXACT = 80.0  # dB


def ternary(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def signs(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).float() * 2 - 1


def linear(into: int = 128, out: int = 256, bias: bool = False) -> nn.Linear:
    made = nn.Linear(into, out, bias=bias)
    made.weight.data = signs(out, into) / 8
    if bias:
        made.bias.data = signs(out)
    return made


class Model(nn.Module):
    """`function(self, x)` on some parameters, buffers and modules."""

    def __init__(self, function: Callable, **parts: Tensor | nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Parameter) or isinstance(part, nn.Module):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Several(nn.ModuleList):
    """Models side by side, in one graph, each with an input of its own."""

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [part(x) for part, x in zip(self, inputs, strict=True)]


def parameter(*shape: int, seed: int = 1) -> nn.Parameter:
    return nn.Parameter(signs(*shape, seed=seed))
