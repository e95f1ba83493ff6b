"""The recipes. Unknown arguments are errors."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclass
class DelayedScaling:
    margin: int = 0
    # TransformerEngine's default is HYBRID: so a benchmark that does not ask for it shows
    fp8_format: Format = Format.E4M3
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"


@dataclass
class Float8CurrentScaling:
    fp8_format: Format = Format.E4M3
