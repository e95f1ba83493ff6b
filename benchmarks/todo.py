"""What a command of `device.sh` has to do, and what it has done: the rest is named, however the command ends.

The variable names a file of lines. Without it nothing is written.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import lines

VARIABLE = "FP8COMPILE_TODO"


def plan(items: Mapping[str, int] | Iterable[str]) -> None:
    """The names of what is to be done, and how often (once). A name given before has a new number."""
    _say({"todo": dict(items) if isinstance(items, Mapping) else dict.fromkeys(items, 1)})


def done(name: str, failed: str | None = None) -> None:
    """Done once more; or given up, and why."""
    _say({"done": name, "failed": failed})


def _say(line: dict[str, Any]) -> None:
    if VARIABLE in os.environ:
        lines.add(Path(os.environ[VARIABLE]), line)


def missing(path: Path) -> list[str]:
    """What was not done: names, with what was done of them, or with why they were given up."""
    wanted: dict[str, int] = {}
    got: Counter[str] = Counter()
    failed: dict[str, str] = {}
    for line in lines.read(path) if path.exists() else []:
        wanted |= line.get("todo", {})
        if line.get("failed"):
            failed[line["done"]] = line["failed"]
        elif "done" in line:
            got[line["done"]] += 1
    found = []
    for name, count in wanted.items():
        if name in failed:
            found.append(f"{name}: {failed[name]}")
        elif got[name] < count:
            found.append(f"{name} ({got[name]} of {count})" if got[name] else name)
    return found
