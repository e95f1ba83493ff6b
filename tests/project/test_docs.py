"""The pages agree with the code: link targets exist, options have rows, public names a reference, named tests
and files exist.

test_blocks.py runs the code of the pages.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import click
import pytest

import fp8compile
from fp8compile import cli, errors
from fp8compile.config.options import OURS, parse
from fp8compile.config.recipe import RECIPES
from tests.project import command_options, settings_page

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NOTES = [*sorted((ROOT / "notes").glob("*.md")), ROOT / "benchmarks/README.md"]  # no pages of the site


def anchors(page: Path) -> set[str]:
    """The link anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    documented = re.findall(r"^::: (.+)$", page.read_text(), re.M)  # mkdocstrings makes a heading of each
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)) for heading in headings]
    return {heading.strip().lower().replace(" ", "-") for heading in plain} | set(documented)


@pytest.mark.parametrize("page", PAGES + NOTES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name}: {target}"


def test_the_pages_are_short_together() -> None:
    """Those that people write: a setting or a GPU more is a line more of a page that a program writes."""
    pages = {*(ROOT / "docs").rglob("*.md")} - {settings_page.PAGE, ROOT / "docs/support.md"}
    lines = sum(len(page.read_text().splitlines()) for page in pages)
    # 3560, 40 for a server's casts, whose sources have no other place, 20 for adapters beside an export, 160
    # for reinforcement learning with a server, 50 for what is held in FP8: experts, shards, an 8B model; 30
    # for rules in time, and 70 for a guard
    assert lines <= 3930, f"docs/ has {lines} lines: shorten a page, or raise the limit and say why"


def test_every_feature_is_in_the_floor_plan() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"\w+", text[text.index("\nfeatures ") : text.index("\ncompilation.py")])
    names = {path.parent.name for path in (ROOT / "fp8compile" / "features").glob("*/__init__.py")}
    assert not names - set(listed), f"docs/architecture.md: {names - set(listed)}"


LINES = {"CHANGELOG.md": 1000, "README.md": 120}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_short(page: Path) -> None:
    """Lines may be long in tables, and where a program prints them: neither can be broken."""
    assert len(page.read_text().splitlines()) <= LINES.get(page.relative_to(ROOT).as_posix(), 250)
    text = re.sub(r"^```text.*?^```", "", page.read_text(), flags=re.M | re.S)
    long = [line for line in text.splitlines() if len(line) >= 130 and not line.startswith("|")]
    assert not long, long[0]


def test_precision_is_that_of_the_study() -> None:
    """`python -m benchmarks.sqnr --update notes/accuracy.md` writes the tables that are read here."""
    study = (ROOT / "notes/accuracy.md").read_text()
    tables = re.search(r"<!-- table: sqnr -->(.*?)<!-- end -->", study, re.S)[1].split("\n\n")
    normal, _, tokens = ({name: cells for name, *cells in rows(table)} for table in tables)
    text = (ROOT / "docs/accuracy.md").read_text()
    shown = rows(text[text.index("| | linear y") :].split("\n\n")[0])[2:]
    wanted = [name for name in normal if name in (*RECIPES, "tensorwise, e4m3")]
    assert [name for name, *_ in shown] == wanted
    assert shown == [[name, *normal[name][:4], tokens[name][2]] for name, *_ in shown]


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]


def test_every_option_is_in_one_table_and_every_row_is_an_option() -> None:
    pages = [(ROOT / "docs" / page).read_text() for page in ("options.md", "reference/settings.md")]
    named = [name for page in pages for name in re.findall(r"^\| `(\w+)` \|", page, re.M)]
    assert sorted(named) == sorted(OURS)


@pytest.mark.parametrize("page, recipes", [("from-torchao.md", 0), ("from-transformer-engine.md", 6)])
def test_other_libraries_names_end_in_an_error_with_the_name_here(page: str, recipes: int) -> None:
    """As options or recipes: the names and keywords of the tables whose second column is of fp8compile."""
    text = (ROOT / "docs/how-to" / page).read_text()
    tables = re.findall(r"^\| \w+ \| fp8compile \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    code = [span for table in tables for row in rows(table) for span in re.findall(r"`([^`]+)`", row[0])]
    found = (re.findall(r"^(_?[a-z]\w*)$|\b([a-z]\w*)=", span) for span in code)
    theirs = sorted({name for pairs in found for pair in pairs for name in pair} - {"", *OURS})
    assert len(theirs) >= 12
    for name in theirs:
        with pytest.raises(errors.OptionError, match=r"unknown fp8 option '\w+' .*\. Here it is "):
            parse({name: True})
    classes = [span for span in code if re.fullmatch(r"\w+(Scaling|Recipe)", span)]
    assert len(classes) == recipes
    for name in classes:
        with pytest.raises(errors.OptionError, match=r"'recipe' must be (?!one of)"):
            parse({"recipe": name})


def test_the_line_that_renames_a_checkpoint_leaves_names_that_are_right() -> None:
    """The page's script has the keys of one module; a whole model has others."""
    text = (ROOT / "docs/how-to/from-transformer-engine.md").read_text()
    line = re.search(r"^vanilla = .*$", text, re.M)[0]
    right = {"lm_head.weight": 1, "0.q_proj.weight": 2}
    theirs = {**right, "0.fc1_weight": 3, "0.layer_norm_bias": 4, "0._extra_state": 5}
    scope = {"theirs": theirs, "re": re}
    exec(line, scope)
    assert scope["vanilla"] == {**right, "0.fc1.weight": 3, "0.layer_norm.bias": 4}


def test_the_settings_have_their_page() -> None:
    assert settings_page.PAGE.read_text() == settings_page.page(), "python -m tests.project.settings_page"


def test_the_options_of_commands_have_their_table() -> None:
    text = command_options.PAGE.read_text()
    assert text == command_options.page(), "python -m tests.project.command_options"


def public_names() -> set[str]:
    """The names that docs/reference/index.md calls public. Other libraries' modules are only read."""
    names = set(fp8compile._PUBLIC)  # also of results, which `import *` does not bring
    for module in ("distributed", "optim"):
        names |= {f"{module}.{name}" for name in importlib.import_module(f"fp8compile.{module}").__all__}
    for path in (ROOT / "fp8compile" / "integrations").glob("[!_]*.py"):
        if path.stem in ("requirement", "training"):  # of the modules that users import
            continue
        nodes = ast.parse(path.read_text()).body
        defined = [node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
        names |= {f"integrations.{path.stem}.{name}" for name in defined if not name.startswith("_")}
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            names |= set() if str(value.__doc__).startswith("Internal") else {f"errors.{name}"}
    return {f"fp8compile.{name}" for name in names}


def test_every_public_name_is_in_the_reference_once() -> None:
    pages = [page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md")]
    documented = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.M)]
    assert len(documented) == len(set(documented))
    # errors are public in fp8compile, too, and described once
    elsewhere = {f"fp8compile.{name}" for name in dir(errors)}
    missing = {name for name in public_names() - set(documented) if name not in elsewhere}
    assert not missing, missing


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert listed - {"contributing.md", "changelog.md"} == pages


def test_the_tests_that_guard_the_invariants_exist() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "tests" / "invariants.md").read_text())
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in files.get(file, "")]
    assert len(named) > 30 and not missing, missing


def test_the_files_that_the_pages_name_exist() -> None:
    """Checks names such as `passes/quantize.py` in the pages for people who change the code."""
    rooms = "cli|dryrun|features|optim|reporting|runtime|passes|codegen|ir|config|devices|compat"
    for page in (ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"):
        named = set(re.findall(rf"(?<!tests/)\b((?:{rooms})/[\w/]+\.py)\b", page.read_text()))
        missing = [name for name in named if "NAME" not in name and not (ROOT / "fp8compile" / name).exists()]
        assert named and not missing, f"{page.name}: {missing}"


def code(page: Path) -> str:
    """The blocks of a page, and what it has in backticks, without outputs. A command that a backslash
    continues is one line."""
    text = re.sub(r"^ *```text.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
    fenced = re.findall(r"^ *```[^\n]*\n(.*?)^ *```$", text, re.M | re.S)
    named = re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S))
    return re.sub(r"\\\n *", "", "\n".join([*fenced, *(" ".join(name.split()) for name in named)]))


NOW = [*(page for page in PAGES if page.name != "CHANGELOG.md"), ROOT / "benchmarks/README.md"]


@pytest.mark.parametrize("page", NOW, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_that_a_page_names_exist(page: Path) -> None:
    """Also those that no test runs: their options, the modules that Python runs, and the targets of make."""
    text = code(page)
    for line in re.findall(r"^(?:fp8compile|python -m fp8compile) (.+)$", text, re.M):
        words, command = shlex.split(line, comments=True), cli.cli
        while isinstance(command, click.Group) and words and not words[0].startswith(("-", "...")):
            assert words[0] in command.commands, f"{page.name}: {line}"
            command = command.commands[words.pop(0)]
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        given = {word.split("=")[0] for word in words if word.startswith("-")}
        assert given <= {*known, "--help", "--version"}, f"{page.name}: {line}"
    for module in re.findall(r"python -m ((?:fp8compile|benchmarks|tests)[\w.]*)", text):
        file = ROOT / module.rstrip(".").replace(".", "/")
        assert file.with_suffix(".py").exists() or (file / "__main__.py").exists(), f"{page.name}: {module}"
    made = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"^make ([a-z]+)", text, re.M)) <= set(made), page.name


def reasons() -> set[str]:
    """How the reasons for high precision begin that passes give, up to what depends on the matmul."""
    found = set()
    for name in ("legality", "resolve", "attribute"):
        tree = ast.parse((ROOT / "fp8compile" / "passes" / f"{name}.py").read_text())
        given = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
        given += [node.value for node in tree.body if isinstance(node, ast.Assign)]
        for text in given:
            for part in (text.body, text.orelse) if isinstance(text, ast.IfExp) else (text,):
                first = part.values[0] if isinstance(part, ast.JoinedStr) else part
                if isinstance(first, ast.Constant) and isinstance(first.value, str) and len(first.value) > 1:
                    found.add(re.split(r"[:(]", first.value)[0].strip())
    return found


def test_every_reason_has_a_row() -> None:
    page = (ROOT / "docs" / "report.md").read_text()
    rows = re.findall(r"`([^`]+)`", page[page.index("| reason |") :])
    found = reasons()
    missing = [x for x in found if not any(row.startswith(x) or x.startswith(row) for row in rows)]
    assert len(found) > 10 and not missing, f"docs/report.md: {missing}"
