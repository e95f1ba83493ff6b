"""The numbers and words that a report shows: layers, and rows of equal layers.

A `Layer` is the gemms of one weight at one size. A `Row` is one layer, or several equal layers whose names
differ in numbers only. This module groups and names the rows of every table and of the HTML page:

    h.0.fc, h.1.fc, ... h.11.fc  ->  h.0-11.fc
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from ..ir.records import FORWARD, FP8, MatmulRecord, forward_sizes

T = TypeVar("T")

ROWS_IN_DETAIL = 128  # at most so many members of a group get their own line
GEMMS = ("fprop", "dgrad", "wgrad", "matmul")


@dataclass(frozen=True)
class Layer:
    """The gemms of one weight at one size, or all matmuls without a weight of one module."""

    fqn: str
    records: tuple[MatmulRecord, ...]

    @property
    def name(self) -> str:
        return self.fqn or "(root)"

    @cached_property
    def flops(self) -> int:
        return sum(record.flops for record in self.records)

    @cached_property
    def css(self) -> str:
        """ "fp8", "high" or "partly"."""
        decisions = {record.decision for record in self.records}
        return "partly" if len(decisions) > 1 else "fp8" if FP8 in decisions else "high"

    @cached_property
    def size(self) -> str:
        """ "512 × 768 × 256": m, n and k of the forward matmul; "3 sizes" if the records differ in size."""
        sizes = dict.fromkeys(size_of(record) for record in self.records)
        return next(iter(sizes)) if len(sizes) == 1 else f"{len(sizes)} sizes"

    @cached_property
    def lines(self) -> tuple[tuple[MatmulRecord, ...], ...]:
        """Groups of records with the same size, decision and reason: the lines of the text table."""
        groups: dict[tuple[str, str, str], list[MatmulRecord]] = {}
        for record in self.records:
            groups.setdefault((size_of(record), record.decision, words(record)), []).append(record)
        return tuple(map(tuple, groups.values()))

    @cached_property
    def why(self) -> str:
        """The decision in words: "FP8, delayed", "high precision: output head", "partly FP8; wgrad: ..."."""
        if self.css != "partly":
            return decided(self.records)
        kept: dict[str, list[MatmulRecord]] = {}
        for record in self.records:
            if record.decision != FP8:
                kept.setdefault(words(record), []).append(record)
        parts = [f"{gemms(group)}: {why or 'high precision'}" for why, group in kept.items()]
        return "; ".join(["partly FP8", *parts])

    @cached_property
    def rules(self) -> str:
        """The rules that decided, without those that a reason begins with."""
        named = ((record.rule, record.reason.removeprefix("policy: ")) for record in self.records)
        return ", ".join(dict.fromkeys(rule for rule, why in named if rule and not why.startswith(rule)))

    @cached_property
    def times(self) -> tuple[float, float, float] | None:
        """Estimated microseconds (all in high precision, as decided, of casts); None if any is unknown."""
        if any(record.bf16_us is None for record in self.records):
            return None
        before = sum(record.bf16_us or 0.0 for record in self.records)
        times = [r.fp8_us if r.decision == FP8 and r.fp8_us is not None else r.bf16_us for r in self.records]
        after = sum(us or 0.0 for us in times)
        casts = sum(record.cast_us or 0.0 for record in self.records if record.decision == FP8)
        return before, after, casts

    @property
    def like(self) -> tuple[Any, ...]:
        """A key: layers share a row if this key and their names without numbers are equal."""
        return tuple(
            (r.gemm, r.m, r.n, r.k, r.batch, r.op, r.decision, r.reason, r.how, r.rule, r.dynamic)
            for r in self.records
        )


@dataclass(frozen=True)
class Row:
    """One layer, or several equal layers."""

    name: str
    layers: tuple[Layer, ...]
    longest: int = 1  # FLOPs of the longest bar
    total: int = 1

    @property
    def first(self) -> Layer:
        return self.layers[0]

    @property
    def flops(self) -> int:
        return sum(layer.flops for layer in self.layers)

    @property
    def width(self) -> str:
        """Width of the bar, in percent of the longest bar."""
        return f"{100 * self.flops / self.longest if self.longest else 0:.3f}"

    @property
    def fp8_width(self) -> str:
        """Width of the FP8 part, in percent of the bar."""
        return f"{100 * fraction([record for layer in self.layers for record in layer.records]):.3f}"

    @property
    def share(self) -> str:
        return percent(self.flops / self.total if self.total else 0.0)

    @property
    def times(self) -> tuple[float, float, float] | None:
        """As Layer.times, summed over all layers."""
        parts = [layer.times for layer in self.layers if layer.times]
        if len(parts) < len(self.layers):
            return None
        before, after, casts = map(sum, zip(*parts, strict=True))
        return before, after, casts

    @property
    def gain(self) -> str:
        """ "12.0 µs → 8.1 µs"; "" without an estimate."""
        if not self.times:
            return ""
        before, after = microseconds(self.times[0]), microseconds(self.times[1] + self.times[2])
        return before if self.first.css == "high" else f"{before} → {after}"

    @property
    def hover(self) -> str:
        each = f" ({len(self.layers)} layers)" if len(self.layers) > 1 else ""
        lines = [
            self.name + each,
            f"m × n × k: {self.first.size}",
            f"{flops(self.flops)}, {self.share} of the matmul FLOPs",
        ]
        for line in self.first.lines:
            size = f", {size_of(line[0])}" if self.first.size != size_of(line[0]) else ""
            lines.append(f"{gemms(line)}{size}: {decided(line)}")
        if self.first.rules:
            lines.append(f"rule: {self.first.rules}")
        if self.times:
            before, after, casts = map(microseconds, self.times)
            lines.append(f"estimated: {before} in high precision, {after} as decided + {casts} of casts")
        return "\n".join(lines)

    def members(self) -> list[Row]:
        """A row for each layer, for the details: at most ROWS_IN_DETAIL, and none for a single layer."""
        rows = [Row(layer.name, (layer,), self.longest, self.total) for layer in self.layers]
        return rows[:ROWS_IN_DETAIL] if len(rows) > 1 else []


# -- grouping --


def layers_of(matmuls: Iterable[MatmulRecord]) -> list[Layer]:
    """The layers of some matmuls: see `Layer`."""
    groups: dict[tuple[Any, ...], list[MatmulRecord]] = {}
    for r in matmuls:
        sizes = () if r.gemm == "matmul" else tuple(sorted((r.m, r.n, r.k)))
        key = (r.fqn, r.parameter, r.gemm == "matmul", sizes, r.batch if sizes else 0)
        groups.setdefault(key, []).append(r)
    ordered = {key: sorted(group, key=lambda r: GEMMS.index(r.gemm)) for key, group in groups.items()}
    return [Layer(key[0], tuple(group)) for key, group in ordered.items()]


def rows_of(layers: Sequence[Layer], collapse: bool = True) -> tuple[Row, ...]:
    """One row for equal layers; without `collapse`, only for those whose full names are equal, too."""
    groups = alike(layers, lambda layer: layer.fqn, lambda layer: layer.like, collapse)
    total = sum(layer.flops for layer in layers)
    longest = max((sum(layer.flops for layer in group) for _, group in groups), default=1)
    return tuple(Row(name, tuple(group), longest, total) for name, group in groups)


def alike(
    items: Iterable[T], name: Callable[[T], str], like: Callable[[T], Hashable], collapse: bool = True
) -> list[tuple[str, list[T]]]:
    """Groups of items with equal `like` whose names differ in numbers only, and their names: "h.0-11.fc".

    Without `collapse`, the names in a group have to be equal.
    """
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault((pattern(name(item)) if collapse else name(item), like(item)), []).append(item)
    return [(joined([name(item) for item in group]) or "(root)", group) for group in groups.values()]


# -- names --


def parts(name: str) -> list[str]:
    """Splits a name at its numbers, which get the odd indices: "h.3.fc" -> ["h.", "3", ".fc"]."""
    return re.split(r"((?:^|(?<=\.))\d+(?=\.|$))", name)


def pattern(name: str) -> tuple[str, ...]:
    """The parts of a name with * for its numbers."""
    return tuple("*" if i % 2 else part for i, part in enumerate(parts(name)))


def joined(names: Iterable[str]) -> str:
    """ "h.0-11.fc" for names of one pattern. Numbers that vary become * if a combination is missing."""
    split = {tuple(parts(name)) for name in names}
    columns = [set(column) for column in zip(*split, strict=True)]
    whole = math.prod(map(len, columns)) == len(split)

    def said(column: set[str]) -> str:
        return column.pop() if len(column) == 1 else _ranges(map(int, column)) if whole else "*"

    return "".join(map(said, columns))


def _ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# -- words --


def words(record: MatmulRecord) -> str:
    """The recipe of an FP8 matmul, or the reason why a matmul stays in high precision."""
    return record.how if record.decision == FP8 else record.reason


def decided(records: Sequence[MatmulRecord]) -> str:
    """ "FP8, delayed and tensorwise" or "high precision: output head", of matmuls with one decision."""
    why = dict.fromkeys(filter(None, map(words, records)))
    if records[0].decision == FP8:
        return ", ".join(filter(None, ("FP8", " and ".join(why))))
    return ": ".join(filter(None, ("high precision", ", ".join(why))))


def sizes_of(record: MatmulRecord) -> tuple[str, str, str, str]:
    """m, n and k of the forward matmul, and the batch ("" if there is none); dynamic ones with a *."""
    names = FORWARD.get(record.gemm, "mnk")
    sizes = dict(zip((*names, "b"), (*forward_sizes(record), record.batch), strict=True))
    m, n, k, batch = (f"{size}{'*' * (name in record.symbolic)}" for name, size in sizes.items())
    return m, n, k, batch if record.batch > 1 or "b" in record.symbolic else ""


def size_of(record: MatmulRecord) -> str:
    """ "8 · 512* × 768 × 256": the batch, if any, and m, n, k of the forward matmul; * after dynamic ones."""
    m, n, k, batch = sizes_of(record)
    return f"{batch} · {m} × {n} × {k}" if batch else f"{m} × {n} × {k}"


def gemms(records: Iterable[MatmulRecord]) -> str:
    """ "fprop (x2), wgrad"."""
    counts = Counter(record.gemm for record in records)
    return ", ".join(gemm + repeated(count) for gemm, count in counts.items())


def repeated(count: int) -> str:
    """ " (x2)"; "" for one."""
    return f" (x{count})" if count > 1 else ""


# -- shares --


def fraction(matmuls: Sequence[MatmulRecord]) -> float:
    """FLOPs of the FP8 matmuls over FLOPs of all; 0.0 when there are none."""
    total = sum(record.flops for record in matmuls)
    return sum(record.flops for record in matmuls if record.decision == FP8) / total if total else 0.0


def percent(fraction: float) -> str:
    """One decimal; only exact 0 and 1 give 0.0% and 100.0%."""
    shown = round(100 * fraction, 1)
    if 0 < fraction < 1:
        shown = min(max(shown, 0.1), 99.9)
    return f"{shown:.1f}%"


def share(matmuls: Sequence[MatmulRecord]) -> str:
    """ "3 of 6 matmuls, 27.3% of matmul FLOPs"."""
    if not matmuls:
        return "no matmuls"
    count = sum(record.decision == FP8 for record in matmuls)
    return f"{count} of {len(matmuls)} matmuls, {percent(fraction(matmuls))} of matmul FLOPs"


# -- units --


def microseconds(us: float) -> str:
    """Three digits: "12.3 µs", "4.56 ms", "1.23 s"."""
    return _with_unit(us, "µs", "ms", "s")


def flops(count: float) -> str:
    """Three digits: "9.66 GFLOP", "1.20 TFLOP"."""
    return _with_unit(count / 1e3, "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")


def _with_unit(value: float, *units: str) -> str:
    """`value`, given in the first unit, in the first of at most three digits. Each is 1000 of the last."""
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1e3, units[1:]
    digits = 0 if value >= 99.95 or value == 0 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {units[0]}"
