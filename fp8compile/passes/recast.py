"""recast: which weights are cast again in backward, with `recast_weights="auto"` on a described device.

dgrad reads the transposed copy of a weight. The forward can write and keep it, a byte a parameter; or the
backward casts again, which reads the weight once more. bf16 keeps no copy of a weight. So a copy is kept only

* where casting again is dear: where it takes more than `CHEAP` of the time of the weight's three matmuls.
  Reading a parameter of s bytes takes s / bandwidth, and its matmuls take 6 * tokens / rate. So the number of
  tokens decides, 8,100 for bf16 on an H200.
* as long as all kept copies are no larger than what FP8 saves on the inputs of matmuls, which it keeps in one
  byte an element instead of two. So FP8 keeps no more than bf16;
* or where casting again takes more than `DEAR`, most of what FP8 gains: of experts with few tokens each.

Below `CHEAP` it is time for memory. Two Llama-3-8B layers at 8192 tokens keep 0.72 of what bf16 keeps; with
all copies 0.91, for 0.8% of the step (estimated for an H200). The measured peak of 0.93 could become 1.00.
"""

from __future__ import annotations

from torch.fx import Node

from .. import compat
from ..devices.catalog import Device
from ..ir.fx_utils import hint, value
from ..ir.matmul import Matmul
from .joint import Joint
from .resolve import overridden

CHEAP, DEAR = 0.015, 0.08
LITTLE = f"casting again in backward takes at most {CHEAP:.1%} of the time of the weight's matmuls"
FULL = "with a copy kept until backward, FP8 would keep more than bf16"


def recast(joint: Joint) -> int:
    """Decide it for each weight that FP8 matmuls read; returns how many weights are cast again."""
    matmuls, device = joint.matmuls, joint.device
    if joint.inference or device is None or not device.has_fp8:
        return 0
    readers: dict[Node, list[Matmul]] = {}
    inputs: dict[Node, int] = {}
    for matmul in (x for x in matmuls if x.fp8):
        for matrix, role in matmul.roles:
            if role == "weight":
                readers.setdefault(matrix.base, []).append(matmul)
            elif role == "input" and not compat.dynamo.is_backward(matrix.base):
                inputs[matrix.base] = hint(value(matrix.base).numel())
    saved, again = sum(inputs.values()), 0
    for weight, its in readers.items():
        if any(matmul.recipe.recast_weights != "auto" or matmul.recipe.cache_weights for matmul in its):
            continue
        size = hint(value(weight).numel())
        share = _share(its, size, value(weight).itemsize, device)
        if share > DEAR or share > CHEAP and size <= saved:
            saved -= size
            continue
        again += 1
        why = LITTLE if share <= CHEAP else FULL
        for matmul in its:
            matmul.decision = overridden(matmul.decision, why, recast_weights=True)
    return again


def _share(matmuls: list[Matmul], size: int, itemsize: int, device: Device) -> float:
    """The time to read a weight once more, as a share of that of its three matmuls."""
    flops = max(2 * hint(x.m) * hint(x.n) * hint(x.k) * hint(x.batch) for x in matmuls)
    rates = device.flops
    return size * itemsize / device.bandwidth / (flops / rates.fp8 + 2 * flops / rates.fp8_precise)
