"""The TOML parser for descriptions of GPUs and for policies: `tomllib` from Python 3.11 on, else tomli."""

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib  # type: ignore[import-not-found,no-redef]

__all__ = ["tomllib"]
