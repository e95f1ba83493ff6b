"""The files by which a project is judged: they can be read, agree with each other, and pin what they run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import fp8compile
import mkdocs_hooks
from tests.project.test_docs import ROOT

yaml = pytest.importorskip("yaml")
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_their_actions_and_ask_for_little(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"} and workflow["jobs"]
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] and job["runs-on"], name
        for step in job["steps"]:
            action = step.get("uses")
            assert action is None or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), f"{name}: {action}"
            if action and action.startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name
    for line in path.read_text().splitlines():
        assert not re.search(r"uses: .*@[0-9a-f]{40}$", line), f"the version is missing: {line}"


def test_the_targets_that_workflows_make_exist() -> None:
    made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    called = {target for path in WORKFLOWS for target in re.findall(r"make ([a-z]+)", path.read_text())}
    assert "dist" in called and called <= made


def test_versions_and_licenses_agree() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    project = dict(re.findall(r'^(version|license|description) = "(.*)"$', text, re.M))
    citation = read(ROOT / "CITATION.cff")
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert citation["abstract"].rstrip(".") == project["description"]
    assert citation["version"] == fp8compile.__version__
    assert f"## [{fp8compile.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_llms_txt_has_every_page_of_the_navigation() -> None:
    """`make docs` writes it."""
    text = (ROOT / "mkdocs.yml").read_text()
    nav = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    made = mkdocs_hooks.llms(ROOT, "fp8compile", "A backend", nav)
    pages = re.findall(r"\S+\.md", text[text.index("\nnav:") :])
    listed = re.findall(r"^- \[.+\]\((\S+)\.html\)", made, re.M)
    assert listed == [page.removesuffix(".md") for page in pages]
    first = "- [fp8compile](index.html): fp8compile is "
    assert made.startswith(f"# fp8compile\n\n> A backend\n\n## Start\n\n{first}")
    without = [line for line in made.splitlines() if line.startswith("- ") and "): " not in line]
    assert len(without) < 5, without  # pages of the reference that begin with a name
