"""docs/support.md: it is what the script makes, and cells follow from results of devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import support
from fp8compile.config.recipe import RECIPES
from fp8compile.devices import catalog

H100 = {"name": "NVIDIA H100 80GB HBM3", "memory": 1, "capability": "9.0"}
OTHER = {"name": "NVIDIA GPU that nobody knows", "memory": 1, "capability": "9.0"}


def result(*rows: dict[str, Any], device: dict[str, Any] = H100, torch: str = "2.11.0+cu130") -> str:
    versions = {"torch": torch, "hip": None}
    return json.dumps({"device": device, "static": False, "versions": versions, "rows": rows})


def row(arm: str, kernels: float | None = 12.0, error: str | None = None) -> dict[str, Any]:
    return {"arm": arm, "error": error} | ({} if error else {"fp8": {"gemm_kernels": kernels}})


def cells(page: str) -> dict[str, dict[str, str]]:
    """GPU -> recipe -> what its cell says."""
    lines = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in page.splitlines()]
    head, _, *body = [line for line in lines if len(line) == 2 + len(RECIPES)]
    found = {}
    for names, *line in body:
        found |= dict.fromkeys(names.replace("`", "").split(", "), dict(zip(head[1:], line, strict=True)))
    return found


def test_the_page_is_what_the_script_makes() -> None:
    assert support.PAGE.read_text() == support.page(), "python -m benchmarks.support writes it"


def test_every_gpu_has_a_row_and_nothing_ran(tmp_path: Path) -> None:
    found = cells(support.page(tmp_path))
    assert found.keys() == catalog.shipped().keys()
    assert found["a100"] == dict.fromkeys(RECIPES, "refused") | {"architecture": "sm_80"}
    assert found["h100"]["delayed"] == "compiled" and found["h100"]["mxfp8"] == "emulated"
    assert {found[name]["mxfp8"] for name in ("b200", "b300", "rtx5090")} == {"compiled"}


def test_cells_follow_from_results(tmp_path: Path) -> None:
    """Files of `benchmarks.train`, also those that were cut off."""
    rows = row("bf16"), row("fp8-delayed-all"), row("fp8-rowwise", error="no")
    (tmp_path / "gpt2.json").write_text(result(*rows))
    other = result(row("fp8-blockwise"), device=OTHER)
    lines = [result(), "[1]", result(row("fp8-delayed"), torch="2.13.0"), other, '{"cut o']
    (tmp_path / "layers.jsonl").write_text("\n".join(lines))
    page = support.page(tmp_path)
    found = cells(page)
    assert found["h100"]["delayed"] == "*ran* (2.11.0, 2.13.0); compiled (2.15.0)"
    assert found["h100"]["rowwise"] == "compiled" and found["h200"]["delayed"] == "compiled"
    assert "Steps have run on `h100`, and on no other GPU." in page
