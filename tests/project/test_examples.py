"""The examples that are read rather than run."""

from __future__ import annotations

import re

import pytest
import three_gemms


@pytest.mark.usefixtures("interpreted")
def test_three_gemms_are_those_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    three_gemms.main()
    found = re.findall(
        r"^(\w+): ([\d.]+)% from float32, (\S+) from fp8compile$", capsys.readouterr().out, re.M
    )
    assert [name for name, _, _ in found] == ["y", "dx", "dw"]
    assert all(2 < float(error) < 8 and float(apart) < 1e-6 for _, error, apart in found)
