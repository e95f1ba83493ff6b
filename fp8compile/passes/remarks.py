"""remarks: what a report should say of a graph beside its table."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..ir.fx_utils import value
from ..ir.matmul import Matmul

RESHARDED = "weights are cast again in backward: FSDP reshards them after forward"
MERGED = "one matmul each: {}"
CACHED = "FP8 copies of weights are kept between calls (cache_weights): {:.1f} MB"
FLOAT32 = "without FP8 these experts would multiply in float32{}: grouped matmuls are no part of autocast"


def remarks(matmuls: Collection[Matmul], resharded: Collection[int], cached: int = 0) -> tuple[str, ...]:
    """`resharded`: the inputs of the graph that FSDP frees between forward and backward. `cached`: the bytes of the copies of
    weights that are kept between calls."""
    found = [RESHARDED] if any(matmul.fp8 and matmul.weight_among(resharded) for matmul in matmuls) else []
    merged = dict.fromkeys(" + ".join(name.rpartition(".")[2] for name in matmul.merged) for matmul in matmuls if matmul.merged)
    found += [MERGED.format("; ".join(merged))] if merged else []
    found += [CACHED.format(cached / 1e6)] if cached else []
    experts = [matmul for matmul in matmuls if matmul.fp8 and matmul.groups and value(matmul.node).dtype == torch.float32]
    if experts:
        found.append(FLOAT32.format(_gain(experts)))
    return tuple(found)


def _gain(matmuls: Collection[Matmul]) -> str:
    """How much faster these are in FP8, if they were weighed."""
    times = [(x.bf16_us, x.fp8_us, x.cast_us) for x in matmuls]
    if any(time is None for row in times for time in row):
        return ""
    high, low = sum(row[0] for row in times), sum(row[1] + row[2] for row in times)  # type: ignore[misc, operator]
    return f", {high / low:.1f} times as slow"
