"""Recomputations run as their forwards did: checkpoints change nothing, whatever forwards wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.harness import grads_of, noise
from tests.support.models import ResidualMlp, make

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]

SIZES = (1.0, 1.0, 300.0, 1.0, 1e-5, 1.0, 1.0)  # of micro-batches: some overflow, some underflow
SCHEDULES = {  # micro-batches: n goes forward, ~n backward
    "one by one": (0, ~0, 1, ~1, 2, ~2, 3, ~3, 4, ~4, 5, ~5, 6, ~6),
    "all forward": (0, 1, 2, 3, 4, 5, 6, ~0, ~1, ~2, ~3, ~4, ~5, ~6),
    "1F1B": (0, 1, 2, ~0, 3, ~1, 4, ~2, 5, ~3, 6, ~4, ~5, ~6),
    "last first": (0, 1, 2, ~2, ~1, ~0, 3, 4, ~4, 5, 6, ~6, ~3, ~5),
}


class Blocks(nn.Module):
    """Blocks that are compiled one by one. Each runs so often in a row, in one checkpoint."""

    def __init__(self, loops: Sequence[int], checkpointed: bool, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make(ResidualMlp) for _ in loops)
        self.loops, self.checkpointed = loops, checkpointed
        for block in self.blocks:
            block.compile(backend="fp8", options=options)

    def forward(self, x: Tensor) -> Tensor:
        for given in zip(self.blocks, self.loops, strict=True):
            x = checkpoint(loop, x, *given, use_reentrant=False) if self.checkpointed else loop(x, *given)
        return x


def loop(x: Tensor, block: nn.Module, times: int) -> Tensor:
    for _ in range(times):
        x = block(x)
    return x


def trained(loops: int, checkpointed: bool, schedule: str, options: dict[str, Any]) -> list[Tensor]:
    """Outputs and gradients, step by step. Weights grow four-fold at one step, and shrink at another."""
    model, seen = Blocks((loops, loops), checkpointed, **options), []
    for step, factor in enumerate((1.0, 4.0, 0.25, 1.0)):
        for weight in model.parameters():
            weight.data.mul_(factor)
        waiting: dict[int, Tensor] = {}
        for n in SCHEDULES[schedule]:
            if n >= 0:
                waiting[n] = model(noise(16, 128, seed=10 * step + n) * SIZES[n])
                seen.append(waiting[n].detach())
            else:
                waiting.pop(~n).square().mean().backward()
        seen += [grad.clone() for grad in grads_of(model).values()]
        model.zero_grad()
    return seen


@pytest.mark.cases(test=1, slow=3)
@pytest.mark.compat
@pytest.mark.parametrize(
    ("schedule", "loops", "options"),
    [
        ("1F1B", 1, {}),
        ("all forward", 2, {}),
        ("one by one", 3, {"current_scaling": (False, False, True)}),
        ("1F1B", 2, {"interval": 3}),
        ("last first", 1, {"on_overflow": "saturate"}),
        ("1F1B", 1, {"cache_weights": True}),
        ("last first", 2, {"recipe": "rowwise"}),
    ],
    ids=str,
)
def test_checkpoints_change_nothing(schedule: str, loops: int, options: dict[str, Any]) -> None:
    """To the bit."""
    expected, found = (trained(loops, checkpointed, schedule, options) for checkpointed in (False, True))
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))
