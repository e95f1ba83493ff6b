"""One step as the device ran it: when each kernel began, gaps between kernels, each matmul with its sizes.

    {"step": "the last of 3", "span_ms", "busy_ms", "gap_ms", "gaps": {"under 5 us": {"count", "ms"}, ..},
     "longest_gaps": [{"us", "after", "before"}], "names": [..], "launches": [[start us, us, name], ..],
     "matmuls": [{"start_us", "us", "name", "class", "op", "m", "n", "k", "tflops"}]}

A span begins where the step before ends. `name` is a number in `names`. Sizes come from a second profile, of
the host's operators; they are null where it has other matmuls in another order (a CUDA graph has no
operators on the host).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fp8compile.dryrun.kernel_classes import MeasuredKernel, classify

GEMMS = ("fp8_gemm", "bf16_gemm")
GAPS = ((5.0, "under 5 us"), (50.0, "5 to 50 us"), (float("inf"), "over 50 us"))
LONGEST = 20
MATMULS = "mm bmm _grouped_mm _scaled_mm _scaled_mm_v2 _scaled_grouped_mm _scaled_grouped_mm_v2"
# where the operands of an operator stand among its inputs
OPERANDS = {f"aten::{name}": 0 for name in MATMULS.split()} | {"aten::addmm": 1, "aten::baddbmm": 1}


class Sized(NamedTuple):
    """A matmul kernel that the host launched. `m`, `n`, `k`: of the matmul, or of one of its `batch`; `k` of
    a sum over all groups. `parts`: how many kernels the operator launched."""

    name: str
    op: str
    m: int
    n: int
    k: int
    batch: int
    parts: int


def last_step(
    launches: Sequence[MeasuredKernel], steps: int
) -> tuple[list[MeasuredKernel], float | None, str]:
    """The launches of the last step, when the one before ended, and what they are called. If steps do not
    launch the same kernels: those of all steps."""
    each, rest = divmod(len(launches), steps)
    names = [launch.name for launch in launches]
    if rest or any(names[i * each : (i + 1) * each] != names[:each] for i in range(steps)):
        return list(launches), None, f"all {steps}, which differ"
    before = max((x.start + x.us for x in launches[: each * (steps - 1)]), default=None)
    return list(launches[each * (steps - 1) :]), before, f"the last of {steps}"


def summarise(
    launches: Sequence[MeasuredKernel], steps: int, sized: Sequence[Sized] = ()
) -> dict[str, Any] | None:
    """The timeline; None without launches. `sized`: the matmuls of as many steps."""
    if not launches:
        return None
    step, end, what = last_step(launches, steps)
    begin = step[0].start if end is None else end
    names = list(dict.fromkeys(launch.name for launch in step))
    gaps, last, covered = [], "the step before", begin
    for launch in step:
        if launch.start > covered:
            gaps.append((launch.start - covered, last, launch.name))
        if launch.start + launch.us > covered:
            covered, last = launch.start + launch.us, launch.name
    gap_us = sum(us for us, _, _ in gaps)
    kinds: dict[str, dict[str, float]] = {kind: {"count": 0, "ms": 0.0} for _, kind in GAPS}
    for us, _, _ in gaps:
        entry = kinds[next(kind for most, kind in GAPS if us < most)]
        entry["count"] += 1
        entry["ms"] = round(entry["ms"] + us / 1e3, 4)
    return {
        "step": what,
        "span_ms": round((covered - begin) / 1e3, 4),
        "busy_ms": round((covered - begin - gap_us) / 1e3, 4),
        "gap_ms": round(gap_us / 1e3, 4),
        "gaps": kinds,
        "longest_gaps": [
            {"us": round(us, 1), "after": after[:100], "before": before[:100]}
            for us, after, before in sorted(gaps, key=lambda gap: -gap[0])[:LONGEST]
        ],
        "names": [name[:200] for name in names],
        "launches": [[round(x.start - begin, 1), round(x.us, 2), names.index(x.name)] for x in step],
        "matmuls": matmuls(step, begin, names, sized),
    }


def matmuls(
    step: Sequence[MeasuredKernel],
    begin: float,
    names: Sequence[str],
    sized: Sequence[Sized],
) -> list[dict[str, Any]]:
    """Each matmul launch by itself, in order. A kernel that no operator of `sized` launches (a generated one)
    has no sizes."""
    known = {one.name for one in sized}
    ran = [launch.name for launch in step if launch.name in known]
    last = sized[len(sized) - len(ran) :]
    after = iter(last if [one.name for one in last] == ran else ())
    found = []
    for launch in step:
        kind = classify(launch.name)
        if kind not in GEMMS:
            continue
        row: dict[str, Any] = {
            "start_us": round(launch.start - begin, 1),
            "us": round(launch.us, 2),
            "name": names.index(launch.name),
            "class": kind,
        }
        row |= dict.fromkeys(("op", "m", "n", "k", "batch", "tflops"))
        one = next(after, None) if launch.name in known else None
        if one is not None:
            row |= {"op": one.op, "m": one.m, "n": one.n, "k": one.k, "batch": one.batch}
            if one.parts == 1 and launch.us:
                row["tflops"] = round(2e-6 * one.m * one.n * one.k * one.batch / launch.us, 1)
        found.append(row)
    return found


def sizes(op: str, shapes: Sequence[Sequence[int]]) -> tuple[int, int, int, int] | None:
    """(m, n, k, batch) of a matmul operator; None of another one. A grouped matmul of rows [M, K] and a stack
    [E, K, N] is one of M, N, K; of two matrices it is one that sums over all K."""
    at = OPERANDS.get(op)
    if at is None or len(shapes) < at + 2:
        return None
    a, b = shapes[at : at + 2]
    if len(a) < 2 or len(b) < 2:
        return None
    batch = a[0] if len(a) == len(b) == 3 else 1
    return a[-2], b[-1], a[-1], batch


def sized_matmuls(profile: Any) -> list[Sized]:
    """The matmul kernels of a profile with the host's operators and their sizes, in order."""
    found = []
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        of = sizes(event.name, event.input_shapes or ())
        kernels = [kernel.name for kernel in event.kernels if classify(kernel.name) in GEMMS]
        if of is not None:
            found += [Sized(name, event.name, *of, len(kernels)) for name in kernels]
    return found
