"""Modules that hold other values than a model's until they are copied, and remember forwards' recipes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

active: list[Any] = []  # the recipes of the contexts around now
seen: list[tuple[str, Any]] = []  # the module and the recipe of each forward


@contextlib.contextmanager
def autocast(
    enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None
) -> Iterator[None]:
    active.append(recipe)
    try:
        yield
    finally:
        active.pop()


class Linear(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: Any = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        where = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}
        self.weight = nn.Parameter(torch.full((out_features, in_features), 7.0, **where))
        # without a bias, TransformerEngine keeps an empty tensor that is no parameter
        self.bias = (
            nn.Parameter(torch.full((out_features,), 7.0, **where)) if bias else torch.empty(0, **where)
        )

    @torch.compiler.disable
    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        seen.append((type(self).__name__, active[-1] if active else None))
        return F.linear(
            inp, self.weight.to(inp.dtype), self.bias.to(inp.dtype) if self.bias.numel() else None
        )


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        params_dtype: Any = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__(in_features, out_features, bias, params_dtype, device)
        assert normalization in ("LayerNorm", "RMSNorm")
        self.eps = eps
        self.layer_norm_weight = nn.Parameter(self.weight.new_full((in_features,), 7.0))
        self.layer_norm_bias = nn.Parameter(self.weight.new_full((in_features,), 7.0))

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return super().forward(
            F.layer_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.eps)
        )
