"""The code of docs/export.md runs, and prints what its comments say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("interpreted")

PAGE = Path(__file__).parents[2] / "docs" / "export.md"


def test_the_code_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(PAGE), "exec"), {})
    said = re.findall(r"^print\(.*\)\s+# (.*)$", code, re.M)
    assert len(said) == 2 and capsys.readouterr().out.splitlines() == said
