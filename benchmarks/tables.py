"""Results as tables: `python -m benchmarks.tables benchmarks/results`, `--markdown` for the docs.

`--update PAGE ..` (`benchmarks.estimates` has the pages) replaces the text between the lines
`<!-- table: NAME -->` and `<!-- end -->`, in the page that has them; NAME is `static`, `ceilings`, `experts`,
`held`, `measured` or `kernels`. In pages with the rows of `GAINS` it writes these anew.
"""

from __future__ import annotations

import argparse
import re
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
    ("GB of frozen weights", lambda r: number(get(r, "static", "frozen_gb") or None)),
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
COMPARED = ("bf16", "fp8-delayed")
# One line per case; a line maps arms to their rows, and "" to the result.
CEILING: list[Column] = [
    ("goal", lambda r: number(r[""]["goal"])),
    ("torchao's best", lambda r: number(torchaos_best(r))),
    ("fp8-delayed", lambda r: number(_ratio(r, "fp8-delayed"))),
    (
        "without waves",
        lambda r: number(over(*(get(r, arm, "static", "roofline_ms_without_waves") for arm in COMPARED))),
    ),
    ("its ceiling: each operand once", lambda r: number(get(r, "fp8-delayed", "ratio", "ceiling"))),
    # torchao's experts are multiplied so, all three matmuls
    ("with fast accumulation", lambda r: number(_ratio(r, "fp8-delayed-fast-accum"))),
    # over bf16 with the same optimizer, fp8compile.optim.AdamW
    ("weights in the update", lambda r: number(_ratio(r, "fp8-delayed-update"))),
    ("both", lambda r: number(_ratio(r, "fp8-delayed-update-fast-accum"))),
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
HELD = {
    "bf16": "bf16",
    "FP8, dequantized in forward and in backward": "dequantized",
    "FP8, multiplied: scales of 128 x 128": "fp8-held-blocks",
    "FP8, multiplied: scales of rows": "fp8-held-rows",
    "FP8, multiplied: one scale": "fp8-held-tensor",
}
HELD_COLUMNS: list[Column] = [
    ("held, GB", lambda r: number(get(r, "static", "frozen_gb"), ".1f")),
    ("moved outside matmuls, GB", lambda r: number(get(r, "static", "gb_outside_matmuls"), ".0f")),
    ("moved in all, GB", lambda r: number(get(r, "static", "gb"), ".0f")),
    ("kernels", lambda r: number(get(r, "static", "kernels"), ",.0f")),
    ("ms a step", lambda r: number(get(r, "static", "roofline_ms"), ".0f")),
    ("x bf16", lambda r: number(get(r, "ratio", "compiled_bf16"))),
]


# The table has a line per family and shape. It maps each plan's name to its row, and "" to common values.
KERNEL: list[Column] = [
    ("MB that must move", lambda r: number(get(r, "", "bytes"), ",.1f", 1e-6)),
    ("copy GB/s", lambda r: number(get(r, "fp8", "copy_gb_per_s"), ",.0f")),
    ("GB/s", lambda r: number(get(r, "fp8", "gb_per_s"), ",.0f")),
    ("of copy", lambda r: share(r)),
    ("Inductor GB/s", lambda r: number(get(r, "inductor", "gb_per_s"), ",.0f")),
    ("x Inductor", lambda r: number(over(get(r, "inductor", "ms", "median"), get(r, "fp8", "ms", "median")))),
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


def held(found: list[dict[str, Any]]) -> str:
    """A line for each way to hold the frozen weights of the case `qwen3-8b-lora`."""
    rows = by_name(found).get("qwen3-8b-lora", {})
    made = [
        [title, *(value(rows[arm]) for _, value in HELD_COLUMNS)]
        for title, arm in HELD.items()
        if arm in rows
    ]
    return table(made, ["weights", *(name for name, _ in HELD_COLUMNS)], True) + "\n"


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
    """A table of goals, estimates and ceilings."""
    made = []
    for result in found:
        rows = arms_of(result)
        if _ratio(rows, "fp8-delayed"):
            made.append([result["name"], *(value({"": result, **rows}) for _, value in CEILING)])
    return table(made, ["", *(name for name, _ in CEILING)], True) + "\n" if made else "No results.\n"


def over(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def share(plans: Row) -> str:
    """The share of a copy's bandwidth, marked "below" if it misses the goal."""
    found, goal = get(plans, "fp8", "share"), plans[""]["goal"]
    return "" if found is None else f"{'below: ' if found < goal else ''}{found:.0%}"


def kernel_table(result: dict[str, Any], markdown: bool = False) -> str:
    """A table with a line for each family and shape, without empty columns."""
    lines: dict[str, Row] = {}
    for row in result["rows"]:
        if not row["error"]:
            line = lines.setdefault(row["point"], {"": {"bytes": row["bytes"], "goal": result["goal"]}})
            line[row["arm"]] = row
    used = [(name, value) for name, value in KERNEL if any(value(line) for line in lines.values())]
    made = [[point, *(value(line) for _, value in used)] for point, line in lines.items()]
    return table(made, ["", *(name for name, _ in used)], markdown)


def kernel_footnote(result: dict[str, Any]) -> str:
    if result["static"]:
        said = "bytes as Inductor's scheduler counts them, each buffer once a kernel"
        return f"{said}; nothing was run on a device"
    if result["device"]["name"] == "cpu":
        return "outputs were compared, nothing was timed: this is no device"
    return f"of copy: {result['goal']:.0%} is the goal"


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
        made.append([row["arm"], *cells])
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
    good = [row for row in result["rows"] if not row["error"]]
    parts = [heading(result), *body(result)]
    if result["case"] != "kernels" and any(row.get("kernels") for row in good):
        parts.append(f"\nms a step by kernel class\n{rows_table(result, KERNELS)}")
    if result["static"]:
        parts.append("an estimate: nothing was run on a device")
    parts += noise(result)
    held = sum(get(row, "memory", "idle") or 0 for row in good)
    if held:
        parts.append(f"waiting arms together held {held / 1e9:.1f} GB")
    return "\n".join([*parts, *failures(result)])


def body(result: dict[str, Any], markdown: bool = False) -> list[str]:
    """The table of a result, and what is to be said below it."""
    if result["case"] == "kernels":
        return [kernel_table(result, markdown), kernel_footnote(result)]
    return [rows_table(result, STATIC if result["static"] else MEASURED, markdown)]


def noise(result: dict[str, Any]) -> list[str]:
    """What was left out, and what makes a difference of a percent no difference: rounds that differ, clocks
    that nobody saw."""
    good = [row for row in result["rows"] if not row["error"]]
    wide = [(row["arm"], get(row, "tokens_per_s", "spread") or 0.0) for row in good]
    shown = [f"{arm} {spread:.1%}" for arm, spread in wide if spread > SPREAD]
    said = [f"the spread is over {SPREAD:.1%}: {', '.join(shown)}"] if shown else []
    if problem := get(result, "settings", "sampling", "problem"):
        said.append(f"no clocks were sampled: {problem}")
    if skipped := get(result, "settings", "skipped_points"):
        said.append(f"out of time: {skipped} points were not begun")
    return said


def markdown(found: list[dict[str, Any]]) -> str:
    """One table for each result."""
    parts = []
    for result in found:
        if not result["rows"]:
            continue
        parts.append(textwrap.fill(f"**{heading(result)}**", 128) + "\n")
        parts.append("\n\n".join(body(result, markdown=True)) + "\n")
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
            steps = [r for r in found if r["case"] != "kernels"]
            kinds = {"static": [r for r in steps if r["static"]]}
            kinds["measured"] = [r for r in steps if not r["static"] and r["size"] == "full"]
            kinds["kernels"] = [r for r in found if r["case"] == "kernels" and r["size"] == "full"]
            for name, chosen in kinds.items():
                update(args.update, name, markdown(chosen))
            update(args.update, "ceilings", ceilings(kinds["static"]))
            update(args.update, "experts", experts(kinds["static"]))
            update(args.update, "held", held(kinds["static"]))
            gains(args.update, kinds["static"])
            return 0
    except (ValueError, OSError) as error:
        print(f"benchmarks.tables: error: {error}", file=sys.stderr)
        return 2
    print(markdown(found) if args.markdown else "\n\n".join(map(text, found)) or "no results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
