"""The tests of benchmarks run as those of the package: each compiles from nothing, with the same seeds."""

from tests.conftest import fresh, interpreted, pytest_collection_modifyitems  # noqa: F401  # fixtures and a hook of pytest

pytest_plugins = ["tests.support.budget", "tests.support.tiers"]
