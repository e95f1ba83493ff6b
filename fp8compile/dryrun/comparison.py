"""The result of `fp8compile.compare`: rows of layers and parameters, worst first, and which left their band.

docs/compare.md defines the columns, and says where the expected ranges come from. The healthy models there
are those of notes/log.md, 2026-11-24. Decibels are SQNRs: 10 log10(|reference|^2 / |error|^2).

A gradient has no expected SQNR, because it inherits errors. It is compared with what another bf16 kernel
would cost (`observe.dithered`): bf16 has four bits more than E4M3, five more than E5M2: 24 and 30 dB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from ..reporting.columns import aligned
from .observe import Likeness, sums

if TYPE_CHECKING:
    from .compare import ComparedStep

EXPECTED = {"fprop": 28.5, "dgrad": 24.5, "wgrad": 24.5}  # dB
ROLES = {"fprop": ("input", "weight"), "dgrad": ("gradient", "weight"), "wgrad": ("input", "gradient")}
BAND = 10.0  # dB under what is expected, at which a layer leaves its band
GAP, POOR = 40.0, 10.0  # dB: a gradient is out of range with so much less than bf16's has, and less than this
OUTLIERS = 500.0  # an element so many times the median of its tensor
_HEAD = ("fprop", "dgrad", "wgrad", "output (bf16)", "gradient (bf16)", "cosine", "norm ratio")


@dataclass(frozen=True)
class Compared:
    """One weight of an FP8 matmul (`layer`), or another parameter. Numbers are NaN where there are none.
    `flag`: how it has left its band, or ""."""

    name: str
    layer: bool
    own: Mapping[str, float]  # by gemm, dB
    output: float
    output_bf16: float
    gradient: Likeness
    gradient_bf16: float
    overflows: float  # percent, the most of its casts
    underflows: float
    peak: float  # the largest element over the median, the most of input and weight
    flag: str = ""

    @property
    def order(self) -> tuple[float, ...]:
        """Sorts the worst first: what has left its band by its own error, by outliers, by its gradient; then
        layers, then others. Among these, what is farthest out of its band, or nearest to leaving it."""
        below = (EXPECTED[gemm] - BAND - _or(x, -math.inf) for gemm, x in self.own.items())
        short = max(below, default=-math.inf)
        outliers = 20 * math.log10(self.peak / OUTLIERS) if self.peak > 0 else -math.inf
        kind = 3.0 if not self.flag else 0.0 if short > 0 else 1.0 if outliers > 0 else 2.0
        gap = _or(self.gradient_bf16 - self.gradient.sqnr, -math.inf)
        return kind, not self.layer, -max(short, outliers) if self.layer else -gap

    def row(self) -> dict[str, Any]:
        numbers = {
            **{gemm: self.own.get(gemm, math.nan) for gemm in EXPECTED},
            "output": self.output,
            "output_bf16": self.output_bf16,
            "gradient": self.gradient.sqnr,
            "gradient_bf16": self.gradient_bf16,
            "cosine": self.gradient.cosine,
            "norm": self.gradient.norm,
            "overflows%": self.overflows,
            "underflows%": self.underflows,
            "peak": self.peak,
        }
        found = {key: _json(x) for key, x in numbers.items()}
        return {"name": self.name, "kind": "layer" if self.layer else "parameter", **found, "flag": self.flag}


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """A training step in FP8, compared with the same step in high precision. ``str()`` is a table, ``rows()``
    are flat dicts, ``to_dict()`` is for JSON, ``plot(path)`` draws them. `flagged`: the rows out of range.

    `loss`, `loss_bf16`, `loss_fp8`: of the three runs. `gradient`, `gradient_bf16`: of all parameters as one
    vector. `deterministic`: two runs in high precision with the same random numbers were bitwise equal (None:
    not asked); `unsteady`: else, the gradient that differs most, and its SQNR. `rank`: of the process whose
    batch was compared (None: it trains alone).
    """

    model: str
    loss: float
    loss_bf16: float
    loss_fp8: float
    gradient: Likeness
    gradient_bf16: Likeness
    items: Sequence[Compared]  # the worst first
    deterministic: bool | None
    unsteady: tuple[str, float] | None
    rank: int | None

    def rows(self) -> list[dict[str, Any]]:
        """Flat dicts, worst first, as ``pandas.DataFrame`` takes them.

        * name: the parameter. kind: "layer" for the weight of an FP8 matmul, "parameter" for any other.
        * fprop, dgrad, wgrad: the own SQNR of each FP8 matmul.
        * output, gradient: SQNR against high precision. output_bf16, gradient_bf16: what bf16 would have.
        * cosine: of the angle between the two gradients. norm: the length of FP8's over the other's.
        * overflows%, underflows%: the most of the layer's casts, as in `Stats.rows`.
        * peak: the largest magnitude of its input or its weight, over the median of those that are not 0.
        * flag: why it is out of range, or "".

        SQNRs are in dB. A number that is unknown, not finite, or of two equal tensors, is None.
        """
        return [item.row() for item in self.items]

    @property
    def flagged(self) -> list[dict[str, Any]]:
        return [item.row() for item in self.items if item.flag]

    def to_dict(self) -> dict[str, Any]:
        """{"model", "rank", "loss", "loss_bf16", "loss_fp8", "gradient": {"sqnr", "cosine", "norm"},
        "gradient_bf16", "deterministic", "flagged": [name, ...], "rows": rows()}, for JSON."""
        return {
            "model": self.model,
            "rank": self.rank,
            **{name: _json(getattr(self, name)) for name in ("loss", "loss_bf16", "loss_fp8")},
            "gradient": {key: _json(x) for key, x in self.gradient._asdict().items()},
            "gradient_bf16": {key: _json(x) for key, x in self.gradient_bf16._asdict().items()},
            "deterministic": self.deterministic,
            "flagged": [item.name for item in self.items if item.flag],
            "rows": self.rows(),
        }

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows())

    def __repr__(self) -> str:
        counts = f"{len(self.items)} parameters, {len(self.flagged)} flagged"
        return f"<fp8compile.Comparison of {self.model}: {counts}>"

    def __str__(self) -> str:
        return self.table()

    def summary(self) -> str:
        """The step in a sentence."""
        change = ""
        if self.loss and math.isfinite(self.loss_fp8):
            change = f" ({100 * (self.loss_fp8 / self.loss - 1):+.3g}%)"
        like, bf16 = self.gradient, self.gradient_bf16
        where = "" if self.rank is None else f" on rank {self.rank}"
        return (
            f"{self.model}{where}: loss {self.loss:.6g} in high precision, {self.loss_fp8:.6g} in "
            f"FP8{change}; gradient {_text('sqnr', like.sqnr)} dB (bf16: {_text('sqnr', bf16.sqnr)}), "
            f"cosine {_text('cosine', like.cosine)}, norm {_text('norm', like.norm)}"
        )

    def table(self, worst: int | None = 20) -> str:
        """The table, of the `worst` layers and half as many other parameters at most; None: of all."""
        lines = ["fp8: " + self.summary()]
        flags = [f"{item.name} is out of range: {item.flag}" for item in self.items if item.flag]
        lines += flags or ["all layers are within the expected range"]
        if self.unsteady is not None:
            name, sqnr = self.unsteady
            lines.append(
                f"the model is not deterministic: with the same random numbers, the gradient of {name} is at "
                f"{sqnr:.1f} dB in a second run in high precision; numbers near that say nothing about FP8"
            )
        for layer in (True, False):
            items = [item.row() for item in self.items if item.layer is layer]
            shown = items if worst is None else items[: worst if layer else worst // 2]
            if shown:
                head = _HEAD if layer else _HEAD[-3:]
                cells = [
                    [("! " if row["flag"] else "") + row["name"], *_cells(row)[-len(head) :]] for row in shown
                ]
                title = "layer (SQNRs in dB)" if layer else "other parameter"
                lines += ["", aligned((title, *head), cells, "<" + ">" * len(head))]
            if len(shown) < len(items):
                more = len(items) - len(shown)
                lines.append(f"and {more} more, which are better (table(worst=None) shows all)")
        return "\n".join(lines)

    def plot(self, path: str | PathLike[str], worst: int = 30) -> None:
        """Draw the `worst` layers into an image, in the format of its suffix. OptionError if it cannot be
        written; Fp8CompileError if matplotlib is missing."""
        from ..reporting.plots import plot_comparison

        limits = {key: x - BAND for key, x in EXPECTED.items()}
        plot_comparison(self.rows(), self.summary(), path, limits, worst)


def _cells(row: Mapping[str, Any]) -> list[str]:
    """What `_HEAD` names."""
    own = [_text(key, row[key]) for key in EXPECTED]
    beside = [f"{_text(key, row[key])} ({_text(key, row[key + '_bf16'])})" for key in ("output", "gradient")]
    return [*own, *beside, *(_text(key, row[key]) for key in ("cosine", "norm"))]


def _text(key: str, x: float | None) -> str:
    if x is None or math.isnan(x):
        return "-"
    return f"{x:.4f}" if key in ("cosine", "norm") else f"{x:.1f}"


def _json(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _or(x: float, other: float) -> float:
    return other if math.isnan(x) else x


# -- from runs --


def assembled(
    model: str,
    reference: ComparedStep,
    again: ComparedStep | None,
    noisy: ComparedStep,
    fp8: ComparedStep,
    rank: int | None,
) -> Comparison:
    """The comparison of the runs of one step."""
    casts: dict[str, list[Mapping[str, Any]]] = {}
    for row in fp8.rows:
        casts.setdefault(row["name"], []).append(row)
    items = []
    weights = sorted({name for name, _ in fp8.watched.gemms})
    for name in dict.fromkeys([*weights, *fp8.watched.results, *reference.gradients]):
        mine = casts.get(name, [])
        known = {gemm: _own(fp8, name, gemm, mine) for gemm in EXPECTED if (name, gemm) in fp8.watched.gemms}
        own = {gemm: sqnr for gemm, sqnr in known.items() if sqnr is not None}
        output, noise = (_sqnr(step.watched.results.get(name)) for step in (fp8, noisy))
        given = reference.gradients.get(name)
        likes = [_like(given, step.gradients.get(name)) for step in (fp8, noisy)]
        shares = [[row[f"{what}%"] for row in mine] for what in ("overflows", "underflows")]
        over, under = (max((x for x in found if x is not None), default=math.nan) for found in shares)
        peaks = [float(fp8.watched.peaks.get((name, role), 0.0)) for role in ("input", "weight")]
        peak = max(peaks) or math.nan
        item = Compared(name, bool(known), own, output, noise, likes[0], likes[1].sqnr, over, under, peak)
        items.append(_flagged(item, mine))
    if not any(item.flag for item in items):
        items = [_apart(item) for item in items]
    unsteady = None if again is None else _unsteady(reference, again)
    losses = reference.loss, noisy.loss, fp8.loss
    gradients = _whole(reference, fp8), _whole(reference, noisy)
    items.sort(key=lambda item: item.order)
    deterministic = None if again is None else unsteady is None
    return Comparison(model, *losses, *gradients, items, deterministic, unsteady, rank)


def _own(fp8: ComparedStep, name: str, gemm: str, casts: Sequence[Mapping[str, Any]]) -> float | None:
    """The own SQNR of a matmul. Where its product was not seen (experts, merged matmuls): what the casts of
    its operands leave, whose errors add. None if that is not known, either."""
    if (name, gemm) in fp8.watched.own:
        return _sqnr(fp8.watched.own[name, gemm])
    seen = [row for row in casts if row["sqnr"] is not None]
    known = [[row["sqnr"] for row in seen if row["role"] == role] for role in ROLES[gemm]]
    errors = sum(10 ** (-min(found) / 10) for found in known if found)
    return -10 * math.log10(errors) if errors else None


def _flagged(item: Compared, casts: Sequence[Mapping[str, Any]]) -> Compared:
    """The item, with a flag if one of its matmuls has left its band, or if it has outliers."""
    low = {gemm: x for gemm, x in item.own.items() if x < EXPECTED[gemm] - BAND or math.isnan(x)}
    if not low:
        outliers = f"its largest element is {item.peak:.0f} times the median: outliers"
        return replace(item, flag=outliers if item.peak > OUTLIERS else "")
    gemm = min(low, key=lambda gemm: _or(low[gemm], -math.inf) - EXPECTED[gemm])
    own = low[gemm]
    text = "is not finite" if math.isnan(own) else f"{own:.1f} dB, expected about {EXPECTED[gemm]}"
    shares = [(row[f"{what}%"], f"{row[f'{what}%']:.3g}% of its {row['role']} {how}")
              for row in casts for what, how in (("overflows", "saturate"), ("underflows", "become 0"))
              if row["role"] in ROLES[gemm] and (row[f"{what}%"] or 0) >= 0.01]  # fmt: skip
    why = f" ({max(shares)[1]})" if shares else ""
    return replace(item, flag=f"{gemm} {text}{why}")


def _apart(item: Compared) -> Compared:
    """The item, with a flag if its gradient has left its band."""
    sqnr, noise = item.gradient.sqnr, item.gradient_bf16
    if not (sqnr < POOR and noise - sqnr > GAP):
        return item
    return replace(item, flag=f"its gradient is at {sqnr:.1f} dB, where bf16 has {noise:.1f} dB")


def _sqnr(total: Any) -> float:
    return math.nan if total is None else Likeness.of(total).sqnr


def _like(reference: Any, test: Any) -> Likeness:
    if reference is None or test is None:
        return Likeness(math.nan, math.nan, math.nan)
    return Likeness.of(sums(reference, test))


def _whole(reference: ComparedStep, test: ComparedStep) -> Likeness:
    """Of all gradients as one vector."""
    pairs = [(given, test.gradients.get(name)) for name, given in reference.gradients.items()]
    every = [sums(given, found).cpu() for given, found in pairs if found is not None]
    return Likeness.of(sum(every[1:], every[0])) if every else _like(None, None)


def _unsteady(reference: ComparedStep, again: ComparedStep) -> tuple[str, float] | None:
    """The parameter whose gradient differs most between two equal runs, and its SQNR; None: none differs."""
    found = {name: _like(grad, again.gradients.get(name)).sqnr for name, grad in reference.gradients.items()}
    worse = {name: sqnr for name, sqnr in found.items() if sqnr < math.inf}
    if not worse and again.loss == reference.loss:
        return None
    name = min(worse, key=lambda name: worse[name], default="the loss")
    return name, worse.get(name, math.nan)
