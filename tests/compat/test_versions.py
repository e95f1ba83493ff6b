"""Versions of torch that are too old or unknown."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

from fp8compile.compat.versions import NEWEST, OLDEST, check


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.1+cu130", "2.15.0a0+git1234", torch.__version__])
def test_known_versions(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(version)


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cu117"])
def test_one_that_is_too_old_says_what_to_install(version: str) -> None:
    with pytest.raises(ImportError, match=rf"needs torch 2\.11 or later, and this is {re.escape(version)}: pip install"):
        check(version)


def test_a_newer_one_is_a_warning() -> None:
    with pytest.warns(RuntimeWarning, match=r"tested with torch 2\.11 to 2\.15, and this is 2\.16\.0\.dev.* pip install"):
        check("2.16.0.dev20270101")


def test_the_requirement_says_the_same() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    bounds = f'"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"'
    assert bounds in text
