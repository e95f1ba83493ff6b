"""Results as tables: `python -m benchmarks.tables benchmarks/results`, `--markdown` for the docs.

`--update PAGE ..` (`benchmarks.estimates` has the pages) replaces the text between the lines
`<!-- table: NAME -->` and `<!-- end -->`, in the page that has them; NAME is `static`, `ceilings`, `experts`,
`instructions`, `measured` or `kernels`. In pages with the rows of `GAINS` it writes these anew.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import results
from .show import table

SPREAD = 0.005  # of tokens/s over rounds: what this should be at most
Row = dict[str, Any]
Column = tuple[str, Callable[[Row], Any]]


def number(value: float | None, spec: str = ".2f", scale: float = 1.0) -> str:
    return "" if value is None else format(value * scale, spec)


def get(row: Row, *keys: str) -> Any:
    """The value at a path of keys in a row; None if a key is missing."""
    value: Any = row
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


MEASURED: list[Column] = [
    ("tokens/s", lambda r: number(get(r, "tokens_per_s", "median"), ",.0f")),
    ("spread", lambda r: number(get(r, "tokens_per_s", "spread"), ".1%")),
    ("x bf16", lambda r: number(get(r, "ratio", "compiled_bf16"))),
    ("x eager", lambda r: number(get(r, "ratio", "eager_bf16"))),
    ("step ms", lambda r: number(get(r, "step_ms", "total"))),
    ("fwd", lambda r: number(get(r, "step_ms", "forward"))),
    ("bwd", lambda r: number(get(r, "step_ms", "backward"))),
    ("opt", lambda r: number(get(r, "step_ms", "optimizer"))),
    ("peak GB", lambda r: number(get(r, "memory", "allocated"), ".2f", 1e-9)),
    ("in step 1", lambda r: number(get(r, "memory", "first"), ".2f", 1e-9)),
    ("reserved", lambda r: number(get(r, "memory", "reserved"), ".2f", 1e-9)),
    ("x mem", lambda r: number(get(r, "ratio", "memory"))),
    ("compile s", lambda r: number(get(r, "compile_s", "cold"), ".1f")),
    ("warm s", lambda r: number(get(r, "compile_s", "warm"), ".1f")),
    ("fp8 gemms", lambda r: fp8_count(r)),
    ("MHz", lambda r: number(get(r, "clocks", "sm_mhz", "median"), ".0f")),
    ("W", lambda r: number(get(r, "clocks", "watts", "median"), ".0f")),
    ("slowed", lambda r: number(get(r, "clocks", "slowed"), ".0%")),
]
KERNELS: list[Column] = [
    *(
        (name.replace("_", " "), lambda r, name=name: number(get(r, "kernels", "classes", name, "ms")))
        for name in ("fp8_gemm", "bf16_gemm", "cast", "attention", "other")
    ),
    ("busy ms", lambda r: number(get(r, "busy_ms"))),
    ("kernels", lambda r: number(get(r, "kernels", "count"), ".0f")),
    ("gaps ms", lambda r: number(get(r, "timeline", "gap_ms"))),
]
STATIC: list[Column] = [
    ("kernels", lambda r: number(get(r, "static", "kernels"), ".0f")),
    ("GB outside matmuls", lambda r: number(get(r, "static", "gb_outside_matmuls"))),
    ("kept for backward, MB", lambda r: number(get(r, "static", "kept_mb"), ",.0f")),
    ("x kept", lambda r: number(get(r, "ratio", "memory"))),
    ("TFLOP in FP8", lambda r: number(get(r, "static", "tflop.fp8") or 0.0)),
    ("TFLOP in bf16", lambda r: number(get(r, "static", "tflop.bfloat16") or 0.0)),
    ("roofline ms", lambda r: number(get(r, "static", "roofline_ms"))),
    ("of it optimizer", lambda r: number(get(r, "static", "optimizer_ms") or None)),
    ("x bf16", lambda r: number(get(r, "ratio", "compiled_bf16"))),
    (
        "if operands moved once",
        lambda r: number(get(r, "ratio", "ceiling")) if get(r, "kind") != "bf16" else "",
    ),
]
LONGER = ("longer_ms", "longer_ms_sustained")
COMPARED = ("bf16", "fp8-delayed")
# One line per case; a line maps arms to their rows, and "" to the result.
CEILING: list[Column] = [
    ("goal", lambda r: number(r[""]["goal"])),
    (
        "torchao's best",
        lambda r: number(torchaos_best(r)),
    ),
    ("fp8-delayed", lambda r: number(_ratio(r, "fp8-delayed"))),
    (
        "without waves",
        lambda r: number(over(*(get(r, arm, "static", "roofline_ms_without_waves") for arm in COMPARED))),
    ),
    ("its ceiling: each operand once", lambda r: number(get(r, "fp8-delayed", "ratio", "ceiling"))),
    # torchao's experts are multiplied so, all three matmuls
    ("with fast accumulation", lambda r: number(_ratio(r, "fp8-delayed-fast-accum"))),
]


# rows of README's table, and the cases that they show
GAINS = {
    "Llama-3-8B layers, 8192 tokens": "llama-8b-layers",
    "Llama-3.2-3B": "llama-3b",
    "Llama-3.2-1B": "llama-1b",
    "GPT-2 124M": "gpt2-124m",
    "DiT-XL/2 blocks": "dit",
    "Qwen3-30B-A3B layer, 8192 tokens": "moe",
}
EXPERTS = {
    "Qwen3-30B-A3B, 128 experts, 8,192 tokens": "moe",
    "the same, 32,768 tokens": "moe:tokens=32768",
    "Mixtral 8x7B, 8,192 tokens": "moe:experts=mixtral",
}
EXPERT_ARMS = {
    "torchao": "torchao-experts",
    "`delayed` everywhere": "fp8-delayed-all",
    "`rowwise` everywhere": "fp8-rowwise-all",
    "`delayed`, as the cost model decides": "fp8-delayed",
    "the same, fast accumulation": "fp8-delayed-fast-accum",
}


# The table has a line per family and shape. It maps each plan's name to its row, and "" to common values.
KERNEL_SPEED: list[Column] = [
    ("MB that must move", lambda r: number(get(r, "", "bytes"), ",.4g", 1e-6)),
    ("copy GB/s", lambda r: number(get(r, "fp8", "copy_gb_per_s"), ",.0f")),
    ("GB/s", lambda r: number(get(r, "fp8", "gb_per_s"), ",.0f")),
    ("of copy", lambda r: share(r)),
    ("Inductor GB/s", lambda r: number(get(r, "inductor", "gb_per_s"), ",.0f")),
    ("torchao GB/s", lambda r: number(get(r, "torchao", "gb_per_s"), ",.0f")),
    ("x Inductor", lambda r: number(over(get(r, "inductor", "ms", "median"), get(r, "fp8", "ms", "median")))),
    ("x torchao", lambda r: number(over(get(r, "torchao", "ms", "median"), get(r, "fp8", "ms", "median")))),
]
KERNEL_BYTES: list[Column] = [
    ("MB that must move", lambda r: number(get(r, "", "bytes"), ",.1f", 1e-6)),
    ("MB", lambda r: number(get(r, "fp8", "static", "gb"), ",.1f", 1e3)),
    ("x must", lambda r: number(over(get(r, "fp8", "static", "gb"), get(r, "", "bytes")), ".2f", 1e9)),
    ("kernels", lambda r: number(get(r, "fp8", "static", "kernels"), ".0f")),
    ("Inductor MB", lambda r: number(get(r, "inductor", "static", "gb"), ",.1f", 1e3)),
    (
        "Inductor x must",
        lambda r: number(over(get(r, "inductor", "static", "gb"), get(r, "", "bytes")), ".2f", 1e9),
    ),
    ("Inductor kernels", lambda r: number(get(r, "inductor", "static", "kernels"), ".0f")),
]


def _ratio(rows: Row, arm: str) -> float | None:
    return get(rows, arm, "ratio", "compiled_bf16")


def torchaos_best(rows: Row) -> float | None:
    return max((x for arm in rows if arm.startswith("torchao") and (x := _ratio(rows, arm))), default=None)


def arms_of(result: dict[str, Any]) -> Row:
    """The rows of a result without an error, by their arms."""
    return {row["arm"]: row for row in result["rows"] if not row["error"]}


def by_name(found: list[dict[str, Any]]) -> dict[str, Row]:
    return {result["name"]: arms_of(result) for result in found}


def experts(found: list[dict[str, Any]]) -> str:
    rows = by_name(found)
    made = []
    for title, case in EXPERTS.items():
        over = [_ratio(rows.get(case, {}), arm) for arm in EXPERT_ARMS.values()]
        made.append([title, *("" if x is None else f"{x:.2f}x" for x in over)])
    return table(made, ["layer", *EXPERT_ARMS], True) + "\n"


def gains(pages: Sequence[Path], found: list[dict[str, Any]]) -> None:
    """Write the rows of `GAINS` anew in the pages that have them."""
    rows = by_name(found)
    for page in pages:
        text = page.read_text()
        for title, case in GAINS.items():
            of = rows.get(case, {})
            if ours := _ratio(of, "fp8-delayed"):
                theirs, kept = torchaos_best(of), get(of, "fp8-delayed", "ratio", "memory")
                cells = f"| {title} | {ours:.2f}x | {number(theirs)}x | {number(kept)} |"
                text = re.sub(rf"^\| {re.escape(title)} \| \d.*$", cells, text, flags=re.M)
        page.write_text(text)


def ceilings(found: list[dict[str, Any]]) -> str:
    """A table of goals, estimates and ceilings of the cases with one point."""
    made = []
    for result in found:
        rows = arms_of(result)
        if len({row["point"] for row in result["rows"]}) == 1 and _ratio(rows, "fp8-delayed"):
            made.append([result["name"], *(value({"": result, **rows}) for _, value in CEILING)])
    return table(made, ["", *(name for name, _ in CEILING)], True) + "\n" if made else "No results.\n"


def instructions(found: list[dict[str, Any]]) -> str:
    """A table of the estimates that counted instructions: what they change for each arm."""
    made = []
    for result in found:
        rows = [row for row in result["rows"] if not row["error"]]
        base = next((row["static"] for row in rows if row["arm"] == "bf16"), None)
        for row in rows if base else []:
            of, ms = row["static"], [row["static"]["roofline_ms"] + row["static"][x] for x in LONGER]
            counts = [f"{of[f'count.{x}']:.0f}" for x in ("generated", "counted", "issue_bound")]
            shares = [
                number(of["issue_ms"] / of["bytes_ms"]),
                f"{of['roofline_ms']:.2f}",
                f"{ms[0]:.2f}",
                f"{ms[1]:.2f}",
            ]
            ratios = [
                (base["roofline_ms"] + base.get(x, 0.0)) / (of["roofline_ms"] + of.get(x, 0.0))
                for x in ("", *LONGER)
            ]
            made.append([f"{result['name']} {row['arm']}", *counts, *shares, *map(number, ratios)])
    head = ["", "generated kernels", "counted", "issue bound", "issue time / bytes time", "ms by bytes"]
    head += ["with instructions", "at 75% of the issue rate"]
    head += ["x bf16 by bytes", "with instructions", "at 75%"]
    return table(made, head, True) + "\n" if made else "No results.\n"


def over(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def share(plans: Row) -> str:
    """The share of a copy's bandwidth, marked "below" if it misses the goal."""
    found, goal = get(plans, "fp8", "share"), plans[""]["goal"]
    return "" if found is None else f"{'below: ' if found < goal else ''}{found:.0%}"


def kernel_note(row: Row) -> str:
    """The text for one row of `benchmarks.kernels`, printed while it runs."""
    must = f"{row['bytes'] / 1e6:.4g} MB must move"
    if "static" in row:
        return f"{must}, {1e3 * row['static']['gb']:.4g} MB do, in {row['static']['kernels']} kernels"
    if row["ms"] is None:
        return f"{must}, outputs agree, not timed: no device"
    return f"{must}, {row['ms']['median']:.4f} ms, {row['gb_per_s']:,.0f} GB/s, {row['share']:.0%} of a copy"


def kernel_table(result: dict[str, Any], markdown: bool = False) -> str:
    """A table with a line for each family and shape, without empty columns."""
    lines: dict[str, Row] = {}
    for row in result["rows"]:
        if not row["error"]:
            lines.setdefault(row["point"], {"": {"bytes": row["bytes"], "goal": result["goal"]}})[
                row["arm"]
            ] = row
    columns = KERNEL_BYTES if result["static"] else KERNEL_SPEED
    used = [(name, value) for name, value in columns if any(value(line) for line in lines.values())]
    made = [[point, *(value(line) for _, value in used)] for point, line in lines.items()]
    return table(made, ["", *(name for name, _ in used)], markdown)


def kernel_footnote(result: dict[str, Any]) -> str:
    if result["static"]:
        return (
            "bytes as Inductor's scheduler counts them, each buffer once a kernel; "
            "nothing was run on a device"
        )
    if result["device"]["name"] == "cpu":
        return "outputs were compared, nothing was timed: this is no device"
    what = sorted({row["what"] for row in result["rows"] if row.get("what")})
    return "; ".join([f"of copy: {result['goal']:.0%} is the goal", *(f"torchao: {x}" for x in what)])


def fp8_count(row: Row) -> str:
    seen = get(row, "fp8", "gemm_kernels")
    if seen is not None:
        return f"{seen:g}"
    decided, proof = get(row, "fp8", "decisions"), get(row, "fp8", "proof")
    if proof is not None and not proof.startswith("not applicable"):
        return ""
    return f"emulated ({decided['fp8']})" if decided else "emulated"


def rows_table(result: dict[str, Any], columns: Sequence[Column], markdown: bool = False) -> str:
    """A table of the rows of a result, without empty columns. In Markdown, also without arms that failed."""
    good = [row for row in result["rows"] if not row["error"]]
    used = [(name, value) for name, value in columns if any(value(row) for row in good)]
    made = []
    for row in good if markdown else result["rows"]:
        cells = ["" for _ in used] if row["error"] else [value(row) for _, value in used]
        made.append([f"{row['point']} {row['arm']}".strip(), *cells])
    return table(made, ["", *(name for name, _ in used)], markdown)


def failures(result: dict[str, Any]) -> list[str]:
    """One line for each different failure of an arm."""
    where = "{point} {arm}" if result["case"] == "kernels" else "{arm}"
    found = {(where.format(**row), row["error"]) for row in result["rows"] if row["error"]}
    return [f"{arm}: {error}" for arm, error in sorted(found)]


def heading(result: dict[str, Any]) -> str:
    notes = " / ".join(dict.fromkeys(row["note"] for row in result["rows"] if row.get("note")))
    parts = [result["name"], result.get("title", ""), notes, result["size"], result["device"]["name"]]
    if result["goal"]:
        parts.append(f"goal {result['goal']:g}")
    return " | ".join(filter(None, parts))


def text(result: dict[str, Any]) -> str:
    """The text that a run prints at its end."""
    if result["case"] == "kernels":
        parts = [heading(result), kernel_table(result), kernel_footnote(result)]
        return "\n".join([*parts, *left_out(result), *failures(result)])
    if not result["rows"]:
        return f"{heading(result)}\nnothing to estimate: see the case's description"
    good = [row for row in result["rows"] if not row["error"]]
    parts, few = [heading(result)], not many(result)
    if few:
        parts.append(rows_table(result, STATIC if result["static"] else MEASURED))
    if few and any(row.get("kernels") for row in good):
        parts.append(f"\nms a step by kernel class\n{rows_table(result, KERNELS)}")
    if any(row["point"] for row in good):
        parts.append("\n" + totals(result))
    parts += losses(good)
    if result["static"]:
        parts.append("an estimate: nothing was run on a device")
    parts += left_out(result) + noise(result)
    held = sum(get(row, "memory", "idle") or 0 for row in good)
    if held and not get(result, "settings", "rebuild"):
        parts.append(f"waiting arms together held {held / 1e9:.1f} GB")
    return "\n".join([*parts, *failures(result)])


def left_out(result: dict[str, Any]) -> list[str]:
    skipped = get(result, "settings", "skipped_points")
    return [f"out of time: {skipped} points were not begun"] if skipped else []


def noise(result: dict[str, Any]) -> list[str]:
    """What makes a difference of a percent no difference: rounds that differ, clocks that nobody saw."""
    good = [row for row in result["rows"] if not row["error"]]
    wide = [(row["arm"], get(row, "tokens_per_s", "spread") or 0.0) for row in good]
    shown = [f"{arm} {spread:.1%}" for arm, spread in wide if spread > SPREAD]
    said = [f"the spread is over {SPREAD:.1%}: {', '.join(shown)}"] if shown else []
    problem = get(result, "settings", "sampling", "problem")
    return [*said, *([f"no clocks were sampled: {problem}"] if problem else [])]


def many(result: dict[str, Any]) -> bool:
    """Whether a result has too many points to show each of them in a table."""
    return len({row["point"] for row in result["rows"]}) > 8


def totals(result: dict[str, Any]) -> str:
    """A table over the points that every arm finished: each arm's total time, and its worst, median and best
    ratio to bf16."""
    good = [row for row in result["rows"] if not row["error"]]
    arms = list(dict.fromkeys(row["arm"] for row in good))
    at = {(row["arm"], row["point"]): row for row in good}
    points = [p for p in dict.fromkeys(row["point"] for row in good) if all((arm, p) in at for arm in arms)]
    made = []
    for arm in arms:
        here = [at[arm, p] for p in points]
        times = [
            get(r, "static", "roofline_ms") or get(r, "busy_ms") or get(r, "step_ms", "total") for r in here
        ]
        over = [cell_ratio(r) for r in here]
        known = [x for x in over if x is not None]
        worst = number(min(known, default=None)), number(statistics.median(known) if known else None)
        made.append([arm, len(points), f"{sum(times):.3f}", *worst, number(max(known, default=None))])
    slow = [
        (ratio, f"{r['arm']} {r['point']} {ratio:.2f}")
        for r in good
        if 0 < (ratio := cell_ratio(r) or 0) < 0.98
    ]
    slow = [text for _, text in sorted(slow) if "bf16" not in text]
    text = table(made, ["total", "points", "ms", "worst x bf16", "median", "best"])
    return text + (f"\nunder 0.98: {len(slow)}, the worst: {'; '.join(slow[:8])}" if slow else "")


def cell_ratio(row: Row) -> float | None:
    """Speed over bf16: by the time that the device was busy, if it was measured, else by tokens/s."""
    return get(row, "ratio", "busy") or get(row, "ratio", "compiled_bf16") or get(row, "ratio", "eager_bf16")


def losses(rows: list[Row]) -> list[str]:
    """The last validation losses and their gaps to bf16; [] if there are none."""
    ends = {row["arm"]: row["validation"][-1][1] for row in rows if row.get("validation")}
    base = next((loss for arm, loss in ends.items() if "bf16" in arm), None)
    if not ends or base is None:
        return []
    made = [[arm, f"{loss:.4f}", f"{100 * (loss - base) / base:+.3f}%"] for arm, loss in ends.items()]
    return ["", table(made, ["validation loss", "nats", "gap to bf16"])]


def markdown(found: list[dict[str, Any]]) -> str:
    """One table for each result. Results with many points show totals only."""
    parts = []
    for result in found:
        if not result["rows"]:
            continue
        parts.append(textwrap.fill(f"**{heading(result)}**", 128) + "\n")
        if result["case"] == "kernels":
            parts.append(f"{kernel_table(result, markdown=True)}\n\n{kernel_footnote(result)}\n")
        elif many(result):
            parts.append(f"```\n{totals(result)}\n```\n")
        else:
            parts.append(rows_table(result, STATIC if result["static"] else MEASURED, markdown=True) + "\n")
        parts += [f"{line}\n" for line in failures(result) if "no estimate" not in line]
    return "\n".join(parts) or "No results.\n"


def update(pages: Path | Sequence[Path], name: str, body: str) -> None:
    """Replace the text between the two marks for `name` in the pages that have them; one must."""
    pages = [pages] if isinstance(pages, Path) else pages
    marks = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    found = [page for page in pages if marks.search(page.read_text())]
    if not found:
        raise ValueError(f"{', '.join(map(str, pages))}: no line <!-- table: {name} -->")
    for page in found:
        page.write_text(marks.sub(lambda old: f"{old[1]}{body}{old[2]}", page.read_text()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.tables", description="Print results as tables.")
    parser.add_argument(
        "paths", nargs="*", type=Path, default=[results.RESULTS], help="result files or folders"
    )
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--all", action="store_true", help="every result, not only the last of each case")
    parser.add_argument(
        "--update", type=Path, metavar="PAGE", nargs="+", help="pages: each table goes where its marks are"
    )
    args = parser.parse_args(argv)
    try:
        found = results.read(args.paths)
        found = found if args.all else results.latest(found)
        if args.update:
            steps = [r for r in found if r["case"] != "kernels" and not results.counted(r)]
            kinds = {"static": [r for r in steps if r["static"]]}
            kinds["measured"] = [r for r in steps if not r["static"] and r["size"] == "full"]
            kinds["kernels"] = [r for r in found if r["case"] == "kernels" and r["size"] == "full"]
            for name, chosen in kinds.items():
                update(args.update, name, markdown(chosen))
            update(args.update, "ceilings", ceilings(kinds["static"]))
            update(args.update, "experts", experts(kinds["static"]))
            gains(args.update, kinds["static"])
            update(args.update, "instructions", instructions([r for r in found if results.counted(r)]))
            return 0
    except (ValueError, OSError) as error:
        print(f"benchmarks.tables: error: {error}", file=sys.stderr)
        return 2
    print(markdown(found) if args.markdown else "\n\n".join(map(text, found)) or "no results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
