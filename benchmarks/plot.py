"""Pictures of results: `python -m benchmarks.plot [FILES OR FOLDERS] [--out FOLDER]`.

    speed-<device>.png         every case: tokens/s of each arm over compiled bf16, with the goals
    memory-<device>.png        the same for peak memory (estimates: bytes kept for backward)
    never-slower-<device>-<arm>.png   the grid of linears against bf16, a panel for each M
    loss-<device>.png          training loss of each arm, and its gap to bf16

Estimates get separate pictures, whose titles say that nothing was measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import results
from .machine import slug
from .tables import cell_ratio, get

COLORS = {
    "bf16": "#4c566a",
    "bf16-max-autotune": "#81879a",
    "eager-bf16": "#b8bdc9",
    "torchao-tensorwise": "#e08e45",
    "torchao-rowwise": "#f0bf8a",
    "torchao-tensorwise-auto": "#b8860b",
    "torchao-rowwise-auto": "#dcb967",
    "fp8-delayed": "#1b7f79",
    "fp8-tensorwise": "#5fb8b0",
}
PALE = ("eager-bf16", "torchao-rowwise", "torchao-rowwise-auto", "fp8-tensorwise")
Result = dict[str, Any]


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 130}
    )
    return plt


def label(result: Result) -> str:
    name, _, variant = result["name"].partition(":")
    size = "" if result["size"] == "full" else f"\n({result['size']})"
    return name + ("\n" + variant.replace(",", "\n") if variant else "") + size


def speed(row: dict[str, Any]) -> float | None:
    """A row's speed over compiled bf16. For a single linear, of the device's busy time."""
    return (get(row, "ratio", "busy") if row["point"] else None) or get(row, "ratio", "compiled_bf16")


def over(result: Result, arm: str, value: Callable[[dict[str, Any]], float | None]) -> float | None:
    """`value` of an arm in a result: the median over its points; None if no point has a value."""
    found = [
        v
        for row in result["rows"]
        if row["arm"] == arm and not row["error"] and (v := value(row)) is not None
    ]
    return statistics.median(found) if found else None


def bars(
    chosen: Sequence[Result],
    value: Callable[[dict[str, Any]], float | None],
    title: str,
    goals: bool,
    path: Path,
) -> None:
    """Bars in groups: one group per case, one bar per arm; 1.00 is compiled bf16."""
    plt = pyplot()
    arms = [a for a in COLORS if any(over(r, a, value) is not None for r in chosen)]
    figure, axes = plt.subplots(
        figsize=(max(6.0, 1.0 + 0.28 * len(arms) * len(chosen)), 4.4), layout="constrained"
    )
    width = 0.82 / max(1, len(arms))
    for i, arm in enumerate(arms):
        places = [
            (x - 0.41 + width * (i + 0.5), v)
            for x, r in enumerate(chosen)
            if (v := over(r, arm, value)) is not None
        ]
        axes.bar([x for x, _ in places], [v for _, v in places], 0.94 * width, color=COLORS[arm], label=arm)
        for x, v in places:
            # text stands at the foot of the bar; goals are drawn near its top
            ink = "black" if arm in PALE else "white"
            axes.text(x, 0.02, f"{v:.2f}", ha="center", va="bottom", fontsize=7, rotation=90, color=ink)
    for x, result in enumerate(chosen):
        if goals and result["goal"]:
            axes.hlines(
                result["goal"],
                x - 0.45,
                x + 0.45,
                color="#a3243b",
                linewidth=1.6,
                label="goal" if not x else None,
            )
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(chosen)), [label(r) for r in chosen], fontsize=8)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.set_ylabel("compiled bf16 = 1")
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=min(6, len(arms) + 1), frameon=False, fontsize=8)
    figure.savefig(path)
    plt.close(figure)


def grid_of(result: Result, arm: str) -> dict[tuple[int, int, int], tuple[float, bool]]:
    """(M, N, K) -> (bf16's time over the arm's time, whether FP8 ran)."""
    cells = {}
    for row in result["rows"]:
        if row["arm"] == arm and not row["error"] and (ratio := cell_ratio(row)) is not None:
            if "static" in row:
                ran = bool(row["static"].get("tflop.fp8"))
            else:
                ran = bool(get(row, "fp8", "gemm_kernels") or get(row, "fp8", "decisions", "fp8"))
            cells[row["meta"]["m"], row["meta"]["n"], row["meta"]["k"]] = (ratio, ran)
    return cells


def heat_map(result: Result, arm: str, title: str, path: Path) -> None:
    """A panel for each M, with N to the right and K upwards. Blue cells are faster than bf16, red ones
    slower. A cell in brackets has no FP8."""
    plt = pyplot()
    cells = grid_of(result, arm)
    ms, ns, ks = (sorted({key[i] for key in cells}) for i in range(3))
    columns = min(3, len(ms))
    rows = -(-len(ms) // columns)
    size = (1.2 + columns * (0.9 + 0.46 * len(ns)), 1.0 + rows * (0.8 + 0.34 * len(ks)))
    figure, panels = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    image = None
    for panel in panels.flat[len(ms) :]:
        panel.set_axis_off()
    for panel, m in zip(panels.flat, ms, strict=False):
        values = [[cells.get((m, n, k), (float("nan"), True))[0] for n in ns] for k in ks]
        image = panel.imshow(values, cmap="RdBu", vmin=0.5, vmax=1.5, origin="lower", aspect="auto")
        for y, k in enumerate(ks):
            for x, n in enumerate(ns):
                if (m, n, k) in cells:
                    ratio, ran = cells[m, n, k]
                    shown = f"{ratio:.2f}" if ran else f"({ratio:.2f})"
                    color = "white" if abs(ratio - 1) > 0.35 else "black"
                    weight = "bold" if ratio < 0.98 else "normal"
                    panel.text(
                        x, y, shown, ha="center", va="center", fontsize=7, color=color, fontweight=weight
                    )
        panel.set_xticks(range(len(ns)), ns, fontsize=7, rotation=45)
        panel.set_yticks(range(len(ks)), ks, fontsize=7)
        panel.set_title(f"M = {m}", fontsize=9)
        panel.set_xlabel("N", fontsize=8)
        panel.set_ylabel("K", fontsize=8)
    worst = min(ratio for ratio, _ in cells.values())
    figure.suptitle(f"{title}\nworst cell {worst:.2f}; in brackets: kept in bf16", fontsize=10)
    figure.colorbar(image, ax=panels, shrink=0.8, label="over bf16")
    figure.savefig(path)
    plt.close(figure)


def smooth(values: Sequence[float], weight: float = 0.05) -> list[float]:
    """Exponential moving average."""
    made, average = [], values[0]
    for value in values:
        average += weight * (value - average)
        made.append(average)
    return made


def curves(result: Result, title: str, path: Path) -> None:
    """Above: smoothed training losses, and validation losses. Below: each arm's gap to bf16, in percent: of
    the smoothed losses, and (dots) of the validation. At the bottom: tokens/s of each round."""
    plt = pyplot()
    rows = [row for row in result["rows"] if not row["error"] and row["losses"]]
    base = next((row for row in rows if row["kind"] in ("bf16", "eager")), None)
    figure, (above, below, speeds) = plt.subplots(
        3, 1, figsize=(7.5, 7.6), sharex=True, height_ratios=(3, 1.5, 1), layout="constrained"
    )
    for row in rows:
        color, each = COLORS.get(row["arm"], "black"), row["tokens"] / 1e6
        rate = row["tokens_per_s"]
        end = f"{row['validation'][-1][1]:.4f} held out, " if row["validation"] else ""
        shown = f"{row['arm']}: {end}{rate['median']:,.0f} tokens/s"
        steps = [each * (i + 1) for i in range(len(row["losses"]))]
        above.plot(steps, smooth(row["losses"]), color=color, label=shown)
        checked = [(each * step, loss) for step, loss in row["validation"]]
        if checked:
            above.plot(*zip(*checked, strict=True), "o", color=color, markersize=4)
        if base is not None and row is not base:
            gap = [
                100 * (b - a) / a for a, b in zip(smooth(base["losses"]), smooth(row["losses"]), strict=False)
            ]
            below.plot(steps[: len(gap)], gap, color=color, linewidth=1)
            theirs = dict(base["validation"])
            both = [(each * s, 100 * (x / theirs[s] - 1)) for s, x in row["validation"] if s in theirs]
            if both:
                below.plot(*zip(*both, strict=True), "o", color=color, markersize=4)
        # a round ends with a validation; without one, rounds are spread evenly
        ends = [x for x, _ in checked] or [
            steps[-1] * (i + 1) / len(rate["rounds"]) for i in range(len(rate["rounds"]))
        ]
        speeds.plot(ends, rate["rounds"][: len(ends)], ".-", color=color)
    below.axhline(0.0, color=COLORS["bf16"], linewidth=1)
    unit = "token" if result["variant"].get("text") == "tokens" else "byte"
    above.set(ylabel=f"loss (nats a {unit}), moving average", title=title)
    below.set(ylabel=f"% over {base['arm'] if base else 'bf16'}")
    speeds.set(xlabel=f"million {unit}s", ylabel="tokens/s")
    speeds.set_ylim(0, 1.1 * speeds.get_ylim()[1])
    above.legend(frameon=False)
    for axes in (above, below, speeds):
        axes.grid(alpha=0.25)
    figure.savefig(path)
    plt.close(figure)


def draw(found: list[Result], out: Path) -> list[Path]:
    """Draw all pictures for the last result of each case. Returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    newest = [r for r in results.latest(found) if r["case"] != "kernels" and not results.counted(r)]
    for device in dict.fromkeys(r["device"]["name"] for r in newest):
        here = [r for r in newest if r["device"]["name"] == device]
        name = slug(device)
        static = here[0]["static"]
        said = "estimate, not measured: " + device if static else f"measured on {device}"
        if any(r["settings"].get("interpreted") for r in here):
            said += ", interpreted"
        charts = [r for r in here if r["case"] != "loss" and not r["variant"].get("grid") and r["rows"]]
        for kind, value, what in (
            ("speed", speed, "Roofline speed" if static else "Tokens/s"),
            (
                "memory",
                lambda row: get(row, "ratio", "memory"),
                "Kept for backward" if static else "Peak memory",
            ),
        ):
            shown = [r for r in charts if any(over(r, arm, value) is not None for arm in COLORS)]
            if shown:
                made.append(out / f"{kind}-{name}.png")
                bars(shown, value, f"{what} over compiled bf16 ({said})", kind == "speed", made[-1])
        maps = [r for r in here if r["variant"].get("grid")]
        for result in [{**maps[-1], "rows": [row for r in maps for row in r["rows"]]}] if maps else []:
            for arm in dict.fromkeys(
                row["arm"] for row in result["rows"] if row["kind"] in ("fp8", "torchao")
            ):
                if grid_of(result, arm):
                    made.append(out / f"never-slower-{name}-{arm}.png")
                    heat_map(
                        result, arm, f"{arm}: a linear, forward and backward, over bf16 ({said})", made[-1]
                    )
        for result in (r for r in here if r["case"] == "loss"):
            if any(row.get("losses") for row in result["rows"]):
                made.append(out / f"loss-{name}.png")
                curves(result, f"{result['title']} ({said})", made[-1])
    return made


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.plot", description="Draw what benchmarks.train wrote.")
    parser.add_argument(
        "paths", nargs="*", type=Path, default=[results.RESULTS], help="result files or folders"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "plots", help="default: benchmarks/plots"
    )
    args = parser.parse_args(argv)
    try:
        made = draw(results.read(args.paths), args.out)
    except (ValueError, OSError) as error:
        print(f"benchmarks.plot: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"missing: {error.name} (a Python package): draw the same files where it is", file=sys.stderr)
        return 2
    print("\n".join(map(str, made)) or "no results to draw")
    return 0


if __name__ == "__main__":
    sys.exit(main())
