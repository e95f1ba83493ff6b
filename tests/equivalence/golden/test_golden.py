"""What is computed, decided and generated is what the files of `expected/` say, bitwise."""

from __future__ import annotations

import pytest

from fp8compile.dryrun import fake_gpu
from tests.equivalence.golden.cases import KINDS, RANKS, STEPS, TRAININGS
from tests.equivalence.golden.text import EXPECTED, differences, read

NO_GPU = pytest.mark.skipif(fake_gpu.unavailable() is not None, reason=fake_gpu.unavailable() or "")
CASES = [
    *(("trainings", name) for name in TRAININGS),
    *(pytest.param("kernels", name, marks=NO_GPU) for name in STEPS),
    *(pytest.param("ranks", name, marks=pytest.mark.slow) for name in RANKS),
]


@pytest.mark.cases(test=10, slow=24)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_it_is_what_it_was(kind: str, name: str) -> None:
    found = differences(KINDS[kind][0](name), EXPECTED)
    assert not found, "\n".join([*found, "(if that is meant: `python -m tests.equivalence.golden write`)"])


def test_no_section_is_left_of_a_case_that_is_gone() -> None:
    for file, names in {
        "trainings": TRAININGS,
        "graphs": TRAININGS,
        "kernels": STEPS,
        "ranks": RANKS,
    }.items():
        assert {title.partition(":")[0] for title in read(EXPECTED / f"{file}.txt")} <= set(names), file
