"""Classifies device kernels by name, and sums up the kernels that the profiler saw in a step.

    fp8_gemm     matmuls of FP8 operands: the proof that FP8 ran
    bf16_gemm    all other matmuls
    cast         kernels that read or write FP8, or compute an amax (also if fused with a GELU, a norm, ...)
    attention    fused attention
    other        the rest: norms, losses, the optimizer, copies

Names identify the matmuls and attention of libraries, and fp8compile's own kernels (`fp8_..`). The names of
Inductor's kernels do not contain dtypes: who has read their sources says which of them are casts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

CLASSES = ("fp8_gemm", "bf16_gemm", "cast", "attention", "other")

# cuBLAS: nvjet_<a><b>.., with letters for the operands' types: q = E4M3 (also in hybrid's matmuls of E5M2 and
# E4M3), t = bf16, h = half, s = float; xmma and CUTLASS spell the types out. hipBLASLt: Cijk_.._F8.. (or B8).
# Inductor's Triton templates: triton_tem_fused__scaled_mm_... Our own kernel for block scales: fp8_gemm_..
_FP8_GEMM = re.compile(
    r"nvjet_(?:sm\d+_)?(?:q[a-z]|[a-z]q)|xmma_gemm_e[45]m[32]|gemm\w*_(?:f8f8|e[45]m[32])|Cijk_\w*?_(?:F8|B8)|f8f8bf16"
    r"|(?:cutlass|gemm|device_kernel).*float_e[45]m[32]_t|triton_tem_\w*scaled_(?:grouped_)?mm|fp8_gemm",
    re.IGNORECASE,
)
_GEMM = re.compile(
    r"nvjet_|gemm|Cijk_|gemv|triton_tem_\w*(?:mm|matmul)|cublas\w*matmul|wgmma|s16816|s1688|splitk_?reduce",
    re.IGNORECASE,
)
_ATTENTION = re.compile(
    r"flash|fmha|sdpa|attention|cutlass[FB]_|triton_tem_\w*flex|AttentionKernel|mha_(?:fwd|bwd)|attn_(?:fwd|bwd)",
    re.IGNORECASE,
)
_CAST = re.compile(r"float8|fp8|quantize|amax", re.IGNORECASE)
_GENERATED = re.compile(r"^fp8_(?:\w+_)?(?:cast|transpose|scale|amax|columns|sum|raise|move)(?:_|$)")
_MEMORY = re.compile(r"^(?:Memcpy|Memset)", re.IGNORECASE)


def classify(name: str, casts: Iterable[str] = ()) -> str:
    """The class of a kernel. `casts`: names of Inductor's kernels that read or write FP8."""
    if _MEMORY.match(name):
        return "other"
    if _GENERATED.match(name):  # first, because the name lists fused operators, such as attention's dropout
        return "cast"
    if _FP8_GEMM.search(name):
        return "fp8_gemm"
    if _ATTENTION.search(name):
        return "attention"
    if name in casts:
        return "cast"
    if _GEMM.search(name) and not name.startswith(("triton_poi", "triton_red", "triton_per", "triton_for")):
        return "bf16_gemm"
    return "cast" if _CAST.search(name) else "other"


class MeasuredKernel(NamedTuple):
    """What ran on the device once. Times are in microseconds; `start` is relative to that of the profile."""

    name: str
    us: float
    start: float = 0.0


def summarise(launches: Iterable[MeasuredKernel], casts: Iterable[str], steps: int) -> dict[str, Any]:
    """The launches of `steps` steps -> kernels and ms a step by class, and longest kernels."""
    known = set(casts)
    classes = {kind: {"count": 0.0, "ms": 0.0} for kind in CLASSES}
    names: dict[str, list[float]] = {}
    for name, microseconds, _ in launches:
        entry = classes[classify(name, known)]
        entry["count"] += 1 / steps
        entry["ms"] += microseconds / 1e3 / steps
        names.setdefault(name, []).append(microseconds)
    longest = sorted(names.items(), key=lambda item: -sum(item[1]))[:40]
    return {
        "classes": {
            kind: {"count": round(entry["count"], 2), "ms": round(entry["ms"], 4)}
            for kind, entry in classes.items()
        },
        "count": round(sum(entry["count"] for entry in classes.values()), 2),
        "busy_ms": round(sum(entry["ms"] for entry in classes.values()), 4),
        "longest": [
            {
                "name": name[:200],
                "class": classify(name, known),
                "count": round(len(times) / steps, 2),
                "ms": round(sum(times) / 1e3 / steps, 4),
            }
            for name, times in longest
        ],
    }


def launches(profile: Any) -> list[MeasuredKernel]:
    """All that ran on the device in a torch.profiler.profile, in order."""
    from torch.autograd import DeviceType

    found = [
        MeasuredKernel(event.name, event.time_range.elapsed_us(), event.time_range.start)
        for event in profile.events()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    return sorted(found, key=lambda launch: launch.start)
