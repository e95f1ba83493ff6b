"""The core path: what to read, to know how a model trains in FP8. `python -m tests.project.core_path` writes
the table of docs/architecture.md.

A file belongs to it if a graph goes through its room (not: users' settings, devices, private names of torch,
reports, messages), and a `tensorwise` training of two Linears on a CPU, without features, runs a fifth of its
lines.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import fp8compile
from fp8compile import extension

PACKAGE = Path(fp8compile.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
BEGIN, END = "<!-- core path -->\n", "<!-- end of the core path -->\n"
ROOMS = ("", "frontend", "passes", "ir", "codegen", "runtime")
MESSAGES = ("errors", "logs")
SHARE, MOST = 0.2, 5600  # of the lines of a file; lines of all files


def executed() -> dict[Path, set[int]]:
    """The lines of functions that the first two steps of a training run, by file."""
    import fp8compile.backend  # noqa: F401  # before features are left out

    lines: dict[Path, set[int]] = defaultdict(set)

    def in_function(frame: FrameType, event: str, _: Any) -> Any:
        lines[Path(frame.f_code.co_filename)].add(frame.f_lineno)
        return in_function

    def called(frame: FrameType, _: str, __: Any) -> Any:
        ours = frame.f_code.co_filename.startswith(str(PACKAGE)) and frame.f_code.co_name != "<module>"
        return in_function if ours else None

    features = list(extension._features)
    extension._features.clear()
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = torch.compile(model, backend="fp8", options={"recipe": "tensorwise"})
    try:
        with torch._inductor.config.patch(force_disable_caches=True):  # a hit skips the passes
            for trace in (sys.settrace, threading.settrace):
                trace(called)
            for _ in range(2):
                run(torch.randn(64, 256)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        for trace in (sys.settrace, threading.settrace):
            trace(None)
        extension._features.extend(features)
    return lines


def of_functions(path: Path) -> set[int]:
    """The lines of a file that belong to functions and classes."""
    found: set[int] = set()
    todo: list[CodeType] = [compile(path.read_text(), path.name, "exec")]
    while todo:
        inner = [x for x in todo.pop().co_consts if isinstance(x, CodeType)]
        found.update(line for code in inner for _, _, line in code.co_lines() if line)
        todo += inner
    return found


def core_path() -> dict[str, dict[str, int]]:
    """By room: each file of the path and its lines."""
    found: dict[str, dict[str, int]] = {room: {} for room in ROOMS}
    for path, lines in sorted(executed().items()):
        room = "/".join(path.relative_to(PACKAGE).parts[:-1])
        known = of_functions(path)
        if room in found and path.stem not in MESSAGES and len(lines & known) >= SHARE * len(known):
            found[room][path.stem] = len(path.read_text().splitlines())
    return found


def table(path: dict[str, dict[str, int]]) -> str:
    rows = ["| room | files | lines |\n|---|---|---|\n"]
    for room, files in path.items():
        names = ", ".join(f"{name} {lines}" for name, lines in files.items())
        rows.append(f"| {room or 'the package'} | {names} | {sum(files.values()):,} |\n")
    total = sum(sum(files.values()) for files in path.values())
    return "".join(rows) + f"| | | **{total:,}** |\n"


def written(page: str, path: dict[str, dict[str, int]]) -> str:
    """The page with this table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table(path) + END + rest.split(END)[1]


def main() -> None:
    """Write the table; with --check, exit with a line if it is another one, or the path is too long."""
    path, page = core_path(), PAGE.read_text()
    total = sum(sum(files.values()) for files in path.values())
    if "--check" not in sys.argv:
        PAGE.write_text(written(page, path))
    elif written(page, path) != page or total > MOST:
        sys.exit(f"{total} lines, at most {MOST}. python -m tests.project.core_path writes:\n{table(path)}")


if __name__ == "__main__":
    main()
