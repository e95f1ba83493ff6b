"""What holds for every test: Dynamo starts afresh, random numbers are fixed, and nothing falls back to eager unseen."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fp8compile import logs
from fp8compile.runtime.ledger import LEDGER


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped without a CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test compiles from nothing, with the same seeds.

    Past its recompile limit Dynamo runs a function in eager mode and says so in a log at best: what is compared then is the
    model with itself. Which test gets there depends on the tests before it in the process, so nothing is kept between them,
    and getting there is an error.
    """
    torch._dynamo.reset()
    LEDGER.clear()
    logs.forget()  # what is said once a process
    random.seed(0)
    torch.manual_seed(0)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, suppress_errors=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Graphs are rewritten and lowered as ever, then interpreted: Inductor's C++ costs 10 s a graph.

    A test that is marked `compiled` compiles all the same, so a whole module can ask for this fixture.
    """
    if request.node.get_closest_marker("compiled"):
        yield
        return
    from tests.support import harness  # not at the top: the tests of options and reports need no Inductor

    with harness.interpreted():
        yield
