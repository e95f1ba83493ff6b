"""remarks: what a report should say of a graph beside its table."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ..config.policy import Policy
from ..errors import at_most
from ..ir.fx_utils import value
from ..ir.matmul import Matmul

SHOWN = 6  # names, or changes of rules, in one remark
FLOAT32 = "without FP8 these experts would multiply in float32{}: grouped matmuls are no part of autocast"


def remarks(matmuls: Collection[Matmul], others: Sequence[str], policy: Policy) -> tuple[str, ...]:
    """`others`: those that passes have made; `policy`: the user's."""
    found = [*_overrides(matmuls), *_at_other_steps(matmuls, policy), *others]
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


def _at_other_steps(matmuls: Collection[Matmul], policy: Policy) -> list[str]:
    """What is decided otherwise at steps other than those of the table, and at which steps which rules are
    active."""
    layers: dict[str, dict[str, None]] = {}
    windows = dict(zip(policy.names, map(policy.window_text, range(len(policy.timed))), strict=True))
    for matmul in matmuls:
        for one in matmul.others:
            window = windows.get(one.rule)
            when = f"while {one.rule} is active ({window})" if window else "at other steps"
            layers.setdefault(f"{one.how} {when}", {})[f"{matmul.fqn} {matmul.gemm}"] = None
    found = [f"{', '.join(at_most(SHOWN, list(names)))}: {line}" for line, names in layers.items()]
    if found:
        active = [(step, ", ".join(policy.active_names(its)) or "none") for step, its in policy.timeline]
        steps = at_most(SHOWN, [f"from step {step}: {names}" for step, names in active])
        found.append(f"active rules with windows: {'; '.join(steps)}")
    return found


def _gain(matmuls: Collection[Matmul]) -> str:
    """How much faster these are in FP8, if they were weighed."""
    times = [(x.price.bf16_us, x.price.fp8_us, x.price.cast_us) for x in matmuls]
    if any(time is None for row in times for time in row):
        return ""
    high, low = sum(row[0] for row in times), sum(row[1] + row[2] for row in times)  # type: ignore[misc, operator]
    return f", {high / low:.1f} times as slow"
