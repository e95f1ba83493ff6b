"""A mixture-of-experts layer in plain torch: each token is computed by the `top_k` experts that a router
chooses for it.

Tokens are sorted by expert, and `grouped_mm` multiplies the rows of each expert with its own matrix. No size
depends on the data.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Experts(nn.Module):
    """Two linears with a GELU between them for each expert, as stacks of matrices, on [rows, width].

    `ends` are the ends of each expert's rows. The weights are multiplied in the dtype of autocast, which has
    no rule for `grouped_mm`.
    """

    def __init__(self, count: int, width: int, hidden: int, layers: int):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, hidden, width) * 0.02)
        self.down = nn.Parameter(torch.randn(count, width, hidden) * 0.02 / math.sqrt(2 * layers))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        x, up, down = (tensor.to(dtype) for tensor in (x, self.up, self.down))
        hidden = F.gelu(F.grouped_mm(x, up.transpose(-2, -1), offs=ends), approximate="tanh")
        return F.grouped_mm(hidden, down.transpose(-2, -1), offs=ends)


class MixtureOfExperts(nn.Module):
    """[B, T, width] -> [B, T, width]."""

    def __init__(self, count: int, top_k: int, width: int, hidden: int, layers: int):
        super().__init__()
        self.count, self.top_k = count, top_k
        self.router = nn.Linear(width, count, bias=False)
        self.experts = Experts(count, width, hidden, layers)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chances, chosen = self.router(tokens).float().softmax(-1).topk(self.top_k)
        chances = chances / chances.sum(-1, keepdim=True)
        expert, order = chosen.flatten().sort()
        sizes = torch.histc(expert.float(), self.count, 0, self.count - 1)
        made = self.experts(tokens[order // self.top_k], sizes.cumsum(0).to(torch.int32))
        made = made * chances.flatten()[order].unsqueeze(-1).to(made.dtype)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        return made[back].unflatten(0, (-1, self.top_k)).sum(1).view_as(x)
