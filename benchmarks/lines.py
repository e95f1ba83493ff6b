"""Files of JSON lines: what a run has found is there line by line, whatever happens to its process then."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("ab", buffering=0) as file:  # one call of the system: several processes may add
        file.write(json.dumps(record).encode() + b"\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The records, without a last one that was cut off."""
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]
