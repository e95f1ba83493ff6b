"""The result of an estimate: the cost of a step in bf16 and FP8, by part, as text, for JSON and as a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..reporting.columns import aligned
from ..reporting.html import HtmlPage, Part, Split, TimedPart, Timing, render, section, split, title
from ..reporting.layer_rows import microseconds, percent
from ..reporting.report import Report
from . import roofline

if TYPE_CHECKING:
    from ..devices.catalog import Device
    from .fake_gpu import Launch

_METHOD = (
    "A roofline over the kernels that both compilations launch: no measurement. It leaves out the host, the "
    "optimizer unless it is asked for, and communication. A kernel that serves several parts of the model "
    "counts for one of them, and a cast counts where its copy is read: what a part gains may show at its "
    "neighbour."
)


@dataclass(frozen=True)
class Cost:
    """The cost of some kernels: counts, bytes, FLOPs and seconds. `flops` are those of matmuls, by dtype
    ("fp8", "bfloat16", ...), without fused attention."""

    kernels: float = 0
    bytes: float = 0
    bytes_outside_matmuls: float = 0
    flops: Mapping[str, float] = field(default_factory=dict)
    attention_flops: float = 0
    kept_for_backward: float = 0
    seconds: float = 0
    matmul_seconds: float = 0
    fp8_matmul_seconds: float = 0
    attention_seconds: float = 0

    def __add__(self, other: Cost) -> Cost:
        return self.plus(other, 1)

    def plus(self, other: Cost, times: float) -> Cost:
        """self + times * other."""
        numbers = {f.name: getattr(self, f.name) + times * getattr(other, f.name) for f in _NUMBERS}
        dtypes = sorted({*self.flops, *other.flops})
        flops = {d: self.flops.get(d, 0) + times * other.flops.get(d, 0) for d in dtypes}
        return Cost(flops=flops, **numbers)

    @property
    def negative(self) -> bool:
        """Whether some number is, beyond rounding."""
        numbers = {**{f.name: getattr(self, f.name) for f in _NUMBERS}, **self.flops}
        return any(x < (-1e-9 if name.endswith("seconds") else -0.5) for name, x in numbers.items())

    @classmethod
    def of(cls, kernel: Launch, device: Device, attention: float | None, waves: bool = True) -> Cost:
        matmul, seconds = kernel.matmul, roofline.seconds(kernel, device, attention, waves)
        return cls(
            kernels=1,
            bytes=kernel.bytes,
            bytes_outside_matmuls=0 if matmul is not None else kernel.bytes,
            flops={} if matmul is None else {matmul.dtype: matmul.flops},
            attention_flops=kernel.attention.flops if kernel.attention is not None else 0,
            seconds=seconds,
            matmul_seconds=seconds if matmul is not None else 0,
            fp8_matmul_seconds=seconds if matmul is not None and matmul.dtype == "fp8" else 0,
            attention_seconds=seconds if kernel.attention is not None else 0,
        )


_NUMBERS = [f for f in dataclasses.fields(Cost) if f.name != "flops"]


@dataclass(frozen=True)
class LayerCost:
    """A part of the model in both precisions; `name` covers repeated blocks: "layers.0-31.mlp"."""

    name: str
    bf16: Cost
    fp8: Cost

    @property
    def speedup(self) -> float:
        return self.bf16.seconds / self.fp8.seconds if self.fp8.seconds else 1.0


@dataclass(frozen=True)
class Estimate:
    """One training step without FP8 (in bf16, or in the model's own dtype) and with FP8. The costs of
    `layers` add up to `bf16` and `fp8`. `attention` is the rate that fused attention counts at.

    A cast counts where its copy is read. So a norm that is fused with a cast may seem to cost nothing in FP8.
    """

    device: str
    layers: tuple[LayerCost, ...]
    report: Report
    notes: tuple[str, ...] = ()
    attention: roofline.AttentionRate = roofline.CUDNN

    @property
    def bf16(self) -> Cost:
        return sum((layer.bf16 for layer in self.layers), Cost())

    @property
    def fp8(self) -> Cost:
        return sum((layer.fp8 for layer in self.layers), Cost())

    @property
    def _step(self) -> LayerCost:
        return LayerCost("all", self.bf16, self.fp8)

    @property
    def speedup(self) -> float:
        """Estimated time in bf16 over that in FP8; the optimizer counts only if the estimate has it."""
        return self._step.speedup

    def summary(self) -> str:
        with_optimizer = any(layer.name == "(optimizer)" for layer in self.layers)
        then = ", backward and optimizer" if with_optimizer else " and backward"
        return (
            f"{self.speedup:.2f}x on {self.device}: {1e3 * self.bf16.seconds:.4g} ms in bf16, "
            f"{1e3 * self.fp8.seconds:.4g} ms in FP8 (estimated, forward{then})"
        )

    @property
    def _attention(self) -> tuple[str, ...]:
        """A line about fused attention, if there is any."""
        flops = self.fp8.attention_flops
        said = f"fused attention: {flops / 1e12:.3g} TFLOP in high precision, at the rate of {self.attention}"
        return (said,) if flops else ()

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained HTML page, also written to `path` if given."""
        bf16, fp8 = self.bf16, self.fp8
        facts = (
            ("device", self.device),
            ("matmul FLOPs in FP8", percent(self.report.fp8_flop_fraction)),
            ("kernels", f"{bf16.kernels:.0f} → {fp8.kernels:.0f}"),
            ("moved outside of matmuls", _gigabytes(bf16.bytes_outside_matmuls, fp8.bytes_outside_matmuls)),
            ("kept for backward", _gigabytes(bf16.kept_for_backward, fp8.kept_for_backward)),
        )
        parts = [_part(x) for x in self.layers if x.bf16.seconds or x.fp8.seconds]
        said = (_METHOD, *self._attention, *self.notes)
        timing = Timing(said, _part(self._step).splits, tuple(parts), (_HEAD, *self._lines()))
        headline = f"{self.speedup:.2f}× on {self.device}, estimated"
        sections = tuple(map(section, self.report.graphs))
        name = title("estimate", self.report.graphs)
        page = HtmlPage(name, headline, self.summary(), facts, sections, timing=timing)
        return render(page, path)

    def _lines(self) -> list[tuple[str, ...]]:
        return [_line(layer) for layer in (*self.layers, self._step)]

    def __str__(self) -> str:
        shown = aligned(_HEAD, self._lines(), "<" + ">" * (len(_HEAD) - 1))
        said = (*self._attention, *self.notes, f"fp8: {self.report.summary()}")
        return "\n".join([self.summary(), "", shown, "", *said])

    def __repr__(self) -> str:
        return f"<fp8compile.Estimate: {self.summary()}>"

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain dicts, lists, strings and numbers, in bytes, FLOPs and seconds."""
        return {
            "summary": self.summary(),
            "device": self.device,
            "speedup": self.speedup,
            "bf16": dataclasses.asdict(self.bf16),
            "fp8": dataclasses.asdict(self.fp8),
            "layers": [{**dataclasses.asdict(layer), "speedup": layer.speedup} for layer in self.layers],
            "attention": dataclasses.asdict(self.attention),
            "notes": list(self.notes),
            "report": self.report.to_dict(),
        }


_HEAD = (
    "layer", "ms bf16", "ms fp8", "speedup", "kernels", "GB outside matmuls", "kept, MB", "TFLOP bf16 / fp8",
)  # fmt: skip


def _line(layer: LayerCost) -> tuple[str, ...]:
    fp8 = layer.fp8.flops.get("fp8", 0)

    def both(form: str, number: Callable[[Cost], float]) -> str:
        return " / ".join(format(number(cost), form) for cost in (layer.bf16, layer.fp8))

    return (
        layer.name,
        f"{1e3 * layer.bf16.seconds:.4g}",
        f"{1e3 * layer.fp8.seconds:.4g}",
        f"{layer.speedup:.2f}x",
        both(".0f", lambda cost: cost.kernels),
        both(".3g", lambda cost: cost.bytes_outside_matmuls / 1e9),
        both(".4g", lambda cost: cost.kept_for_backward / 1e6),
        f"{(sum(layer.fp8.flops.values()) - fp8) / 1e12:.3g} / {fp8 / 1e12:.3g}",
    )


# -- the page --


def _part(layer: LayerCost) -> TimedPart:
    """The bars of a part."""
    bf16, fp8 = layer.bf16, layer.fp8
    times = f"{microseconds(1e6 * bf16.seconds)} → {microseconds(1e6 * fp8.seconds)}"
    speedup = f"{bf16.seconds / fp8.seconds:.2f}×" if fp8.seconds and bf16.seconds else "–"
    return TimedPart(layer.name, times, speedup, (_split("bf16", bf16), _split("FP8", fp8)))


def _split(name: str, cost: Cost) -> Split:
    rest = max(0.0, cost.seconds - cost.matmul_seconds - cost.attention_seconds)
    casts = cost.fp8_matmul_seconds > 0
    times = (
        ("FP8 matmuls", "fp8", cost.fp8_matmul_seconds),
        ("other matmuls" if casts else "matmuls", "high", cost.matmul_seconds - cost.fp8_matmul_seconds),
        ("attention", "attention", cost.attention_seconds),
        ("casts and other" if casts else "other", "casts" if casts else "other", rest),
    )
    return split(name, (Part(what, css, 1e6 * seconds) for what, css, seconds in times))


def _gigabytes(before: float, after: float) -> str:
    return f"{before / 1e9:.3g} GB → {after / 1e9:.3g} GB"
