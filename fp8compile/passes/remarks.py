"""remarks: what a report should say of a graph beside its table."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ..ir.fx_utils import value
from ..ir.matmul import Matmul

FLOAT32 = "without FP8 these experts would multiply in float32{}: grouped matmuls are no part of autocast"


def remarks(matmuls: Collection[Matmul], others: Sequence[str]) -> tuple[str, ...]:
    """`others`: those that passes have made."""
    found = [*_overrides(matmuls), *others]
    experts = [x for x in matmuls if x.fp8 and x.groups and value(x.node).dtype == torch.float32]
    if experts:
        found.append(FLOAT32.format(_gain(experts)))
    return tuple(found)


def _overrides(matmuls: Collection[Matmul]) -> list[str]:
    """What makes the settings of layers other than those of all, with the number of layers."""
    layers: dict[str, set[str]] = {}
    for matmul in matmuls:
        for line in matmul.decision.overrides if matmul.fp8 else ():
            layers.setdefault(line, set()).add(matmul.name)
    every = len({matmul.name for matmul in matmuls if matmul.fp8})
    which = {1: "1 FP8 layer", every: "all FP8 layers"}
    return [f"{which.get(len(names), f'{len(names)} FP8 layers')}: {line}" for line, names in layers.items()]


def _gain(matmuls: Collection[Matmul]) -> str:
    """How much faster these are in FP8, if they were weighed."""
    times = [(x.price.bf16_us, x.price.fp8_us, x.price.cast_us) for x in matmuls]
    if any(time is None for row in times for time in row):
        return ""
    high, low = sum(row[0] for row in times), sum(row[1] + row[2] for row in times)  # type: ignore[misc, operator]
    return f", {high / low:.1f} times as slow"
