"""The contracts of the architecture: imports go downwards, folders have no cycles, private torch stays in compat."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and its settings in a temporary folder."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "fp8compile", folder / "fp8compile", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """The result of import-linter in a folder."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def ruff(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "TID251", "fp8compile"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def planted(folder: Path, file: str, line: str) -> Path:
    """A copy with one line added at the end of a file."""
    path = folder / "fp8compile" / file
    path.write_text(path.read_text() + f"\n{line}\n")
    return path


def test_the_package_keeps_its_contracts(copy: Path) -> None:
    assert imports(copy).returncode == 0, imports(copy).stdout
    assert ruff(copy).returncode == 0, ruff(copy).stdout


@pytest.mark.parametrize(
    "file, line, why",
    [
        ("ir/ops.py", "from ..runtime import state", "fp8compile.ir is not allowed to import fp8compile.runtime"),
        ("devices/gpu.py", "from ..config import recipe", "fp8compile.devices is not allowed to import fp8compile.config"),
        ("passes/legality.py", "from . import decide", "No cycles are allowed in fp8compile.passes"),
    ],
)
def test_an_import_upwards_or_in_a_circle_is_refused(copy: Path, file: str, line: str, why: str) -> None:
    before = (copy / "fp8compile" / file).read_text()
    path = planted(copy, file, line)
    try:
        done = imports(copy)
    finally:
        path.write_text(before)
    assert done.returncode != 0 and why in done.stdout, done.stdout


def test_a_file_at_the_root_is_refused(copy: Path) -> None:
    path = copy / "fp8compile" / "helpers.py"
    path.write_text("")
    try:
        done = imports(copy)
    finally:
        path.unlink()
    assert done.returncode != 0 and "helpers" in done.stdout + done.stderr, done.stdout


def test_private_torch_is_refused_outside_of_compat(copy: Path) -> None:
    before = (copy / "fp8compile" / "ir/ops.py").read_text()
    path = planted(copy, "ir/ops.py", "import torch._dynamo")
    try:
        done = ruff(copy)
    finally:
        path.write_text(before)
    assert done.returncode != 0 and "TID251" in done.stdout and "fp8compile/compat" in done.stdout, done.stdout
