"""docs/support.md: it is what the script makes, and cells follow from results of devices."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import support
from fp8compile.config.recipe import RECIPES
from fp8compile.devices import catalog

H100 = {"name": "NVIDIA H100 80GB HBM3", "memory": 1, "capability": "9.0"}
L4 = {"name": "NVIDIA L4", "memory": 1, "capability": "8.9"}


def result(
    *rows: dict[str, Any], device: dict[str, Any] = H100, static: bool = False, torch: str = "2.11.0+cu130"
) -> str:
    return json.dumps(
        {"device": device, "static": static, "versions": {"torch": torch, "hip": None}, "rows": rows}
    )


def row(arm: str, kernels: float | None = 12.0, error: str | None = None) -> dict[str, Any]:
    return {"arm": arm, "error": error} | ({} if error else {"fp8": {"gemm_kernels": kernels}})


def cells(page: str) -> dict[str, dict[str, str]]:
    """GPU -> recipe -> what its cell says."""
    lines = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in page.splitlines()]
    head, _, *body = [line for line in lines if len(line) == 2 + len(RECIPES)]
    return {
        name.strip(" `"): dict(zip(head[1:], line[1:], strict=True))
        for line in body
        for name in line[0].split(",")
    }


def test_the_page_is_what_the_script_makes() -> None:
    assert support.PAGE.read_text() == support.page(), "python -m benchmarks.support writes it"


def test_every_gpu_has_a_row_and_nothing_ran(tmp_path: Path) -> None:
    found = cells(support.page(tmp_path))
    assert found.keys() == catalog.shipped().keys()
    assert found["a100"] == dict.fromkeys(RECIPES, "refused") | {"architecture": "sm_80"}
    assert found["h100"] == dict.fromkeys(RECIPES, "compiled") | {
        "architecture": "sm_90",
        "mxfp8": "emulated",
    }
    assert {found[name]["mxfp8"] for name in ("b200", "b300", "rtx5090")} == {"compiled"}
    assert "Nothing has run on a GPU yet." in support.page(tmp_path)


def test_cells_follow_from_results(tmp_path: Path) -> None:
    """Files of `benchmarks.train`, and the archive of a device, as they are."""
    (tmp_path / "h100").mkdir()
    (tmp_path / "h100" / "gpt2.json").write_text(
        result(row("bf16"), row("fp8-delayed-all"), row("fp8-rowwise", error="no"))
    )
    (tmp_path / "probe.jsonl").write_text('{"what": "facts"}\n[1]\n{"cut o')
    with tarfile.open(tmp_path / "first-cuda.tar.gz", "w:gz") as tar:
        lines = [
            result(),
            result(row("fp8-delayed"), torch="2.13.0"),
            result(row("fp8-blockwise"), device=L4, torch="2.14.1"),
        ]
        for name, text in (("layers.jsonl", "\n".join(lines)), ("probe.log", result(row("fp8-mxfp8")))):
            inside = tarfile.TarInfo(name)
            inside.size = len(text)
            tar.addfile(inside, io.BytesIO(text.encode()))
    page = support.page(tmp_path)
    found = cells(page)
    assert found["h100"]["delayed"] == "*ran* (2.11.0, 2.13.0); compiled (2.15.0)"
    assert found["h100"]["mxfp8"] == "emulated"  # a log is no result
    assert found["h100"]["rowwise"] == "compiled" and found["h200"]["delayed"] == "compiled"
    assert found["NVIDIA L4"]["blockwise"] == "*ran* (2.14.1); compiled (2.11.0, 2.13.0, 2.15.0)"
    assert found["NVIDIA L4"]["architecture"] == "sm_89" and found["NVIDIA L4"]["mxfp8"] == "emulated"
    assert "Steps have run on `NVIDIA L4`, `h100`, and on no other GPU." in page


@pytest.mark.parametrize(
    "text",
    [
        result(row("fp8-mxfp8", kernels=0.0)),  # emulated
        result(row("fp8-mxfp8", kernels=None), device={"name": "cpu", "capability": None}),
        result(row("fp8-mxfp8"), static=True),  # an estimate
        result(row("an-arm-of-before"), row("fp8-fast"), row("torchao-rowwise")),
    ],
    ids=["no FP8 matmul", "a CPU", "an estimate", "no recipe"],
)
def test_what_is_no_evidence(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    assert support.page(tmp_path) == support.page(tmp_path / "nothing")


def test_what_no_test_compiles_is_not_said_to_compile() -> None:
    """A test that has fewer targets changes cells; so does a recipe that has one more test."""
    gpu = catalog.find("b300").gpu
    assert (
        support.cell(gpu, "delayed", {"one": {"sm_100", "sm_90"}, "two": {"sm_100"}}, set(), []) == "compiled"
    )
    assert (
        support.cell(gpu, "delayed", {"one": {"sm_100", "sm_90"}, "two": {"sm_90"}}, set(), [])
        == "not compiled yet"
    )
    with pytest.raises(ValueError, match="has no parameter 'target'"):
        support.targets(test_what_is_no_evidence)
