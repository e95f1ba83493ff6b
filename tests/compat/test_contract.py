"""Each private name of torch and Triton that the package reads is there. A version without one fails by that
name.

What is read within a `try`, or after a look for it, is left out: other code stands in for it in some
versions.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp8compile

PACKAGE = Path(fp8compile.__file__).parent
pytestmark = pytest.mark.compat


def read_by(tree: ast.AST) -> Iterator[str]:
    """The dotted names that a module imports or reads."""
    for node in ast.iter_child_nodes(tree):
        condition = ast.unparse(node.test) if isinstance(node, (ast.If, ast.IfExp)) else ""
        if isinstance(node, ast.Try) or "version" in condition or "hasattr" in condition:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and (chain := dotted(node)):
            yield chain
        else:
            yield from read_by(node)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def private_names() -> dict[str, str]:
    """Each private name, with a file that reads it."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in read_by(ast.parse(path.read_text())):
            first, *parts = name.split(".")
            inside = first in ("torch", "triton") and "ops" not in parts[:1]
            if inside and any(part.startswith("_") and not part.startswith("__") for part in parts):
                found.setdefault(name, path.relative_to(PACKAGE).as_posix())
    return found


NAMES = private_names()


def test_there_are_some() -> None:
    assert len(NAMES) > 60 and sum(file.startswith("compat/") for file in NAMES.values()) > 50


@pytest.mark.parametrize("name", sorted(NAMES))
def test_it_is_there(name: str) -> None:
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        for part in parts[size:]:
            assert hasattr(value, part), f"{name}, which {NAMES[name]} reads: {value!r} has no {part!r}"
            value = getattr(value, part)
        return
