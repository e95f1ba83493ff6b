"""Hosts that are missing or of another version, and wrong keys of Accelerate's recipes: needs no host."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8compile.errors import OptionError
from fp8compile.integrations.recipe_names import recipe_options
from fp8compile.integrations.requirement import host, numbers


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a package "somehost" of a version, with this text."""

    def make(version: str, text: str) -> None:
        (tmp_path / "somehost.py").write_text(text)
        folder = tmp_path / f"somehost-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: somehost\nVersion: {version}\n")
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "somehost", raising=False)
    return make


def wanted() -> Any:
    with host("somehost", "1.13"):
        from somehost import Thing

    return Thing


@pytest.mark.parametrize(
    ("version", "text", "line"),
    [
        (None, "", "needs somehost, which is not installed: "),
        ("1.9.2", "Thing = 1", "needs somehost 1.13 or newer, and finds 1.9.2: "),
        ("3.0", "", "cannot use somehost 3.0 (cannot import name 'Thing' from 'somehost'"),
        ("2.0", "import no_such", "cannot use somehost 2.0 (No module named 'no_such'): "),
    ],
)
def test_a_host_that_does_not_fit_is_one_line(
    installed: Any, version: str | None, text: str, line: str
) -> None:
    if version is not None:
        installed(version, text)
    with pytest.raises(ImportError) as raised:
        wanted()
    said = str(raised.value)
    assert said.startswith(f"fp8compile.integrations.somehost {line}") and "\n" not in said
    assert said.endswith(": pip install 'somehost>=1.13'")


@pytest.mark.parametrize("version", ["1.13", "1.13.0.dev1", "2.0.post1"])
def test_a_host_that_fits(installed: Any, version: str) -> None:
    installed(version, "Thing = 3")
    assert wanted() == 3 and numbers(version) >= (1, 13)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ({"backend": "MSAMP"}, "accelerate's 'backend' is 'MSAMP' .*Leave it out"),
        ({"opt_level": "O2"}, "accelerate's 'opt_level' has no counterpart: .*fp8compile.optim.AdamW"),
        (
            {"enable_fsdp_float8_all_gather": True},
            "has no counterpart: call fp8compile.distributed.fp8_all_gather",
        ),
        ({"pad_inner_dim": True}, "'pad_inner_dim' has no counterpart: .*Leave it out"),
        ({"fp8_format": "E5M2"}, "'fp8_format': 'E5M2' .*Write 'HYBRID'"),
        ({"fp8_format": "E3M4"}, "'fp8_format' must be one of 'hybrid', 'e4m3'"),
        ({"amax_history": 3}, "no key 'amax_history' .*Did you mean 'amax_history_len'"),
        (
            {"amax_history_len": 3, "amax_history_length": 4},
            "'amax_history_length' is given twice, as 3 and as 4",
        ),
        ({"use_autocast_during_eval": "yes"}, "'use_autocast_during_eval' must be True or False"),
        ({"margin": 1.5}, "'margin' must be an integer"),
        (3, "'recipe' must be a dict of accelerate's names"),
    ],
)
def test_a_key_without_a_counterpart_is_named(recipe: Any, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        recipe_options(recipe)
