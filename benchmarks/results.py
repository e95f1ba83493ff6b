"""The JSON of a run: its format, its ratios, and functions that read and write it.

    {schema, case, name, size, static, date, command, commit, changed, device, versions, clocks, settings,
     goal, rows: [{arm, kind, point, error, ...}]}

A row of a failed arm has `error` and no measured values. A row of a measurement has tokens_per_s, step_ms,
busy_ms, ratio, memory, compile_s, kernels, fp8, losses, validation; since the end of November 2026 also
clocks (`sampler`, of all turns, of each round and of the profile; null without a GPU) and timeline
(`timeline`). A row of an estimate has `static` and ratio. Times are in ms, memory in bytes. In the case
`kernels` (`benchmarks.kernels`), a row is one plan of one family and shape. It has family, shape and bytes,
and either ms, gb_per_s, copy_gb_per_s and share (null on a CPU), or `static`.

A `.jsonl` has the result so far in each of its lines, so that nothing is lost when a run is stopped: the last
line of each name counts.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import lines, machine
from .cases import CASES

SCHEMA = 1
RESULTS = Path(__file__).parent / "results"
TOP = "schema case name size static date command commit changed device versions clocks settings goal rows"


class Session:
    """One run of a module of benchmarks, and what all its results have in common."""

    def __init__(self, module: str, given: Sequence[str]):
        self.began = time.monotonic()
        self.clocks: dict[str, Any] = {"before": machine.clocks(), "after": None}
        self.common = {"schema": SCHEMA, "date": machine.now(), **machine.commit()}
        self.common |= {"command": shlex.join(["python", "-m", module, *given])}
        self.common |= {"versions": machine.versions(), "clocks": self.clocks}

    def seconds(self) -> float:
        return round(time.monotonic() - self.began, 1)


def check(result: Mapping[str, Any]) -> None:
    """ValueError if `result` does not have the format that this version writes."""
    missing = [key for key in TOP.split() if key not in result]
    if missing or result["schema"] != SCHEMA:
        raise ValueError(f"not a result of schema {SCHEMA}: {', '.join(missing) or 'schema differs'}")


def add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Add the ratios to every row; a ratio is None if the arm to compare with is missing.

    `compiled_bf16` is the speed over the fastest compiled bf16 arm, of those with the same optimizer if there
    are any, `eager_bf16` the speed over eager. `busy` is the device's busy time in compiled bf16 (in eager,
    if there is no compiled arm) over that of the row. `memory` is the peak memory over that of compiled bf16.
    An estimate also has `ceiling`, the speed over compiled bf16 if its generated kernels moved each operand
    once.
    """
    here = [row for row in rows if not row["error"]]
    bf16 = [row for row in here if row["kind"] == "bf16"]
    eager = next((row for row in here if row["kind"] == "eager"), None)
    for row in here:
        alike = [other for other in bf16 if other.get("packed") == row.get("packed")]
        compiled = max(alike or bf16, key=speed, default=None)
        row["ratio"] = {
            "compiled_bf16": speed(row) / speed(compiled) if compiled else None,
            "eager_bf16": speed(row) / speed(eager) if eager else None,
            "busy": over((compiled or eager or {}).get("busy_ms"), row.get("busy_ms")),
            "memory": over(_allocated(row), _allocated(compiled)),
            "over": compiled["arm"] if compiled else None,
        }
        if compiled and "static" in row:
            once = row["static"].get("operands_once_ms")
            row["ratio"]["ceiling"] = over(compiled["static"]["roofline_ms"], once)


def speed(row: Mapping[str, Any]) -> float:
    """A number that is larger for faster rows; comparable within a result."""
    return 1.0 / row["static"]["roofline_ms"] if "static" in row else row["tokens_per_s"]["median"]


def _allocated(row: Mapping[str, Any] | None) -> float | None:
    if row is not None and "static" in row:
        # an estimate compares the memory that the forward keeps for the backward
        return row["static"]["kept_mb"]
    return row["memory"]["allocated"] if row is not None and row.get("memory") else None


def over(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def write(result: Mapping[str, Any], path: Path) -> None:
    """As `store`. ValueError if it has another format."""
    check(result)
    store(result, path)


def store(result: Mapping[str, Any], path: Path) -> None:
    """Write a file of its own, or add a line to a `.jsonl`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        lines.add(path, result)
    else:
        path.write_text(json.dumps(result, indent=1) + "\n")


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """All results in files and folders, oldest first. ValueError, which names a file that is no result."""
    found: list[dict[str, Any]] = []
    for path in paths:
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            try:
                inside = lines.read(file) if file.suffix == ".jsonl" else [json.loads(file.read_text())]
                for result in inside:
                    check(result)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{file}: {error}") from None
            found += {result["name"]: result for result in inside}.values()
    return sorted(found, key=lambda result: result["date"])


def latest(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last result of each case, size and device, by case."""
    newest = {(r["device"]["name"], r["static"], r["size"], r["name"]): r for r in results}
    order = {name: number for number, name in enumerate(CASES)}
    return sorted(newest.values(), key=lambda r: (order.get(r["case"], len(order)), r["name"]))
