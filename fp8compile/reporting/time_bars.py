"""Bars of time in parts: where the time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.records import FP8
from .layer_rows import Row


@dataclass(frozen=True)
class Part:
    """A segment of a time bar. `css`: the class that colours it. `width`: in percent of the longest bar."""

    name: str
    css: str
    us: float
    width: float = 0.0


@dataclass(frozen=True)
class Split:
    """Where the time of a step goes, in one precision."""

    name: str
    parts: tuple[Part, ...]

    @property
    def us(self) -> float:
        return sum(part.us for part in self.parts)


def matmul_split(rows: Sequence[Row]) -> tuple[Split, ...]:
    """The matmuls' time in high precision, and their time as decided; () if no layer has estimated times."""
    timed = [layer for row in rows if row.times for layer in row.layers]
    if not timed:
        return ()
    before, after, casts = map(sum, zip(*(layer.times or () for layer in timed), strict=True))
    high = sum(record.bf16_us or 0.0 for layer in timed for record in layer.records if record.decision != FP8)
    after_parts = (
        Part("FP8 matmuls", "fp8", after - high),
        Part("casts", "casts", casts),
        Part("other matmuls", "high", high),
    )
    return scaled([Split("high precision", (Part("matmuls", "high", before),)), Split("FP8", after_parts)])


def scaled(splits: Sequence[Split], longest: float = 0.0) -> tuple[Split, ...]:
    """The splits with the widths of their parts, relative to `longest` (microseconds; 0: the longest of the
    splits). Parts without time are left out."""
    longest = longest or max((split.us for split in splits), default=0.0) or 1.0
    return tuple(
        Split(s.name, tuple(Part(p.name, p.css, p.us, 100 * p.us / longest) for p in s.parts if p.us > 0))
        for s in splits
    )
