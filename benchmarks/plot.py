"""A picture of training: `python -m benchmarks.plot [FILES OR FOLDERS] [--out FOLDER]`.

loss-<device>.png    training loss of each arm of the case `loss`, and its gap to bf16
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import results
from .machine import slug

COLORS = {"bf16": "#4c566a", "eager-bf16": "#b8bdc9", "fp8-delayed": "#1b7f79", "fp8-tensorwise": "#5fb8b0"}
Result = dict[str, Any]


def smooth(values: Sequence[float], weight: float = 0.05) -> list[float]:
    """Exponential moving average."""
    made, average = [], values[0]
    for value in values:
        average += weight * (value - average)
        made.append(average)
    return made


def curves(result: Result, title: str, path: Path) -> None:
    """Above: smoothed training losses, and validation losses. Below: each arm's gap to bf16, in percent: of
    the smoothed losses, and (dots) of the validation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "figure.dpi": 130})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    rows = [row for row in result["rows"] if not row["error"] and row["losses"]]
    base = next((row for row in rows if row["kind"] in ("bf16", "eager")), None)
    how: dict[str, Any] = {"figsize": (7.5, 6.4), "layout": "constrained"}
    figure, (above, below) = plt.subplots(2, 1, sharex=True, height_ratios=(2, 1), **how)
    for row in rows:
        color, each = COLORS.get(row["arm"], "black"), row["tokens"] / 1e6
        end = f"{row['validation'][-1][1]:.4f} held out, " if row["validation"] else ""
        shown = f"{row['arm']}: {end}{row['tokens_per_s']['median']:,.0f} tokens/s"
        steps = [each * (i + 1) for i in range(len(row["losses"]))]
        above.plot(steps, smooth(row["losses"]), color=color, label=shown)
        checked = [(each * step, loss) for step, loss in row["validation"]]
        if checked:
            above.plot(*zip(*checked, strict=True), "o", color=color, markersize=4)
        if base is not None and row is not base:
            pairs = zip(smooth(base["losses"]), smooth(row["losses"]), strict=False)
            gap = [100 * (b - a) / a for a, b in pairs]
            below.plot(steps[: len(gap)], gap, color=color, linewidth=1)
            theirs = dict(base["validation"])
            both = [(each * s, 100 * (x / theirs[s] - 1)) for s, x in row["validation"] if s in theirs]
            if both:
                below.plot(*zip(*both, strict=True), "o", color=color, markersize=4)
    below.axhline(0.0, color=COLORS["bf16"], linewidth=1)
    unit = "token" if result["variant"].get("text") == "tokens" else "byte"
    above.set(ylabel=f"loss (nats a {unit}), moving average", title=title)
    below.set(xlabel=f"million {unit}s", ylabel=f"% over {base['arm'] if base else 'bf16'}")
    above.legend(frameon=False)
    for axes in (above, below):
        axes.grid(alpha=0.25)
    figure.savefig(path)
    plt.close(figure)


def draw(found: list[Result], out: Path) -> list[Path]:
    """Draw the last result of the case `loss` for each device. Returns the paths."""
    made: list[Path] = []
    for result in results.latest(found):
        if result["case"] == "loss" and any(row.get("losses") for row in result["rows"]):
            said = f"measured on {result['device']['name']}"
            said += ", interpreted" if result["settings"].get("interpreted") else ""
            made.append(out / f"loss-{slug(result['device']['name'])}.png")
            out.mkdir(parents=True, exist_ok=True)
            curves(result, f"{result['title']} ({said})", made[-1])
    return made


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.plot", description="Draw what benchmarks.train wrote.")
    add, plots = parser.add_argument, Path(__file__).parent / "plots"
    add("paths", nargs="*", type=Path, default=[results.RESULTS], help="result files or folders")
    add("--out", type=Path, default=plots, help="default: benchmarks/plots")
    args = parser.parse_args(argv)
    try:
        made = draw(results.read(args.paths), args.out)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"benchmarks.plot: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, made)) or "no results to draw")
    return 0


if __name__ == "__main__":
    sys.exit(main())
