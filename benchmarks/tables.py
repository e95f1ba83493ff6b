"""Results as tables: `python -m benchmarks.tables benchmarks/results`, `--markdown` for the docs.

`--update PAGE ..` (`benchmarks.estimates` has the pages) replaces the text between the lines
`<!-- table: NAME -->` and `<!-- end -->`, in the page that has them; NAME is `static`, `ceilings`, `experts`,
`held`, `restated`, `measured` or `kernels`. In pages with the rows of `GAINS` it writes these anew.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import results
from .results import over
from .show import not_done, table

SPREAD = 0.005  # of tokens/s over rounds: what this should be at most
Row = dict[str, Any]
Cell = Callable[[Row], str]
Column = tuple[str, Cell]


def number(value: float | None, spec: str = ".2f", scale: float = 1.0) -> str:
    return "" if value is None else format(value * scale, spec)


def get(row: Row, path: str) -> Any:
    """The value at a path of keys ("memory/allocated") in a row; None if a key is missing."""
    value: Any = row
    for key in path.split("/"):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def cell(path: str, spec: str = ".2f", scale: float = 1.0) -> Cell:
    return lambda row: number(get(row, path), spec, scale)


def not_zero(path: str) -> Cell:
    return lambda row: number(get(row, path) or None)


def quotient(a: str, b: str, scale: float = 1.0) -> Cell:
    return lambda row: number(over(get(row, a), get(row, b)), ".2f", scale)


def flops(dtype: str) -> Cell:
    return lambda row: number(row["static"].get(f"tflop.{dtype}", 0.0)) if "static" in row else ""


def times(arm: str) -> Cell:
    """The speed of an arm over compiled bf16, in a line that maps arms to their rows."""
    return lambda rows: "" if (ratio := gain(rows, arm)) is None else f"{ratio:.2f}x"


def gain(rows: Row, arm: str) -> float | None:
    return get(rows, f"{arm}/ratio/compiled_bf16")


def torchaos_best(rows: Row) -> float | None:
    return max((x for arm in rows if arm.startswith("torchao") and (x := gain(rows, arm))), default=None)


def fp8_count(row: Row) -> str:
    seen, proof = get(row, "fp8/gemm_kernels"), get(row, "fp8/proof")
    if seen is not None:
        return f"{seen:g}"
    if proof is None or not proof.startswith("not applicable"):
        return ""
    decided = get(row, "fp8/decisions")
    return f"emulated ({decided['fp8']})" if decided else "emulated"


def share(plans: Row) -> str:
    """The share of a copy's bandwidth, marked "below" if it misses the goal."""
    found, goal = get(plans, "fp8/share"), plans[""]["goal"]
    return "" if found is None else f"{'below: ' if found < goal else ''}{found:.0%}"


MEASURED: list[Column] = [
    ("tokens/s", cell("tokens_per_s/median", ",.0f")),
    ("spread", cell("tokens_per_s/spread", ".1%")),
    ("x bf16", cell("ratio/compiled_bf16")),
    ("x eager", cell("ratio/eager_bf16")),
    ("step ms", cell("step_ms/total")),
    ("fwd", cell("step_ms/forward")),
    ("bwd", cell("step_ms/backward")),
    ("opt", cell("step_ms/optimizer")),
    ("peak GB", cell("memory/allocated", ".2f", 1e-9)),
    ("in step 1", cell("memory/first", ".2f", 1e-9)),
    ("reserved", cell("memory/reserved", ".2f", 1e-9)),
    ("x mem", cell("ratio/memory")),
    ("compile s", cell("compile_s/cold", ".1f")),
    ("warm s", cell("compile_s/warm", ".1f")),
    ("fp8 gemms", fp8_count),
    ("MHz", cell("clocks/sm_mhz/median", ".0f")),
    ("W", cell("clocks/watts/median", ".0f")),
    ("slowed", cell("clocks/slowed", ".0%")),
]
KERNEL_CLASSES = ("fp8_gemm", "bf16_gemm", "cast", "attention", "other")
KERNELS: list[Column] = [
    *((name.replace("_", " "), cell(f"kernels/classes/{name}/ms")) for name in KERNEL_CLASSES),
    ("busy ms", cell("busy_ms")),
    ("kernels", cell("kernels/count", ".0f")),
    ("gaps ms", cell("timeline/gap_ms")),
]
STATIC: list[Column] = [
    ("kernels", cell("static/kernels", ".0f")),
    ("GB outside matmuls", cell("static/gb_outside_matmuls")),
    ("GB of frozen weights", not_zero("static/frozen_gb")),
    ("kept for backward, MB", cell("static/kept_mb", ",.0f")),
    ("x kept", cell("ratio/memory")),
    ("TFLOP in FP8", flops("fp8")),
    ("TFLOP in bf16", flops("bfloat16")),
    ("roofline ms", cell("static/roofline_ms")),
    ("of it optimizer", not_zero("static/optimizer_ms")),
    ("x bf16", cell("ratio/compiled_bf16")),
    ("if operands moved once", lambda row: "" if row["kind"] == "bf16" else cell("ratio/ceiling")(row)),
]
WITHOUT_WAVES = "static/roofline_ms_without_waves"
# One line per case; a line maps arms to their rows, and "" to the result.
CEILING: list[Column] = [
    ("goal", cell("/goal")),
    ("torchao's best", lambda rows: number(torchaos_best(rows))),
    ("fp8-delayed", cell("fp8-delayed/ratio/compiled_bf16")),
    ("without waves", quotient(f"bf16/{WITHOUT_WAVES}", f"fp8-delayed/{WITHOUT_WAVES}")),
    ("its ceiling: each operand once", cell("fp8-delayed/ratio/ceiling")),
    # torchao's experts are multiplied so, all three matmuls
    ("with fast accumulation", cell("fp8-delayed-fast-accum/ratio/compiled_bf16")),
    # over bf16 with the same optimizer, fp8compile.optim.AdamW
    ("weights in the update", cell("fp8-delayed-update/ratio/compiled_bf16")),
    ("both", cell("fp8-delayed-update-fast-accum/ratio/compiled_bf16")),
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
EXPERT_COLUMNS: list[Column] = [
    ("torchao", times("torchao-experts")),
    ("`delayed` everywhere", times("fp8-delayed-all")),
    ("`rowwise` everywhere", times("fp8-rowwise-all")),
    ("`delayed`, as the cost model decides", times("fp8-delayed")),
    ("the same, fast accumulation", times("fp8-delayed-fast-accum")),
    ("and weights in the update, products delayed", times("fp8-delayed-fastest")),
]
# Of arms that were estimated and measured: the estimate with the measured time of these kernels.
MEASURED_KERNELS = ("fp8_gemm", "bf16_gemm", "attention")
RESTATED_CASE = "llama-8b-layers", "llama-8b-layers:layers=2"  # one step, by its two names
RESTATED: list[Column] = [
    ("matmuls and attention, ms", cell("static/extern_ms")),
    ("measured", cell("measured_ms")),
    ("estimate, ms", cell("static/roofline_ms")),
    ("x bf16", cell("ratio/compiled_bf16")),
    ("restated, ms", cell("ms")),
    ("x bf16, restated", cell("restated")),
    ("its ceiling", cell("ceiling")),
    ("busy, measured, ms", cell("busy_ms")),
]
HELD = {
    "bf16": "bf16",
    "FP8, dequantized in forward and in backward": "dequantized",
    "FP8, multiplied: scales of 128 x 128": "fp8-held-blocks",
    "FP8, multiplied: scales of rows": "fp8-held-rows",
    "FP8, multiplied: one scale": "fp8-held-tensor",
}
HELD_COLUMNS: list[Column] = [
    ("held, GB", cell("static/frozen_gb", ".1f")),
    ("moved outside matmuls, GB", cell("static/gb_outside_matmuls", ".0f")),
    ("moved in all, GB", cell("static/gb", ".0f")),
    ("kernels", cell("static/kernels", ",.0f")),
    ("ms a step", cell("static/roofline_ms", ".0f")),
    ("x bf16", cell("ratio/compiled_bf16")),
]
# The table has a line per family and shape. It maps each plan's name to its row, and "" to common values.
KERNEL: list[Column] = [
    ("MB that must move", cell("/bytes", ",.1f", 1e-6)),
    ("copy GB/s", cell("fp8/copy_gb_per_s", ",.0f")),
    ("GB/s", cell("fp8/gb_per_s", ",.0f")),
    ("of copy", share),
    ("Inductor GB/s", cell("inductor/gb_per_s", ",.0f")),
    ("x Inductor", quotient("inductor/ms/median", "fp8/ms/median")),
    ("MB", cell("fp8/static/gb", ",.1f", 1e3)),
    ("x must", quotient("fp8/static/gb", "/bytes", 1e9)),
    ("kernels", cell("fp8/static/kernels", ".0f")),
    ("Inductor MB", cell("inductor/static/gb", ",.1f", 1e3)),
    ("Inductor x must", quotient("inductor/static/gb", "/bytes", 1e9)),
    ("Inductor kernels", cell("inductor/static/kernels", ".0f")),
]


def grid(lines: Mapping[str, Row], columns: Sequence[Column], markdown: bool = True, first: str = "") -> str:
    """A table with these lines, without empty columns."""
    used = [(name, value) for name, value in columns if any(map(value, lines.values()))]
    cells = [[title, *(value(row) for _, value in used)] for title, row in lines.items()]
    return table(cells, [first, *(name for name, _ in used)], markdown)


def good(result: Row) -> Row:
    """The rows of a result without an error, by their arms."""
    return {row["arm"]: row for row in result["rows"] if not row["error"]}


def gains(pages: Sequence[Path], rows: Mapping[str, Row]) -> None:
    """Write the rows of `GAINS` anew in the pages that have them. `rows`: of each case, those of its arms."""
    for page in pages:
        text = page.read_text()
        for title, case in GAINS.items():
            of = rows.get(case, {})
            if ours := gain(of, "fp8-delayed"):
                theirs, kept = torchaos_best(of), get(of, "fp8-delayed/ratio/memory")
                cells = f"| {title} | {ours:.2f}x | {number(theirs)}x | {number(kept)} |"
                text = re.sub(rf"^\| {re.escape(title)} \| \d.*$", cells, text, flags=re.M)
        page.write_text(text)


def restated(estimated: Mapping[str, Row], measured: Mapping[str, Row]) -> dict[str, Row]:
    """Lines of `RESTATED`, by arm."""
    lines: dict[str, Row] = {}
    classes = {arm: get(measured.get(arm, {}), "kernels/classes") for arm in estimated}
    both = [arm for arm, found in classes.items() if found]
    for arm in sorted(both, key=lambda arm: arm != "bf16") if "bf16" in both else []:
        row, took = estimated[arm], sum(classes[arm][kind]["ms"] for kind in MEASURED_KERNELS)
        more = took - row["static"]["extern_ms"]
        ms, once = (row["static"][key] + more for key in ("roofline_ms", "operands_once_ms"))
        bf16 = lines["bf16"]["ms"] if lines else ms  # it comes first
        ratios = {"restated": over(bf16, ms), "ceiling": over(bf16, once)}
        lines[arm] = {**row, **ratios, "ms": ms, "measured_ms": took, "busy_ms": measured[arm]["busy_ms"]}
    return lines


def by_point(result: Row) -> dict[str, Row]:
    """A line of `KERNEL` for each family and shape."""
    lines: dict[str, Row] = {}
    for row in result["rows"]:
        if not row["error"]:
            line = lines.setdefault(row["point"], {"": {"bytes": row["bytes"], "goal": result["goal"]}})
            line[row["arm"]] = row
    return lines


def kernel_footnote(result: Row) -> str:
    if result["static"]:
        said = "bytes as Inductor's scheduler counts them, each buffer once a kernel"
        return f"{said}; nothing was run on a device"
    if result["device"]["name"] == "cpu":
        return "outputs were compared, nothing was timed: this is no device"
    return f"of copy: {result['goal']:.0%} is the goal"


def failures(result: Row) -> list[str]:
    """One line for each different failure of an arm."""
    where = "{point} {arm}" if result["case"] == "kernels" else "{arm}"
    found = {(where.format(**row), row["error"]) for row in result["rows"] if row["error"]}
    return [f"{arm}: {error}" for arm, error in sorted(found)]


def heading(result: Row) -> str:
    notes = " / ".join(dict.fromkeys(row["note"] for row in result["rows"] if row.get("note")))
    parts = [result["name"], result.get("title", ""), notes, result["size"], result["device"]["name"]]
    if result["goal"]:
        parts.append(f"goal {result['goal']:g}")
    return " | ".join(filter(None, parts))


def text(result: Row) -> str:
    """The text that a run prints at its end. Arms that failed have empty cells."""
    rows = {row["arm"]: row for row in result["rows"]}
    parts = [heading(result), *body(result, rows)]
    if result["case"] != "kernels" and any(row.get("kernels") for row in rows.values()):
        parts.append(f"\nms a step by kernel class\n{grid(rows, KERNELS, False)}")
    if result["static"]:
        parts.append("an estimate: nothing was run on a device")
    parts += noise(result)
    held = sum(get(row, "memory/idle") or 0 for row in rows.values())
    if held:
        parts.append(f"waiting arms together held {held / 1e9:.1f} GB")
    return "\n".join([*parts, *failures(result)])


def body(result: Row, rows: Mapping[str, Row], markdown: bool = False) -> list[str]:
    """The table of a result, and what is to be said below it."""
    if result["case"] == "kernels":
        return [grid(by_point(result), KERNEL, markdown), kernel_footnote(result)]
    return [grid(rows, STATIC if result["static"] else MEASURED, markdown)]


def noise(result: Row) -> list[str]:
    """What was left out, and what makes a difference of a percent no difference: rounds that differ, clocks
    that nobody saw."""
    spreads = {row["arm"]: get(row, "tokens_per_s/spread") or 0.0 for row in result["rows"]}
    shown = [f"{arm} {spread:.1%}" for arm, spread in spreads.items() if spread > SPREAD]
    said = [f"the spread is over {SPREAD:.1%}: {', '.join(shown)}"] if shown else []
    if problem := get(result, "settings/sampling/problem"):
        said.append(f"no clocks were sampled: {problem}")
    rounds, asked = "tokens_per_s/rounds", get(result, "settings/rounds") or 0
    left = {row["arm"]: asked - len(get(row, rounds)) for row in result["rows"] if get(row, rounds)}
    names = [f"{count} of {asked} rounds of {arm}" for arm, count in left.items() if count > 0]
    return said + not_done(names or get(result, "settings/skipped_points") or [])


def markdown(found: Sequence[Row]) -> str:
    """One table for each result, without arms that failed."""
    parts = []
    for result in found:
        if result["rows"]:
            parts.append(textwrap.fill(f"**{heading(result)}**", 128) + "\n")
            parts.append("\n\n".join(body(result, good(result), markdown=True)) + "\n")
            parts += [f"{line}\n" for line in failures(result) if "no estimate" not in line]
    return "\n".join(parts) or "No results.\n"


def update(pages: Sequence[Path], name: str, body: str) -> None:
    """Replace the text between the two marks for `name` in the pages that have them; one must."""
    marks = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    found = [page for page in pages if marks.search(page.read_text())]
    if not found:
        raise ValueError(f"{', '.join(map(str, pages))}: no line <!-- table: {name} -->")
    for page in found:
        page.write_text(marks.sub(lambda old: f"{old[1]}{body}{old[2]}", page.read_text()))


def update_all(pages: Sequence[Path], found: Sequence[Row]) -> None:
    """Write all tables of the pages anew."""
    kernels = [result for result in found if result["case"] == "kernels" and result["size"] == "full"]
    steps = [result for result in found if result["case"] != "kernels"]
    static = [result for result in steps if result["static"]]
    update(pages, "static", markdown(static))
    update(pages, "measured", markdown([r for r in steps if not r["static"] and r["size"] == "full"]))
    update(pages, "kernels", markdown(kernels))
    rows = {result["name"]: good(result) for result in static}
    compared = {r["name"]: {"": r, **rows[r["name"]]} for r in static if gain(rows[r["name"]], "fp8-delayed")}
    experts = {title: rows.get(case, {}) for title, case in EXPERTS.items()}
    of_lora = rows.get("qwen3-8b-lora", {})
    held = {title: of_lora[arm] for title, arm in HELD.items() if arm in of_lora}
    update(pages, "ceilings", grid(compared, CEILING) + "\n")
    update(pages, "experts", grid(experts, EXPERT_COLUMNS, first="layer") + "\n")
    estimated, name = RESTATED_CASE
    full = {r["name"]: good(r) for r in steps if not r["static"] and r["size"] == "full"}
    of_llama = restated(rows.get(estimated, {}), full.get(name, {}))
    update(pages, "restated", grid(of_llama, RESTATED, first="Llama-3-8B, two layers") + "\n")
    update(pages, "held", grid(held, HELD_COLUMNS, first="weights") + "\n")
    gains(pages, rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.tables", description="Print results as tables.")
    add = parser.add_argument
    add("paths", nargs="*", type=Path, default=[results.RESULTS], help="result files or folders")
    add("--markdown", action="store_true")
    add("--update", type=Path, metavar="PAGE", nargs="+", help="pages: tables go where their marks are")
    args = parser.parse_args(argv)
    try:
        found = results.latest(results.read(args.paths))
        if args.update:
            update_all(args.update, found)
            return 0
    except (ValueError, OSError) as error:
        print(f"benchmarks.tables: error: {error}", file=sys.stderr)
        return 2
    print(markdown(found) if args.markdown else "\n\n".join(map(text, found)) or "no results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
