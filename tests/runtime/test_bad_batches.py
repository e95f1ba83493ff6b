"""Bad batches: NaN, infinity, zeros and 1e-30, in inputs, targets and the loss, at random steps of a run.

As in a loop with a GradScaler or a check of the gradients' norm, the optimizer skips a step whose gradients are not finite.
The scaling state must not remember the bad batch: TransformerEngine's history keeps an infinity for its whole length.
A faulty run and a clean one see the same batches except for the faults, so their losses are compared step by step.
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.harness import ALL_FP8, compiled, histories, noise
from tests.support.models import Mlp, make
from tests.support.straight import straight

pytestmark = pytest.mark.shares_graphs

STEPS, BATCH, WIDTH = 240, 32, 128
RECOVERY = 20  # steps
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

RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {},
    "delayed, most recent amax": {"amax_compute_algo": "most_recent"},
    "blockwise": {"recipe": "blockwise"},
    "mxfp8": {"recipe": "mxfp8"},
}


def mlp(seed: int) -> nn.Module:
    return make(lambda: Mlp(WIDTH, WIDTH), seed=seed)


def train(options: Mapping[str, Any], faults: Mapping[int, str], steps: int = STEPS) -> tuple[nn.Module, list[float]]:
    """Fits a teacher and noise; -> the model and its losses. Checks histories and scales after each fault."""
    model, teacher = mlp(1), mlp(2)
    forward = compiled(model, **{"policy": ALL_FP8, **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    with straight():
        for step in range(steps):
            x, factor = noise(BATCH, WIDTH, seed=step), 1.0
            y = teacher(x).detach() + noise(BATCH, WIDTH, seed=10_000 + step, scale=0.1)
            if step in faults:
                x, y, factor = FAULTS[faults[step]](x, y)
            loss = (forward(x) - y).square().mean() * factor
            loss.backward()
            if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step in faults:
                sound(model, f"step {step}, {faults[step]}")
    return model, losses


@functools.cache
def _clean(options: str) -> tuple[nn.Module, list[float]]:
    return train(json.loads(options), {})


def clean_run(options: Mapping[str, Any]) -> tuple[nn.Module, list[float]]:
    """A run without faults, `STEPS` long."""
    return _clean(json.dumps(options))


def sound(model: nn.Module, where: str) -> None:
    """Every amax and scale of the state is finite, and scales are above 0."""
    for key, (history, scale) in histories(model).items():
        assert all(math.isfinite(amax) and amax >= 0 for amax in history), f"{where}: {key} remembers {history}"
        assert 0 < scale < math.inf, f"{where}: {key} is scaled by {scale}"


def recovered(clean: list[float], faulty: list[float], after: int, missed: int = 0) -> None:
    """The mean loss of steps 10 to 20 after a fault is the clean run's to 5%. If the fault stopped training for `missed` steps,
    it may be as high as the clean run's so many steps earlier."""
    last = after + RECOVERY
    low, high = (fmean(clean[end - 10 : end]) for end in (last, last - missed))
    assert 0.95 * low < fmean(faulty[last - 10 : last]) < 1.05 * high, f"after step {after}: {faulty[last - 10 : last]}"


def random_faults(seed: int) -> dict[int, str]:
    """Each of `FAULTS` once in random order, at a random step of its own part of the run, with time to recover."""
    generator = random.Random(seed)
    kinds = generator.sample(list(FAULTS), len(FAULTS))
    stretch = (STEPS - RECOVERY) // len(kinds)
    return {i * stretch + generator.randrange(stretch): kind for i, kind in enumerate(kinds)}


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    "name", [name if name == "delayed" else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_no_bad_batch_leaves_a_trace(name: str) -> None:
    options, faults = RECIPES[name], random_faults(len(name))
    clean_model, clean = clean_run(options)
    model, faulty = train(options, faults)
    assert fmean(clean[-20:]) < 0.5 * clean[0], "the clean run has learned nothing to compare with"
    for step, kind in faults.items():
        finite = math.isfinite(faulty[step])
        assert finite == (kind in ("all zeros", "1e-30", "a loss of 1e-30", "no loss")), f"{kind} at {step}: {faulty[step]}"
        later = [other for other in faults if step < other < step + RECOVERY]
        if not later:
            recovered(clean, faulty, step)
    assert all(p.isfinite().all() for p in model.parameters())
    for key, (_, scale) in histories(model).items():
        assert scale == pytest.approx(histories(clean_model)[key][1], rel=1.0), key
    assert bool(histories(model)) is name.startswith("delayed")


@pytest.mark.cases(test=2, slow=1)
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("fault", "said"), [
    ("NaN in the input", ["up.weight (input)"]),
    ("the loss overflows", ["down.weight (gradient)"]),
    ("1e-30", []),
])  # fmt: skip
def test_the_first_tensor_that_is_not_finite_is_named_once(fault: str, said: list[str], caplog: Any) -> None:
    train({}, {1: fault, 4: fault}, 8)
    found = [record.getMessage() for record in caplog.records if "infinity or a NaN" in record.getMessage()]
    assert len(found) == len(said) and all(name in text for name, text in zip(said, found, strict=True)), found
