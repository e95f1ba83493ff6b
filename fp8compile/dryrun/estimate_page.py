"""The HTML page of an estimate: the time of a step in bf16 and in FP8, then the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..reporting.html import Page, TimedPart, Timing, render, section, title
from ..reporting.layers import Part, Split, microseconds, percent, scaled

if TYPE_CHECKING:
    from .estimate import Cost, Estimate

_METHOD = (
    "A roofline over the kernels that both compilations launch: no measurement. It leaves out the optimizer, communication and "
    "the host. A kernel that serves several parts of the model counts for one of them, and a cast counts where its copy is "
    "read: what a part gains may show at its neighbour."
)


def page(found: Estimate, table: tuple[tuple[str, ...], ...], path: str | Path | None = None) -> str:
    """The page, also written to `path` if given. `table` has all numbers of each layer as text, below a head."""
    bf16, fp8 = found.bf16, found.fp8
    facts = (
        ("device", found.device),
        ("matmul FLOPs in FP8", percent(found.report.fp8_flop_fraction)),
        ("kernels", f"{bf16.kernels:.0f} → {fp8.kernels:.0f}"),
        ("moved outside of matmuls", _gigabytes(bf16.bytes_outside_matmuls, fp8.bytes_outside_matmuls)),
        ("kept for backward", _gigabytes(bf16.kept_for_backward, fp8.kept_for_backward)),
    )
    longest = 1e6 * max((cost.seconds for layer in found.layers for cost in (layer.bf16, layer.fp8)), default=0.0)
    parts = [_part(x.name, x.bf16, x.fp8, longest) for x in found.layers if x.bf16.seconds or x.fp8.seconds]
    timing = Timing((_METHOD, *found.notes), _part("all", bf16, fp8).splits, tuple(parts), table)
    headline = f"{found.speedup:.2f}× on {found.device}, estimated"
    sections = tuple(map(section, found.report.graphs))
    return render(Page(title("estimate", found.report.graphs), headline, found.summary(), facts, sections, timing), path)


def _part(name: str, bf16: Cost, fp8: Cost, longest: float = 0.0) -> TimedPart:
    """Bars are as wide as their share of `longest` (microseconds), or of the longer of the two."""
    times = f"{microseconds(1e6 * bf16.seconds)} → {microseconds(1e6 * fp8.seconds)}"
    speedup = f"{bf16.seconds / fp8.seconds:.2f}×" if fp8.seconds and bf16.seconds else "–"
    return TimedPart(name, times, speedup, scaled([_split("bf16", bf16), _split("FP8", fp8)], longest))


def _split(name: str, cost: Cost) -> Split:
    rest = max(0.0, cost.seconds - cost.matmul_seconds - cost.attention_seconds)
    casts = cost.fp8_matmul_seconds > 0
    times = (
        ("FP8 matmuls", "fp8", cost.fp8_matmul_seconds),
        ("other matmuls" if casts else "matmuls", "high", cost.matmul_seconds - cost.fp8_matmul_seconds),
        ("attention", "attention", cost.attention_seconds),
        ("casts and other" if casts else "other", "casts" if casts else "other", rest),
    )
    return Split(name, tuple(Part(what, kind, 1e6 * seconds) for what, kind, seconds in times))


def _gigabytes(before: float, after: float) -> str:
    return f"{before / 1e9:.3g} GB → {after / 1e9:.3g} GB"
