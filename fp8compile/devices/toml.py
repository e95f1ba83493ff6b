"""The TOML parser, for descriptions of GPUs and for policies: Python's own from 3.11 on, tomli before."""

from __future__ import annotations

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib  # type: ignore[import-not-found,no-redef]

__all__ = ["tomllib"]
