"""The contracts of the architecture: imports go downwards, folders have no cycles, private torch stays in
compat; and those of the tests: they enter by public names and by `support/hooks`, and know nothing of
benchmarks."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp8compile

ROOT = Path(__file__).resolve().parents[2]


def test_imports_upwards_and_in_a_circle_are_refused(tmp_path: Path) -> None:
    """In a copy of the package. (`make lint` says that there are none.)"""
    package = tmp_path / "fp8compile"
    shutil.copytree(ROOT / "fp8compile", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (package / "helpers.py").write_text("")
    for file, line in (
        ("ir/ops.py", "from ..runtime import state\nimport torch._dynamo"),
        ("devices/gpu.py", "from ..config import recipe"),
        ("passes/legality.py", "from . import decide"),
    ):
        with (package / file).open("a") as source:
            source.write(f"\n{line}\n")

    def said(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode != 0
        return done.stdout + done.stderr

    linted = said(Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache")
    assert "fp8compile.ir is not allowed to import fp8compile.runtime" in linted
    assert "fp8compile.devices is not allowed to import fp8compile.config" in linted
    assert "No cycles are allowed in fp8compile.passes" in linted and "helpers" in linted
    private = said(sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "TID251", "fp8compile")
    assert "TID251" in private and "fp8compile/compat" in private


@pytest.mark.slow
def test_public_modules_need_no_import_of_their_own() -> None:
    program = "import fp8compile; fp8compile.distributed.fp8_all_gather; fp8compile.optim.AdamW"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


# -- what tests import --

PUBLIC = ("distributed", "optim", "errors", "integrations")  # modules that users import
HOOKS = "support/hooks/"
# whose tests have the room's own modules as their subject
ROOMS = ("codegen", "frontend", "ir", "config", "devices", "compat")
# These still reach inside, or (project/) compare pages with what they describe. What a folder does not import
# any more goes from here; what is new should ask tests/support/hooks.
EXCEPTIONS: dict[str, str] = {
    "backend": "backend compat config devices dryrun features ir passes reporting",
    "cli": "cli config devices dryrun logs",
    "codegen": "compat config devices dryrun features ir passes",
    "config": "devices passes",
    "devices": "config logs",
    "distributed": "compat features reporting runtime",
    "dryrun": "config devices dryrun ir reporting",
    "equivalence": "devices dryrun",
    "features": "config devices dryrun features ir passes",
    "hosts": "runtime",
    "ir": "config",
    "optim": "devices dryrun",
    "passes": "compat config devices dryrun ir passes reporting",
    "project": "backend cli config devices extension",
    "reporting": "cli dryrun ir logs reporting runtime",
    "runtime": "compat ir runtime",
    "support": "codegen compat config devices dryrun features ir passes runtime",
}


def inside(path: Path) -> set[str]:
    """The package's rooms that a file imports, or patches by name: no public names, nor modules of PUBLIC."""
    found = set()
    for name in names(ast.parse(path.read_text())):
        _, _, rest = name.partition(".")
        first = rest.partition(".")[0]
        if rest and first not in PUBLIC and rest not in fp8compile.__all__ and not first.startswith("__"):
            found.add(first)
    return found


def names(tree: ast.AST) -> Iterator[str]:
    """What is imported from fp8compile, as dotted names, and names in strings that are patched."""
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if ast.unparse(node.func).rpartition(".")[2] in ("patch", "setattr"):
                found = [str(node.args[0].value)]
        yield from (name for name in found if name.partition(".")[0] == "fp8compile")


def test_tests_enter_by_public_names_and_hooks() -> None:
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        file = path.relative_to(ROOT / "tests").as_posix()
        room = file.partition("/")[0]
        rooms = inside(path) - ({room} & {*ROOMS})
        if rooms and not file.startswith(HOOKS) and "expected/" not in file:
            found.setdefault(room, set()).update(rooms)
            assert rooms <= {*EXCEPTIONS.get(room, "").split()}, f"{file} needs a function in tests/{HOOKS}"
    known = {room: {*rooms.split()} for room, rooms in EXCEPTIONS.items()}
    assert found == known, "these reach inside no more: take them out of the list"


def test_no_two_files_or_classes_have_one_name() -> None:
    """But for the public classes that each host expects."""
    files, classes = Counter[str](), Counter[str]()
    for path in (ROOT / "fp8compile").rglob("*.py"):
        files[path.name] += path.name not in ("__init__.py", "__main__.py")
        if path.parent.name != "integrations":
            nodes = ast.walk(ast.parse(path.read_text()))
            classes.update(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert not [name for name, count in (files + classes).items() if count > 1]


def test_tests_know_nothing_of_benchmarks() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        assert not re.search(r"^ *(import|from) benchmarks\b", path.read_text(), re.M), path
