"""Results of benchmarks: files, ratios, tables, estimates, and matmuls of the cost model."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from benchmarks import arms, estimates, machine, matmuls, results, static, tables
from benchmarks.cases import CASES, qwen3
from benchmarks.cases.base import parse_case
from benchmarks.pool import ROOT


def row(arm: str, rate: float) -> dict:
    """A measured row of an arm with `rate` tokens/s."""
    made = {**arms.ARMS[arm].labels, "error": None, "busy_ms": 5e3 / rate}
    made |= {"tokens_per_s": {"median": rate, "spread": 0.0001 * rate}, "memory": {"allocated": 10**9}}
    return {**made, "step_ms": {"total": 1e5 / rate}}


def result(name: str, rows: list[dict], **more) -> dict:
    results.add_ratios(rows)
    made = dict.fromkeys(results.TOP.split()) | {"schema": 1, "case": name, "name": name, "static": False}
    made |= {"size": "full", "date": "2026-01-01T00:00:00", "device": {"name": "NVIDIA H200"}, "settings": {}}
    return {**made, "rows": rows, "goal": 1.4, **more}


FAILED = {"arm": "torchao-rowwise", "kind": "torchao", "point": "", "error": "OutOfMemoryError: too much"}


def test_ratios_are_over_the_faster_compiled_bf16():
    rows = [row("bf16", 100), row("bf16-max-autotune", 125), row("eager-bf16", 50), row("fp8-delayed", 150)]
    results.add_ratios(rows)
    assert [r["ratio"]["compiled_bf16"] for r in rows] == pytest.approx([0.8, 1.0, 0.4, 1.2])
    assert [r["ratio"]["eager_bf16"] for r in rows] == pytest.approx([2.0, 2.5, 1.0, 3.0])
    assert rows[3]["ratio"]["over"] == "bf16-max-autotune" and rows[3]["ratio"]["busy"] == pytest.approx(1.2)


def test_ratios_are_over_bf16_with_the_same_optimizer():
    rows = [
        row("bf16", 100),
        row("bf16-packed", 110),
        row("fp8-delayed", 150),
        row("fp8-delayed-update", 165),
    ]
    results.add_ratios(rows)
    assert [r["ratio"]["compiled_bf16"] for r in rows] == pytest.approx([1.0, 1.0, 1.5, 1.5])
    results.add_ratios(rows[::3])
    assert rows[3]["ratio"]["over"] == "bf16"


def test_results_are_read_and_shown(tmp_path):
    made = result("dit", [row("bf16", 40), row("fp8-delayed", 56), FAILED])
    results.write(made, tmp_path / "r.json")
    assert results.read([tmp_path]) == [json.loads(json.dumps(made))]
    text = tables.text(made)
    assert "goal 1.4" in text and "1.40" in text and "torchao-rowwise: OutOfMemoryError: too much" in text
    assert "the spread is over 0.5%: fp8-delayed 0.6%" in text
    page = tmp_path / "page.md"
    names = ("static", "ceilings", "measured", "experts", "held", "restated", "kernels")
    page.write_text("".join(f"<!-- table: {name} -->\nold\n<!-- end -->\n" for name in names))
    assert tables.main([str(tmp_path / "r.json"), "--update", str(page)]) == 0
    assert "| fp8-delayed |" in page.read_text() and "old" not in page.read_text()
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="bad.json: not a result"):
        results.read([tmp_path])


def test_an_estimate_with_measured_matmuls():
    """Matmuls and attention took 1 ms more than estimated in bf16, and 2 ms less in FP8."""
    static_ms = {"bf16": (10.0, 9.0, 8.0), "fp8": (8.0, 7.0, 6.0)}
    estimated = {
        arm: {"static": dict(zip(("roofline_ms", "operands_once_ms", "extern_ms"), ms, strict=True))}
        for arm, ms in static_ms.items()
    }
    took = {"bf16": (0.0, 8.5, 0.5), "fp8": (3.0, 0.5, 0.5), "other": (1.0, 1.0, 1.0)}
    measured = {
        arm: {
            "busy_ms": 12.0,
            "kernels": {"classes": dict(zip(tables.MEASURED_KERNELS, ({"ms": x} for x in ms), strict=True))},
        }
        for arm, ms in took.items()
    }
    found = tables.restated(estimated, measured)
    assert [(arm, line["ms"], line["restated"]) for arm, line in found.items()] == [
        ("bf16", 11.0, 1.0),
        ("fp8", 6.0, 11.0 / 6.0),
    ]
    assert found["fp8"]["ceiling"] == 11.0 / 5.0
    assert len(tables.grid(found, tables.RESTATED).splitlines()) == 4


@pytest.mark.slow
def test_an_estimate():
    if static.fake_gpu.unavailable():
        pytest.skip(static.fake_gpu.unavailable())
    case, variant, _ = parse_case("ffn-half", CASES)
    bf16, fp8 = (static.estimate(case.static(variant), arms.ARMS[arm]) for arm in ("bf16", "fp8-delayed"))
    assert bf16["note"] == "2 of 24 layers"
    bf16, fp8 = bf16["figures"], fp8["figures"]
    # two linears of two blocks; the first input has a gradient, too
    assert bf16["tflop.bfloat16"] == fp8["tflop.fp8"] == pytest.approx(12 * 2 * 16384 * 4096 * 16384 / 1e12)
    assert bf16["roofline_ms"] > fp8["roofline_ms"] > fp8["operands_once_ms"]
    assert bf16["optimizer_ms"] == fp8["optimizer_ms"] > 0
    with pytest.raises(ValueError, match="eager kernels are not compiled"):
        static.estimate(case.static(variant), arms.ARMS["eager-bf16"])


@pytest.mark.slow
def test_an_estimate_of_weights_that_are_held():
    """A tiny layer: what is held, and what dequantizing moves, by hand."""
    if static.fake_gpu.unavailable():
        pytest.skip(static.fake_gpu.unavailable())
    _, variant, _ = parse_case("qwen3-8b-lora:seq=64,batch=1", CASES)
    point, how = qwen3.layers(1, variant, qwen3.TINY), arms.fp8("delayed", policy=arms.ALL)
    elements, norms = 4 * 128 * 128 + 3 * 128 * 256, 2 * (2 * 128 + 2 * 64)
    found = {}
    for name in tables.HELD.values():
        arm = arms.ARMS[name]
        found[name] = static.compile_point(point, replace(arm, how=how) if arm.kind == "fp8" else arm)
    held = {name: round(1e9 * figures["frozen_gb"]) - norms for name, figures in found.items()}
    scales = {"blocks": elements // 128**2, "rows": 5 * 128 + 2 * 256, "tensor": 7}
    assert held.pop("bf16") == 2 * elements and held.pop("dequantized") == elements + 4 * scales["blocks"]
    assert held == {f"fp8-held-{name}": elements + 4 * count for name, count in scales.items()}
    plain, dequantized = found["bf16"], found["dequantized"]
    more = 1e9 * (dequantized["gb_outside_matmuls"] - plain["gb_outside_matmuls"])
    # a byte is read and two are written, in forward and in backward, with the scales
    assert more == pytest.approx(6 * elements, rel=0.01)
    assert dequantized["kept_mb"] == plain["kept_mb"] and "tflop.fp8" not in dequantized
    for name in held:  # fprop and dgrad of the base, and nothing else
        assert found[name]["tflop.fp8"] == pytest.approx(2 * 2 * point.tokens * elements / 1e12)


def test_the_matmuls_that_the_cost_model_knows(tmp_path, capsys):
    """Every gemm in three ways, in an order of a seed; nothing is a measurement."""
    assert matmuls.main(["--device", "cpu", "--json", str(tmp_path / "matmuls.json")]) == 0
    stored = json.loads((tmp_path / "matmuls.json").read_text())
    found = stored["matmuls"]
    assert stored["commit"] == machine.commit()["commit"] and stored["not_done"] == []
    assert len(found) == 18 and all(row[way] > 0 for row in found for way in matmuls.WAYS)
    ran = [(row["layer"], row["gemm"], (row["m"], row["n"], row["k"])) for row in found]
    listed = list(matmuls.matmuls("tiny"))
    assert sorted(ran) == sorted(listed) and ran != listed
    assert "q+k+v" in capsys.readouterr().out


def test_the_commands_of_all_estimates(capsys, tmp_path):
    """Each takes its flags, and only the last result of each case stays."""
    assert estimates.main(["--list", "--torchao", "wheel", "--old", "python2.11"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(estimates.COMMANDS)
    assert [line for line in lines if line.startswith("experts")][0].endswith("mixtral --torchao wheel")
    for command in estimates.COMMANDS:
        given = command.arguments.split()
        assert given[0] != "train" or arms.parse_arms(given[given.index("--arms") + 1])
        assert all(parse_case(given[i + 1], CASES) for i, word in enumerate(given) if word == "--case")
    for date in ("2026-01-02", "2026-01-01"):
        results.write(result("dit", [], date=date), tmp_path / f"{date}.json")
    assert [path.name for path in estimates.remove_older(tmp_path)] == ["2026-01-01.json"]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_gains_are_those_of_the_benchmarks(page: str, tmp_path) -> None:
    """`python -m benchmarks.tables --update` writes the tables that are read here."""
    text = (ROOT / page).read_text()
    copy = tmp_path / "page.md"
    gain = re.compile(r"^(\| .* \| )[\d.]+(x \| [\d.]+x \| [\d.]+ \|)$", re.M)
    copy.write_text(gain.sub(r"\g<1>0.00\2", text))
    estimated = [r for r in results.latest(results.read([results.RESULTS])) if r["static"]]
    tables.gains([copy], {r["name"]: tables.good(r) for r in estimated})
    assert copy.read_text() == text and all(f"| {title} | " in text for title in tables.GAINS)
