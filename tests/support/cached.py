"""Small models whose weights are cast between calls, and how they train: what tests of cached and of FP8
weights share.

Nothing here resets Dynamo: what one model has compiled serves the next one of its class, with a state of its
own. A test that changes what a compilation does, without an option that says so, calls
`torch._dynamo.reset()` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.harness import ALL_FP8, grads_of, interpreted, noise
from tests.support.models import LlamaLayer, make

BF16 = torch.bfloat16


def options_of(recipe: str, **options: Any) -> dict[str, Any]:
    """Weights are scaled by their current amax, with the cache and without: `cache_weights` does that. With
    `delayed`, by powers of two, so that an optimizer's step can cast."""
    own = {"current_scaling": (False, True, False), "power_of_2_scale": True} if recipe == "delayed" else {}
    return {"policy": ALL_FP8, "recipe": recipe, **own, **options}


def compiled(
    model: nn.Module, cache: bool = True, recipe: str = "tensorwise", **options: Any
) -> Callable[..., Tensor]:
    return torch.compile(model, backend="fp8", options=options_of(recipe, cache_weights=cache, **options))


def trained(
    model: nn.Module, call: Callable[..., Tensor], optimizer: Any, steps: int = 3, micro: int = 3
) -> list[dict[str, Tensor]]:
    """Outputs of each micro-batch, and gradients of each step."""
    found = []
    with interpreted():
        for step in range(steps):
            for i in range(micro):
                x = noise(1, 48, 128, seed=10 * step + i, dtype=next(model.parameters()).dtype)
                y = call(x)
                y.backward(noise(*y.shape, seed=99 + i, dtype=y.dtype))
                found.append({"y": y.detach().clone()})
            found.append(grads_of(model))
            optimizer.step()
            optimizer.zero_grad()
    return found


def same(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    """Bit by bit."""
    return all(
        torch.equal(value, b[name]) for a, b in zip(one, other, strict=True) for name, value in a.items()
    )


def layer() -> nn.Module:
    return make(lambda: LlamaLayer(128, 2, 2, 256), BF16)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)
