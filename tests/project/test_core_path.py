"""The core path that docs/architecture.md lists."""

from __future__ import annotations

import pytest

from tests.project.core_path import MOST, PAGE, core_path, written


@pytest.mark.slow
@pytest.mark.compiled
def test_the_page_lists_the_core_path() -> None:
    path = core_path()
    page = PAGE.read_text()
    assert written(page, path) == page, "python -m tests.project.core_path"
    assert sum(sum(files.values()) for files in path.values()) <= MOST
