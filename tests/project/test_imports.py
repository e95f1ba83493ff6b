"""The contracts of the architecture: imports go downwards, folders have no cycles, private torch stays in compat; and those of
the tests: they enter by public names and by `support/hooks`, and know nothing of benchmarks."""

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


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package and its settings in a temporary folder."""
    shutil.copytree(ROOT / "fp8compile", tmp_path / "fp8compile", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """The result of import-linter in a folder."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def ruff(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "TID251", "fp8compile"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def plant(folder: Path, file: str, line: str) -> None:
    """Add one line at the end of a file."""
    path = folder / "fp8compile" / file
    path.write_text(path.read_text() + f"\n{line}\n")


def test_imports_upwards_and_in_a_circle_are_refused(copy: Path) -> None:
    """(`make lint` says that there are none.)"""
    (copy / "fp8compile" / "helpers.py").write_text("")
    plant(copy, "ir/ops.py", "from ..runtime import state")
    plant(copy, "devices/gpu.py", "from ..config import recipe")
    plant(copy, "passes/legality.py", "from . import decide")
    done = imports(copy)
    assert done.returncode != 0
    assert "fp8compile.ir is not allowed to import fp8compile.runtime" in done.stdout
    assert "fp8compile.devices is not allowed to import fp8compile.config" in done.stdout
    assert "No cycles are allowed in fp8compile.passes" in done.stdout
    assert "helpers" in done.stdout + done.stderr, done.stdout


@pytest.mark.slow
def test_public_modules_need_no_import_of_their_own() -> None:
    program = "import fp8compile; fp8compile.distributed.fp8_all_gather; fp8compile.optim.AdamW"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_private_torch_is_refused_outside_of_compat(copy: Path) -> None:
    plant(copy, "ir/ops.py", "import torch._dynamo")
    done = ruff(copy)
    assert done.returncode != 0 and "TID251" in done.stdout and "fp8compile/compat" in done.stdout, done.stdout


# -- what tests import -------------------------------------------------------------------------------------------------

PUBLIC = ("distributed", "optim", "errors", "integrations")  # modules that users import
HOOKS = "support/hooks/"
ROOMS = ("codegen", "ir", "config", "devices", "compat")  # whose tests have the room's own modules as their subject
# These still reach inside, or (project/) compare pages with what they describe. What a file does not import any more goes from
# here; what is new should ask tests/support/hooks.
EXCEPTIONS: dict[str, str] = {
    "backend/test_demo.py": "backend config",
    "backend/test_executed.py": "compat dryrun",
    "backend/test_experts.py": "compat devices dryrun",
    "backend/test_gpu.py": "compat passes",
    "backend/test_gpu_graph.py": "backend devices dryrun ir",
    "backend/test_random_training.py": "ir",
    "backend/test_transformers.py": "reporting",
    "cli/test_cli.py": "cli config devices dryrun logs",
    "codegen/test_block_gemm.py": "config devices ir",
    "codegen/test_block_kernels.py": "ir passes",
    "codegen/test_conversions.py": "compat devices",
    "codegen/test_expressions.py": "ir",
    "codegen/test_grouped_gemm.py": "config ir",
    "codegen/test_grouped_kernels.py": "ir",
    "codegen/test_kernels.py": "compat",
    "codegen/test_machine_code.py": "dryrun",
    "codegen/test_random_graphs.py": "compat ir passes",
    "codegen/test_scaled_mm.py": "config devices dryrun ir",
    "codegen/test_small_kernels.py": "ir",
    "config/test_options.py": "devices",
    "config/test_policy.py": "devices",
    "config/test_shipped_policies.py": "passes",
    "devices/test_catalog.py": "logs",
    "devices/test_cost.py": "config",
    "features/collectives/test_all_to_alls.py": "devices dryrun ir",
    "distributed/test_amax_groups.py": "compat runtime",
    "distributed/test_checkpoints.py": "ir",
    "distributed/test_equivalence_on_ranks.py": "reporting",
    "distributed/test_parallelism.py": "ir",
    "features/compression/test_wire.py": "features",
    "dryrun/test_bench.py": "cli dryrun ir reporting",
    "dryrun/test_compare.py": "dryrun",
    "dryrun/test_estimate.py": "devices dryrun",
    "dryrun/test_explain.py": "reporting",
    "dryrun/test_fake_gpu.py": "devices dryrun",
    "dryrun/test_tune.py": "config devices dryrun ir",
    "dryrun/test_watch.py": "reporting",
    "equivalence/golden/cases.py": "devices dryrun",
    "equivalence/golden/test_golden.py": "dryrun",
    "equivalence/golden/text.py": "dryrun",
    "features/export/test_mxfp8.py": "config features",
    "hosts/test_lightning_callback.py": "ir runtime",
    "hosts/test_lightning_ranks.py": "runtime",
    "hosts/test_trainer.py": "ir",
    "hosts/test_trainer_ranks.py": "runtime",
    "ir/test_torchao.py": "config",
    "optim/test_kernels.py": "devices dryrun",
    "features/collectives/test_all_gathers.py": "dryrun ir",
    "features/chunked_logits/test_flatten.py": "dryrun",
    "passes/test_fusion.py": "codegen compat ir",
    "passes/test_gathered.py": "devices dryrun ir passes",
    "passes/test_invariants.py": "compat ir passes",
    "features/merge/test_merge.py": "dryrun ir",
    "passes/test_profitability.py": "devices ir passes",
    "passes/test_recast.py": "devices dryrun passes",
    "passes/test_recipes.py": "ir",
    "passes/test_resolve.py": "passes",
    "features/save/test_save.py": "dryrun ir",
    "passes/test_spellings.py": "ir reporting",
    "passes/test_try_matmuls.py": "ir passes",
    "features/weight_cache/test_turned.py": "devices dryrun",
    "passes/test_weight_tiles.py": "config ir",
    "project/command_options.py": "cli",
    "project/settings_page.py": "config",
    "project/test_blocks.py": "devices",
    "project/test_docs.py": "cli config",
    "reporting/test_html.py": "dryrun ir reporting",
    "reporting/test_monitor.py": "cli reporting",
    "reporting/test_outside.py": "reporting",
    "reporting/test_report.py": "ir logs reporting runtime",
    "reporting/test_reports_of_training.py": "reporting",
    "reporting/test_stats.py": "ir reporting runtime",
    "features/frozen/test_frozen.py": "devices dryrun",
    "runtime/test_functional.py": "ir",
    "runtime/test_headroom.py": "config devices ir",
    "runtime/test_warm_start.py": "compat ir runtime",
    "features/weight_cache/test_weight_cache.py": "dryrun",
    "support/executed.py": "compat devices dryrun runtime",
    "support/fuzz_policies.py": "config devices",
    "support/fuzz_training.py": "ir",
    "support/gpu_steps.py": "devices dryrun",
    "support/groups.py": "compat ir passes",
    "support/interpreter.py": "codegen compat",
    "support/machine_code.py": "codegen compat devices dryrun",
    "support/operands.py": "devices ir",
    "support/policies.py": "config",
    "support/regenerate.py": "codegen ir passes",
    "support/times.py": "config dryrun",
}


def inside(path: Path) -> set[str]:
    """The rooms of the package that a file imports, or patches by name: not public names, and not the modules of PUBLIC."""
    found = set()
    for name in names(ast.parse(path.read_text())):
        _, _, rest = name.partition(".")
        first = rest.partition(".")[0]
        if rest and first not in PUBLIC and (rest not in fp8compile.__all__ and not first.startswith("__")):
            found.add(first)
    return found


def names(tree: ast.AST) -> Iterator[str]:
    """What is imported from fp8compile, as dotted names, and names in strings that are patched."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "fp8compile")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "fp8compile":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("patch", "setattr") and str(node.args[0].value).startswith("fp8compile."):
                yield str(node.args[0].value)


def test_tests_enter_by_public_names_and_hooks() -> None:
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        file = path.relative_to(ROOT / "tests").as_posix()
        own = {file.partition("/")[0]} & {*ROOMS}
        if not file.startswith(HOOKS) and "expected/" not in file and (rooms := inside(path) - own):
            found[file] = " ".join(sorted(rooms))
    more = {file: rooms for file, rooms in found.items() if not {*rooms.split()} <= {*EXCEPTIONS.get(file, "").split()}}
    assert not more, f"these need a function in tests/{HOOKS}: {more}"
    assert found == EXCEPTIONS, "these reach inside no more: take them out of the list"


def test_no_two_files_or_classes_have_one_name() -> None:
    """But for the public classes that each host expects."""
    files, classes = Counter[str](), Counter[str]()
    for path in (ROOT / "fp8compile").rglob("*.py"):
        files[path.name] += path.name not in ("__init__.py", "__main__.py")
        if path.parent.name != "integrations":
            classes.update(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))
    assert not [name for name, count in (files + classes).items() if count > 1]


def test_tests_know_nothing_of_benchmarks() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        assert not re.search(r"^ *(import|from) benchmarks\b", path.read_text(), re.M), path


def test_what_reaches_inside_is_noticed(tmp_path: Path) -> None:
    lines = {
        "import fp8compile": set(),
        "from fp8compile import report, errors": set(),
        "from fp8compile.errors import OptionError": set(),
        "from fp8compile.optim import AdamW": set(),
        "from fp8compile import compat": {"compat"},
        "def f():\n    from fp8compile.runtime import state": {"runtime"},
        "import fp8compile.features.save.save": {"features"},
        "mock.patch('fp8compile.compilation.run_joint')": {"compilation"},
    }
    for line, rooms in lines.items():
        (tmp_path / "a.py").write_text(line)
        assert inside(tmp_path / "a.py") == rooms, line
