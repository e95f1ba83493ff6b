"""An environment with PyTorch and what it needs, as in an image for GPUs: other packages are hidden."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Inductor's C++ backend imports the last one
THERE = ("torch", "triton", "sympy", "networkx", "numpy", "jinja2", "packaging")
TOML = ("tomli",) if sys.version_info < (3, 11) else ()


def bare(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process that finds only THERE, what these distributions need, and the checkout."""
    code = f"from tests.support.bare import hide; hide()\n{program}"
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FP8COMPILE_")}
    environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


def needed(names: Iterable[str]) -> set[str]:
    """These distributions, and those that they need, without extras."""
    found: set[str] = set()
    left = [*names]
    while left:
        name = _normal(re.split(r"[^\w.-]", left.pop())[0])
        if name not in found:
            found.add(name)
            # of another platform, or another version of Python
            with contextlib.suppress(PackageNotFoundError):
                left += [one for one in requires(name) or () if "extra ==" not in one]
    return found


def hide() -> None:
    """From here on, this process finds nothing of other distributions."""
    kept = {*needed([*THERE, *TOML]), "fp8compile"}
    hidden = {top for top, owners in packages_distributions().items() if not kept & {*map(_normal, owners)}}
    assert {"pytest", "click"} <= hidden and "torch" not in sys.modules
    sys.meta_path[:] = [_Without(finder, hidden, kept) for finder in sys.meta_path]


class _Without:
    """A finder that does not find some packages, nor their metadata: as if they were not installed."""

    def __init__(self, finder: Any, hidden: set[str], kept: set[str]) -> None:
        self.finder, self.hidden, self.kept = finder, hidden, kept

    def find_spec(self, name: str, *args: Any) -> Any:
        return None if name.partition(".")[0] in self.hidden else self.finder.find_spec(name, *args)

    def find_distributions(self, *args: Any) -> Iterator[Any]:
        found = self.finder.find_distributions(*args) if hasattr(self.finder, "find_distributions") else ()
        return (one for one in found if _normal(one.name) in self.kept)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
