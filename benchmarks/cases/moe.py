"""A mixture-of-experts layer without attention: a router, and gated experts as two grouped matmuls.

It does what transformers' default `grouped_mm` experts do: tokens are sorted by expert, each expert's rows
are multiplied with its own matrix of a stack, and the results are weighted and added per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..models import Stack
from .base import Case, Point, Static, noise, weights


@dataclass(frozen=True)
class MoeShape:
    """`width`: features of a token; `hidden`: of an expert; `top`: experts a token."""

    width: int
    hidden: int
    experts: int
    top: int


SHAPES = {
    "qwen3": MoeShape(2048, 768, 128, 8),  # Qwen3-30B-A3B
    "deepseek": MoeShape(7168, 2048, 256, 8),  # DeepSeek-V3, its routed experts
    "mixtral": MoeShape(4096, 14336, 8, 2),
}
TINY = MoeShape(128, 128, 4, 2)


class Experts(nn.Module):
    """Gated feed-forwards, [E, 2 * hidden, width] and [E, width, hidden]."""

    def __init__(self, shape: MoeShape):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(shape.experts, 2 * shape.hidden, shape.width))
        self.down_proj = nn.Parameter(torch.empty(shape.experts, shape.width, shape.hidden))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        gate, up = torch._grouped_mm(x, self.gate_up_proj.transpose(-2, -1), offs=offs).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * up, self.down_proj.transpose(-2, -1), offs=offs)


class MoeLayer(nn.Module):
    """[T, width] -> [T, width], with a residual."""

    def __init__(self, shape: MoeShape):
        super().__init__()
        self.shape = shape
        self.norm = nn.RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = Experts(shape)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        probabilities, chosen = self.gate(h).float().softmax(-1).topk(self.shape.top)
        expert, order = chosen.reshape(-1).sort()
        rows = torch.histc(expert.float(), self.shape.experts, 0, self.shape.experts - 1)
        offs = rows.cumsum(0).to(torch.int32)
        made = self.experts(h[order // self.shape.top], offs)
        made = made * probabilities.reshape(-1)[order].unsqueeze(-1).to(made.dtype)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        return x + made[back].view(*h.shape[:-1], self.shape.top, h.shape[-1]).sum(-2)


def point(layers: int, variant: Mapping[str, Any], shape: MoeShape | None = None) -> Point:
    found = shape or SHAPES[variant["experts"]]
    tokens = variant["tokens"]
    return Point(
        build=lambda: Stack(lambda: MoeLayer(found), layers),
        batches=noise((tokens, found.width)),
        tokens=tokens,
        dtype=weights(variant),
        note=f"{layers} layers of {found.experts} experts",
    )


def full_or_tiny(size: str, variant: Mapping[str, Any]) -> Point:
    if size == "tiny":
        return point(1, {**variant, "tokens": 64}, TINY)
    return point(1, variant)


def static(variant: Mapping[str, Any]) -> Static:
    return Static(lambda layers: point(layers, variant), 1, extrapolate=False)


MOE = Case(
    name="moe",
    title="One mixture-of-experts layer",
    variants={"experts": "qwen3", "tokens": 8192, "weights": "bf16"},
    point=full_or_tiny,
    static=static,
)
