"""Pictures: of a monitor's file (`fp8compile plot run.jsonl`), and of a comparison (`plot_comparison`).

The first has a row for each layer, the worst first. The left picture shows the scales of input, weight and
gradient, which multiply into FP8, on a logarithmic axis (a band if a tensor has several scales). The right
picture shows their overflows in percent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import Fp8CompileError, OptionError

NEEDED = ("step", "name", "role", "scale_inv_min", "scale_inv_max", "overflows%", "sqnr")
COLOURS = {"input": "#0072b2", "weight": "#4d4d4d", "gradient": "#d55e00"}  # distinct for the colour-blind
GEMMS = {"fprop": ("#0072b2", "o"), "dgrad": ("#d55e00", "^"), "wgrad": ("#009e73", "s")}
COMPARED = {"output": ("#0072b2", "o"), "gradient": ("#d55e00", "^")}
MARKERS = {"input": "o", "weight": "s", "gradient": "^"}


@dataclass(frozen=True)
class Curves:
    """The rows of a parameter. `overflows`: the most of any tensor and step, in %; `sqnr`: the least, dB."""

    name: str
    rows: tuple[Mapping[str, Any], ...]
    overflows: float
    sqnr: float

    def tensors(self) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
        """(role, use and layout that tell it apart from others, or "") -> its rows, sorted by step."""
        found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for row in sorted(self.rows, key=lambda row: (list(COLOURS).index(row["role"]), row["step"])):
            more = " ".join(str(x) for x in (row.get("use"), row.get("layout")) if x and x != "plain")
            found.setdefault((row["role"], more), []).append(row)
        return found


def read(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a monitor's file, without those of comparisons (`compare_every`). Raises OptionError (a
    ValueError), which names the first line that is none of a monitor's, or says why there are none."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            lacking = [key for key in NEEDED if key not in row]
        except (ValueError, TypeError):
            lacking, row = [*NEEDED], {}
        if "compare" in row:
            continue
        if lacking:
            why = f"line {number} is none of fp8compile.monitor's: it has no {lacking[0]!r}"
            raise OptionError(f"{path}, {why}")
        rows.append(row)
    if not rows:
        raise OptionError(f"{path} has no lines: nothing has been measured yet")
    return rows


def worst_first(rows: Iterable[Mapping[str, Any]]) -> list[Curves]:
    """The layers of a run, the worst first: most overflows, then the lowest SQNR."""
    of: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        of.setdefault(row["name"], []).append(row)
    made = []
    for name, mine in of.items():
        overflows = max((row["overflows%"] for row in mine if row["overflows%"] is not None), default=0.0)
        sqnr = min((row["sqnr"] for row in mine if row["sqnr"] is not None), default=math.inf)
        made.append(Curves(name, tuple(mine), overflows, sqnr))
    return sorted(made, key=lambda layer: (-layer.overflows, layer.sqnr, layer.name))


def plot(path: str | Path, output: str | Path, worst: int = 8) -> list[Curves]:
    """Draw the `worst` layers of a monitor's file into an image, in its suffix's format. Returns the layers.

    OptionError if the file is no monitor's, or `output` is not writable; Fp8CompileError without matplotlib.
    """
    shown = worst_first(read(path))[:worst]
    Figure = _figures()
    figure = Figure(figsize=(11, 1.0 + 1.9 * len(shown)), layout="constrained")
    axes = figure.subplots(len(shown), 2, squeeze=False, sharex=True)
    top = max(layer.overflows for layer in shown)
    for (left, right), layer in zip(axes, shown, strict=True):
        _scales(left, layer)
        _overflows(right, layer, top)
        sqnr = f", SQNR from {layer.sqnr:.1f} dB" if math.isfinite(layer.sqnr) else ""
        left.set_title(layer.name, loc="left", fontsize=10, fontweight="bold")
        most = f"overflows up to {layer.overflows:.3g}%" if layer.overflows else "no overflows"
        right.set_title(most + sqnr, loc="left", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    handles = [
        axes[0][0].plot([], [], color=COLOURS[role], marker=MARKERS[role], label=role)[0] for role in COLOURS
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False)
    about = f"{Path(path).name}: FP8 scales and overflows, worst layers first"
    figure.suptitle(about, x=0.01, ha="left", fontsize=12)
    _save(figure, output)
    return shown


def plot_comparison(
    rows: Sequence[Mapping[str, Any]],
    title: str,
    output: str | PathLike[str],
    least: Mapping[str, float],
    worst: int,
) -> None:
    """Draw the `worst` layers of `Comparison.rows` into an image. Left the own SQNR of each matmul, with the
    edge of its band (`least`, in dB by gemm); right the SQNRs of output and gradient, with what bf16 would
    have. Errors as of `plot`."""
    Figure = _figures()
    shown = [row for row in rows if row["kind"] == "layer"][:worst]
    figure = Figure(figsize=(11, 2.0 + 0.3 * max(3, len(shown))), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for at, (gemm, (colour, marker)) in zip((-0.15, 0.0, 0.15), GEMMS.items(), strict=True):
        _points(left, shown, gemm, at, color=colour, marker=marker, label=gemm)
        if gemm != "wgrad":
            label = "edge of the band: " + ("fprop" if gemm == "fprop" else "dgrad, wgrad")
            left.axvline(least[gemm], color=colour, ls=":", lw=1.2, label=label)
    for at, (key, (colour, marker)) in zip((-0.1, 0.1), COMPARED.items(), strict=True):
        style = {"color": colour, "marker": marker}
        _points(right, shown, key, at, label=f"{key}, FP8", **style)
        _points(right, shown, f"{key}_bf16", at, label=f"{key}, bf16", mfc="none", **style)
    left.set_yticks(range(len(shown)), [row["name"] for row in shown])
    for label, row in zip(left.get_yticklabels(), shown, strict=True):
        if row["flag"]:
            label.set_color(COLOURS["gradient"])
            label.set_fontweight("bold")
    left.invert_yaxis()
    left.set_title("own error of the layer's FP8 matmuls", loc="left", fontsize=10)
    right.set_title("against the step in high precision", loc="left", fontsize=10)
    for axis in (left, right):
        axis.set_xlabel("SQNR, dB (further right is better)")
        _tidy(axis)
    handles = [handle for axis in (left, right) for handle in axis.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.suptitle(title.replace("; ", "\n"), x=0.01, ha="left", fontsize=10)
    _save(figure, output)


def _points(axis: Any, rows: Sequence[Mapping[str, Any]], key: str, at: float, **style: Any) -> None:
    """A point for each row, a little beside the row's line, so that equal numbers are seen."""
    known = [(row[key], i + at) for i, row in enumerate(rows) if row[key] is not None]
    axis.plot([x for x, _ in known], [i for _, i in known], ls="", ms=5, **style)


def _figures() -> Any:
    try:
        from matplotlib.figure import Figure  # not pyplot, which would look for a display
    except ImportError:
        raise Fp8CompileError("plot needs matplotlib: pip install matplotlib") from None
    return Figure


def _save(figure: Any, output: str | PathLike[str]) -> None:
    try:
        figure.savefig(output, dpi=110)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise OptionError(f"{output} cannot be written: {why}") from None


def _style(role: str, more: str, points: int) -> dict[str, Any]:
    line = {"color": COLOURS[role], "lw": 1.2, "ls": "--" if more else "-"}
    return {**line, "marker": MARKERS[role], "ms": 3 if points <= 60 else 0}


def _scales(axis: Any, layer: Curves) -> None:
    for (role, more), rows in layer.tensors().items():
        known = [row for row in rows if row["scale_inv_min"] and row["scale_inv_max"]]
        steps = [row["step"] for row in known]
        low, high = ([1.0 / row[key] for row in known] for key in ("scale_inv_max", "scale_inv_min"))
        axis.plot(steps, low, **_style(role, more, len(steps)))
        if low != high:
            axis.fill_between(steps, low, high, color=COLOURS[role], alpha=0.15, lw=0)
    axis.set_yscale("log")
    axis.set_ylabel("scale")
    _tidy(axis)


def _overflows(axis: Any, layer: Curves, top: float) -> None:
    for (role, more), rows in layer.tensors().items():
        known: Sequence[Mapping[str, Any]] = [row for row in rows if row["overflows%"] is not None]
        steps = [row["step"] for row in known]
        axis.plot(steps, [row["overflows%"] for row in known], **_style(role, more, len(known)))
    # the same for all rows, so that rows can be compared
    axis.set_ylim(-0.04 * (top or 1.0), 1.08 * (top or 1.0))
    axis.set_ylabel("overflows %")
    _tidy(axis)


def _tidy(axis: Any) -> None:
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
