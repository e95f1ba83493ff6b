"""The TOML parser for descriptions of GPUs and for policies: `tomllib` from Python 3.11 on, else tomli. And the check of the
keys of a description's tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..errors import did_you_mean, near

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib  # type: ignore[import-not-found,no-redef]

__all__ = ["checked_keys", "tomllib"]


def checked_keys(where: str, table: Mapping[str, Any], names: Collection[str], needed: Collection[str]) -> dict[str, Any]:
    """The table as a dict. ValueError if it has a key that is not in `names`, or lacks one of `needed`."""
    unknown = sorted(set(table) - set(names))
    if unknown:
        raise ValueError(f"{where} has no key {unknown[0]!r}.{did_you_mean(near(unknown[0], names))}")
    missing = sorted(set(needed) - set(table))
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    return dict(table)
