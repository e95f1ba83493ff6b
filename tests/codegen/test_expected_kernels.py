"""The generated source of representative groups equals the files of `expected/`: a change shows as a diff."""

from __future__ import annotations

import difflib

import pytest

from tests.support.regenerate import COMMAND, EXPECTED, GROUPS, generate


@pytest.mark.parametrize("function", GROUPS, ids=lambda function: function.__name__)
def test_the_generated_source_is_the_expected_one(function):
    path = EXPECTED / f"{function.__name__}.py"
    expected = path.read_text() if path.exists() else ""
    made = generate(function)
    diff = difflib.unified_diff(
        expected.splitlines(keepends=True),
        made.splitlines(keepends=True),
        f"expected/{path.name}",
        "generated",
    )
    assert made == expected, (
        f"the generator writes something else (if that is meant: `{COMMAND}`):\n" + "".join(diff)
    )


def test_expected_files_are_of_groups_that_there_are():
    assert {path.stem for path in EXPECTED.glob("*.py")} == {function.__name__ for function in GROUPS}


@pytest.mark.slow
def test_a_source_does_not_depend_on_the_run():
    """Names of values, kernels and symbols depend only on the group: here groups come in reverse."""
    for function in reversed(GROUPS):
        assert generate(function) == (EXPECTED / f"{function.__name__}.py").read_text()
