"""Results of benchmarks: files, ratios, tables, pictures, estimates, and matmuls of the cost model."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch

from benchmarks import arms, estimates, machine, matmul_fit, matmuls, plot, results, static, tables, train
from benchmarks.cases import CASES
from benchmarks.cases.base import Fit, parse_case
from fp8compile.dryrun import kernel_classes

FP8 = {"fp8": 6, "high_precision": 3, "fp8_flop_fraction": 0.9, "summary": ""}


def kernel_row(plan: str, point: str, ms: float) -> dict:
    family, shape = point.split()
    found = {
        "arm": plan,
        "kind": "kernels",
        "point": point,
        "error": None,
        "family": family,
        "bytes": 10**9,
        "checked": True,
    }
    found |= {"shape": [*map(int, shape.split("x"))], "generated": [], "what": ""}
    return {
        **found,
        "ms": {"median": ms},
        "gb_per_s": 1e3 / ms,
        "copy_gb_per_s": 4000.0,
        "share": 0.25 / ms,
        "kernels": [],
    }


def kernel_result() -> dict:
    rows = [kernel_row(plan, "gelu 8x8", ms) for plan, ms in (("fp8", 0.26), ("inductor", 0.52))]
    made = dict.fromkeys(results.TOP) | {
        "schema": 1,
        "case": "kernels",
        "name": "kernels",
        "size": "full",
        "static": False,
    }
    made |= {
        "date": "2026-01-01T00:00:00",
        "device": {"name": "NVIDIA H200"},
        "settings": {},
        "variant": {},
        "goal": 0.9,
    }
    return {**made, "rows": rows}


def page_in(folder: Path) -> Path:
    """A page with a place for each table, the measured one of before."""
    path, names = folder / "page.md", (*"static ceilings measured experts kernels instructions".split(),)
    places = "".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in names)
    path.write_text(f"a\n{places}z\n".replace("measured -->\n", "measured -->\nold\n"))
    return path


def test_kernels_are_checked_and_have_a_place_of_their_own(tmp_path):
    made = kernel_result()
    del made["rows"][0]["share"]
    with pytest.raises(ValueError, match="row 'fp8' lacks share"):
        results.check(made)
    results.write(kernel_result(), tmp_path / "k.json")
    page = page_in(tmp_path)
    assert tables.main([str(tmp_path / "k.json"), "--update", str(page)]) == 0
    before, _, after = page.read_text().partition("<!-- table: kernels -->")
    assert "gelu" not in before and "| gelu 8x8" in after
    pytest.importorskip("matplotlib")
    assert plot.draw(results.read([tmp_path / "k.json"]), tmp_path / "out") == []


# -- results, tables and pictures --


def row(arm: str, rate: float, point: str = "", **more) -> dict:
    """A measured row of an arm with `rate` tokens/s."""
    classes = {kind: {"count": 1.0, "ms": 1000 / rate} for kind in kernel_classes.CLASSES}
    steps = {part: 1e3 / rate for part in ("total", "forward", "backward", "optimizer")}
    made = train.ArmRun(arms.ARMS[arm], how="inductor", warmups=[9.0, 4.0])
    made.profile = {
        "kernels": {"classes": classes, "count": 5.0, "busy_ms": 5000 / rate, "longest": []},
        "decisions": FP8,
    }
    memory = {"allocated": 10**9, "reserved": 2 * 10**9}
    turn = {
        "tokens": 100,
        "span_ms": 1e5 / rate,
        "steps": [steps],
        "memory": memory,
        "losses": [2.0, 1.0],
        "validation": None,
    }
    made.turns = [turn, {**turn, "validation": [2, 1.5]}]
    case = CASES["ffn-half"]
    found = train.row_of(made, case.points("tiny", case.variant({}), Fit(0, 1))[0], warmup=1)
    return {**found, "point": point, **more}


def result(name: str, rows: list[dict], **more) -> dict:
    case, variant, name = parse_case(name, CASES)
    results.add_ratios(rows)
    made = dict.fromkeys(results.TOP) | {
        "schema": 1,
        "case": case.name,
        "name": name,
        "size": "full",
        "static": False,
    }
    made |= {
        "date": "2026-01-01T00:00:00",
        "device": {"name": "NVIDIA H200"},
        "variant": variant,
        "settings": {},
        "rows": rows,
    }
    return {**made, "title": case.title, "goal": case.goal(variant), **more}


def failed(arm: str) -> dict:
    return {"arm": arm, "kind": arms.ARMS[arm].kind, "point": "", "error": "OutOfMemoryError: too much"}


def test_ratios_are_over_the_faster_compiled_bf16():
    rows = [row("bf16", 100), row("bf16-max-autotune", 125), row("eager-bf16", 50), row("fp8-delayed", 150)]
    results.add_ratios(rows)
    assert [r["ratio"]["compiled_bf16"] for r in rows] == pytest.approx([0.8, 1.0, 0.4, 1.2])
    assert [r["ratio"]["eager_bf16"] for r in rows] == pytest.approx([2.0, 2.5, 1.0, 3.0])
    assert rows[3]["ratio"]["over"] == "bf16-max-autotune" and rows[3]["ratio"]["busy"] == pytest.approx(1.2)
    assert rows[3]["fp8"]["proof"] == "1 FP8 GEMM kernels a step seen by the profiler"
    assert rows[0]["compile_s"] == {"cold": pytest.approx(8.99), "warm": pytest.approx(3.99)}


def test_results_are_checked(tmp_path):
    good = result("dit", [row("bf16", 100), failed("torchao-rowwise")])
    results.write(good, tmp_path / "good.json")
    assert results.read([tmp_path]) == [json.loads(json.dumps(good))]
    with pytest.raises(ValueError, match="row 'bf16' lacks how, tokens_per_s"):
        results.check({**good, "rows": [{**failed("bf16"), "error": None}]})
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="bad.json: not a result"):
        results.read([tmp_path])


def test_tables(tmp_path):
    made = result("dit", [row("bf16", 100), row("fp8-delayed", 140), failed("torchao-rowwise")])
    text = tables.text(made)
    assert "goal 1.4" in text and "1.40" in text and "torchao-rowwise: OutOfMemoryError: too much" in text
    page = page_in(tmp_path)
    results.write(made, tmp_path / "r.json")
    assert tables.main([str(tmp_path / "r.json"), "--update", str(page)]) == 0
    assert "| fp8-delayed |" in page.read_text() and "old" not in page.read_text()
    assert page.read_text().endswith("z\n")


@pytest.mark.slow
def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    cells = [(m, n, k) for m in (1024, 4096) for n in (512, 2048) for k in (512, 2048)]
    grid = [
        row(arm, rate * (1 + n / 8192), f"{m}x{n}x{k}", meta={"m": m, "n": n, "k": k})
        for m, n, k in cells
        for arm, rate in (("eager-bf16", 100), ("fp8-delayed", 60 + m / 40))
    ]
    for made in (
        result("dit", [row("bf16", 100), row("fp8-delayed", 140), failed("torchao-rowwise")]),
        result(
            "llama-8b-layers:seq=2048",
            [row("bf16", 100), row("torchao-rowwise", 110), row("fp8-tensorwise", 130)],
        ),
        result("linear:grid=6", grid),
        result("loss", [row("bf16", 100), row("fp8-delayed", 140)]),
    ):
        results.write(made, tmp_path / f"{made['case']}.json")
    assert plot.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    names = {
        "speed-nvidia-h200",
        "memory-nvidia-h200",
        "never-slower-nvidia-h200-fp8-delayed",
        "loss-nvidia-h200",
    }
    assert {path.stem for path in (tmp_path / "out").iterdir()} == names
    assert all(path.stat().st_size > 10_000 for path in (tmp_path / "out").iterdir())


# -- the estimate --


def test_extrapolation():
    one, two = {"kernels": 10, "tflop.fp8": 2.0}, {"kernels": 14, "tflop.fp8": 4.0, "count.cast": 1}
    assert static.extrapolated(one, two, 12) == {"kernels": 54, "tflop.fp8": 24.0, "count.cast": 11}


@pytest.mark.slow
def test_estimate_of_a_linear():
    if static.fake_gpu.unavailable():
        pytest.skip(static.fake_gpu.unavailable())
    case, variant, _ = parse_case("linear", CASES)
    qkv = case.static(variant)[0]
    bf16, fp8 = (static.estimate(qkv, arms.ARMS[arm])["figures"] for arm in ("bf16", "fp8-delayed"))
    assert bf16["count.bf16_gemm"] == fp8["count.fp8_gemm"] == 3
    assert bf16["tflop.bfloat16"] == fp8["tflop.fp8"] == pytest.approx(3 * 2 * 15872 * 4096 * 12288 / 1e12)
    assert bf16["roofline_ms"] > fp8["roofline_ms"]
    # a linear has no optimizer
    assert bf16["ms.bf16_gemm"] == pytest.approx(bf16["roofline_ms"]) and bf16["optimizer_ms"] == 0
    assert 0 < bf16["roofline_ms_without_waves"] < bf16["roofline_ms"]
    with pytest.raises(ValueError, match="eager kernels are not compiled"):
        static.estimate(qkv, arms.ARMS["eager-bf16"])


def test_bytes_of_the_optimizer():
    """The bytes are those of the tensors that the benchmark's optimizer has after a step."""
    for dtype, each in ((torch.bfloat16, 14), (torch.float32, 28)):
        model = torch.nn.Linear(48, 32, dtype=dtype)
        model(torch.zeros(1, 48, dtype=dtype)).sum().backward()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer.step()
        moments = [x for state in optimizer.state.values() for x in (state["exp_avg"], state["exp_avg_sq"])]
        changed = sum(x.nbytes for x in (*model.parameters(), *moments))
        assert static.optimizer_bytes(model) == 2 * changed + sum(p.grad.nbytes for p in model.parameters())
        assert static.optimizer_bytes(model) == each * (48 * 32 + 32)


def test_the_ceiling_and_fast_accumulation_have_columns():
    def row(arm, total, once):
        static = {"roofline_ms": total, "roofline_ms_without_waves": total, "kept_mb": 1}
        static |= {"operands_once_ms": once}
        return {"arm": arm, "kind": arm.split("-")[0], "point": "", "error": None, "static": static}

    rows = [row("bf16", 30.0, 28.0), row("fp8-delayed", 24.0, 20.0), row("fp8-delayed-fast-accum", 19.0, 9.0)]
    results.add_ratios(rows)
    assert [r["ratio"]["ceiling"] for r in rows] == [30 / 28, 30 / 20, 30 / 9]
    made = tables.ceilings([{"name": "ffn", "goal": 1.55, "rows": rows}])
    assert made.splitlines()[-1].split("|")[1].strip() == "ffn" and " 1.25 " in made
    assert [cell.strip() for cell in made.splitlines()[-1].split("|")[-3:-1]] == ["1.50", "1.58"]


def test_matmuls_of_measured_steps_take_what_the_cost_model_says(capsys):
    """In all runs on an H200; those that were measured alone and not hot are at most a sixth apart."""
    groups = list(matmul_fit.in_steps())
    assert len(groups) == 34 and {len(group.sizes) for group in groups} == {8, 14, 16, 28}
    for group in groups:
        assert matmul_fit.model(group.way, group.sizes) == pytest.approx(group.seconds, rel=0.06), group
    assert all(ratio == pytest.approx(1, rel=0.17) for _, hot, _, ratio in matmul_fit.alone() if not hot)
    assert matmul_fit.main([]) == 0 and "| fp8-delayed " in capsys.readouterr().out


def test_the_matmuls_that_the_cost_model_knows(tmp_path, capsys):
    """Every gemm in three ways, in an order of a seed, and what attention runs; nothing is a measurement."""
    assert matmuls.main(["--device", "cpu", "--json", str(tmp_path / "out" / "matmuls.json")]) == 0
    found = json.loads((tmp_path / "out" / "matmuls.json").read_text())
    assert len(found["matmuls"]) == 18 and all(
        row[way] > 0 for row in found["matmuls"] for way in matmuls.WAYS
    )
    listed = list(matmuls.matmuls("tiny"))
    random.Random(0).shuffle(shuffled := [*listed])
    ran = [(row["layer"], row["gemm"], (row["m"], row["n"], row["k"])) for row in found["matmuls"]]
    assert ran == shuffled != listed
    assert [(row["order"], row["seed"], row["clocks"]) for row in found["matmuls"]] == [
        (i, 0, None) for i in range(18)
    ]
    assert {(row["m"], row["n"], row["k"]) for row in found["matmuls"] if row["layer"] == "gate+up"} == {
        (64, 448, 64),
        (64, 64, 448),
        (448, 64, 64),
    }
    assert any("scaled_dot_product" in name for name in found["attention"]["kernels"])
    printed = capsys.readouterr().out
    assert "q+k+v" in printed and "attention: cuDNN" in printed


def test_only_the_last_estimates_stay(tmp_path):
    """Of each case, and apart of those that counted instructions."""
    made = kernel_result()
    for date, counted in (("2026-01-02", False), ("2026-01-01", False), ("2026-01-01", True)):
        settings = {**made["settings"], "instructions": counted}
        results.write({**made, "date": date, "settings": settings}, tmp_path / f"{date}{counted}.json")
    assert [path.name for path in estimates.remove_older(tmp_path)] == ["2026-01-01False.json"]
    assert len(list(tmp_path.iterdir())) == 2


def test_the_commands_of_all_estimates(capsys):
    """Each is a module of the benchmarks, and takes its flags."""
    assert estimates.main(["--list", "--torchao", "wheel", "--old", "python2.11"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(estimates.COMMANDS)
    assert [line for line in lines if line.startswith("experts")][0].endswith("mixtral --torchao wheel")
    for command in estimates.COMMANDS:
        if command.arguments.startswith("train "):
            given = command.arguments.split()
            assert arms.parse_arms(given[given.index("--arms") + 1])
            assert all(parse_case(given[i + 1], CASES) for i, word in enumerate(given) if word == "--case")


def test_gains_are_written_into_pages(tmp_path):
    row = {"arm": "fp8-delayed", "error": None, "ratio": {"compiled_bf16": 1.444, "memory": 0.7}}
    peer = {"arm": "torchao-rowwise", "error": None, "ratio": {"compiled_bf16": 1.3}}
    page = tmp_path / "README.md"
    page.write_text("| GPT-2 124M | 1.00x | 1.00x | 1.00 |\n| Llama-3.2-1B | 1.00x | 1.00x | 1.00 |\n")
    tables.gains([page], [{"name": "gpt2-124m", "rows": [row, peer]}])
    assert page.read_text() == (
        "| GPT-2 124M | 1.44x | 1.30x | 0.70 |\n| Llama-3.2-1B | 1.00x | 1.00x | 1.00 |\n"
    )


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_gains_are_those_of_the_benchmarks(page: str) -> None:
    """`python -m benchmarks.tables --update` writes the tables that are read here."""
    ceilings, everything = (
        (machine.ROOT / "docs/benchmarks.md").read_text(),
        (machine.ROOT / "notes/benchmarks.md").read_text(),
    )
    for title, case in tables.GAINS.items():
        shown = (machine.ROOT / page).read_text()
        row = re.search(rf"^\| {re.escape(title)} \| (.*?)x \| (.*?)x \| (.*?) \|$", shown, re.M)
        assert row is not None, title
        theirs, ours = re.search(
            rf"^\| {case} +\| +[\d.]* *\| +([\d.]+) \| +([\d.]+) ", ceilings, re.M
        ).groups()
        table = everything[everything.index(f"**{case} |") :]
        kept = re.search(r"^\| fp8-delayed +(?:\| +[\d.,]+ ){3}\| +([\d.]+) ", table, re.M)[1]
        assert row.groups() == (ours, theirs, kept), title
