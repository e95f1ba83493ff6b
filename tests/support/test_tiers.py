"""Each case of a test is in one tier."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiers import MARKS

FILE = """
import pytest

@pytest.mark.cases(test=2, slow=3)
@pytest.mark.parametrize("n", range(10))
def test_many(n): pass

@pytest.mark.cases(slow=4)
@pytest.mark.parametrize("n", range(3))
def test_few(n): pass

@pytest.mark.cases(test=5)
@pytest.mark.parametrize("n", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_marked(n): pass

def test_plain(): pass

@pytest.mark.weekly
def test_long(): pass
"""
EXPECTED = {
    "test": {"many[0]", "many[5]", "marked[0]", "marked[2]", "plain"},
    "slow": {"many[1]", "many[3]", "many[7]", "few[0]", "few[1]", "few[2]"},
    "weekly": {"many[2]", "many[4]", "many[6]", "many[8]", "many[9]", "marked[1]", "long"},
}


@pytest.mark.parametrize("tier", MARKS)
def test_cases(tier: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p tests.support.tiers -p no:cacheprovider\n")
    command = [sys.executable, *"-m pytest --co -q -c".split(), tmp_path / "pytest.ini"]
    command += ["-m", MARKS[tier], tmp_path]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    root = Path(__file__).parents[2]
    output = subprocess.run(command, capture_output=True, text=True, cwd=root, env=alone).stdout
    assert {line.partition("::test_")[2] for line in output.splitlines() if "::" in line} == EXPECTED[tier]
