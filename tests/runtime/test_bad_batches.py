"""Bad batches: NaN, infinity, zeros and 1e-30, in inputs, targets and the loss.

As in a loop with a GradScaler or a check of the gradients' norm, the optimizer skips a step whose gradients
are not finite. The scaling state must not remember the bad batch: TransformerEngine's history keeps an
infinity for its whole length. A faulty run and a clean one see the same batches except for the faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

import pytest
import torch
from torch import Tensor, nn

from tests.support import hooks
from tests.support.harness import ALL_FP8, compiled, histories, noise
from tests.support.models import Mlp, make

BATCH, WIDTH = 32, 128
APART = 22  # steps from one fault to the next, of which the last ones show whether the training has recovered
TINY = 1e-30


def _with(x: Tensor, value: float) -> Tensor:
    """x with one element replaced."""
    x = x.clone()
    x[3, 5] = value
    return x


# a fault maps (input, target) to (input, target, factor of the loss)
FAULTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor, float]]] = {
    "NaN in the input": lambda x, y: (_with(x, math.nan), y, 1.0),
    "all NaN": lambda x, y: (x * math.nan, y, 1.0),
    "infinity in the input": lambda x, y: (_with(x, math.inf), y, 1.0),
    "NaN in the target": lambda x, y: (x, _with(y, math.nan), 1.0),
    "infinity in the target": lambda x, y: (x, _with(y, -math.inf), 1.0),
    "the loss overflows": lambda x, y: (x, y, math.inf),
    "all zeros": lambda x, y: (x * 0, y, 1.0),
    "1e-30": lambda x, y: (x * TINY, y, 1.0),
    "a loss of 1e-30": lambda x, y: (x, y, TINY),
    "no loss": lambda x, y: (x, y, 0.0),
}
FINITE = ("all zeros", "1e-30", "a loss of 1e-30", "no loss")  # whose loss is a number


def train(faults: Sequence[str]) -> tuple[nn.Module, list[float]]:
    """Fits a teacher and noise; -> model, losses. After a fault ("": none), checks histories and scales."""
    model, teacher = (make(lambda: Mlp(WIDTH, WIDTH), seed=seed) for seed in (1, 2))
    forward = compiled(model, policy=ALL_FP8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    with hooks.lowered():
        for step in range(APART * len(faults)):
            x, factor = noise(BATCH, WIDTH, seed=step), 1.0
            y = teacher(x).detach() + noise(BATCH, WIDTH, seed=10_000 + step, scale=0.1)
            fault = faults[step // APART] if step % APART == 1 else ""
            if fault:
                x, y, factor = FAULTS[fault](x, y)
            loss = (forward(x) - y).square().mean() * factor
            loss.backward()
            if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if fault:
                assert loss.isfinite() == (fault in FINITE), fault
                sound(model, fault)
    return model, losses


def sound(model: nn.Module, where: str) -> None:
    """Every amax and scale of the state is finite, and scales are above 0."""
    for key, (history, scale) in histories(model).items():
        assert all(math.isfinite(amax) and amax >= 0 for amax in history), (
            f"{where}: {key} remembers {history}"
        )
        assert 0 < scale < math.inf, f"{where}: {key} is scaled by {scale}"


@pytest.mark.slow
def test_no_bad_batch_leaves_a_trace() -> None:
    clean_model, clean = train([""] * len(FAULTS))
    model, faulty = train(list(FAULTS))
    assert fmean(clean[-20:]) < 0.5 * clean[0], "the clean run has learned nothing to compare with"
    for i, fault in enumerate(FAULTS, start=1):
        last = slice(APART * i - 10, APART * i)
        assert fmean(faulty[last]) == pytest.approx(fmean(clean[last]), rel=0.05), fault
    assert all(p.isfinite().all() for p in model.parameters())
    for key, (_, scale) in histories(model).items():
        assert scale == pytest.approx(histories(clean_model)[key][1], rel=1.0), key
