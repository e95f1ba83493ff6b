"""Versions of torch that are too old or unknown."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from fp8compile.compat.versions import NEWEST, OLDEST, check


@pytest.mark.parametrize(
    "version", ["2.11.0", "2.13.0+cpu", "2.15.1+cu130", "2.15.0a0+git1234", torch.__version__]
)
def test_known_versions(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(version)


def test_others_say_what_to_install() -> None:
    """One that is too old is an error, a newer one a warning."""
    old = r"needs torch 2\.11 or later, and this is 2\.10\.1\+cu117: pip install"
    with pytest.raises(ImportError, match=old):
        check("2.10.1+cu117")
    new = r"tested with torch 2\.11 to 2\.15, and this is 2\.16\.0\.dev.* pip install"
    with pytest.warns(RuntimeWarning, match=new):
        check("2.16.0.dev20270101")


def test_the_requirement_says_the_same() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    bounds = f'"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"'
    assert bounds in text
