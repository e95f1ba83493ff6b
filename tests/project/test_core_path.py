"""The core path that docs/architecture.md lists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.compiled
def test_the_page_lists_the_core_path() -> None:
    """In a process of its own: what earlier tests have traced is not traced again."""
    command = [sys.executable, "-m", "tests.project.core_path", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
