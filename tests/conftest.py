"""Fixtures of all tests: Dynamo starts afresh, random numbers are fixed, and a fall back to eager is an error."""

from __future__ import annotations

import gc
import logging
import os
import random
from collections.abc import Iterator

import pytest
import torch

from fp8compile import logs
from fp8compile.runtime import phases, probe
from fp8compile.runtime.ledger import LEDGER

gc.set_threshold(20_000, 20, 20)  # a compilation makes millions of objects: with Python's 700, a tenth of the time goes there


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

    Past its recompile limit, Dynamo runs a function in eager mode and at best logs it: the test then compares the model with
    itself. Whether a test reaches the limit depends on the tests before it in the process. So nothing is kept between tests,
    and reaching the limit is an error.

    AOTAutograd's cache is off: tests put other passes in the place of ours, which is no part of a cache key.
    `FP8COMPILE_TEST_CACHE=1` leaves it on.

    pytest gives its handlers to all loggers that do not propagate. At torch's structured trace, they would make torch write
    down every graph and guard, which takes about a twentieth of the time.
    """
    trace = logging.getLogger("torch.__trace")
    trace.propagate = True
    trace.handlers.clear()
    torch._dynamo.reset()
    LEDGER.clear()
    probe.ACTIVE.clear()  # measurements that were asked for, and whose models no collection has freed yet
    phases._state.steps.clear()  # optimizers that no collection has freed yet: a model that had none follows the others
    logs.forget()  # messages that are logged once a process
    random.seed(0)
    torch.manual_seed(0)
    with (
        torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, suppress_errors=False),
        torch._functorch.config.patch(enable_autograd_cache=bool(os.environ.get("FP8COMPILE_TEST_CACHE"))),
    ):
        yield
    torch._dynamo.reset()


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Graphs are rewritten and lowered as usual, but interpreted instead of compiled: Inductor's C++ costs 10 s a graph.

    A whole module can ask for this fixture: its tests that are marked `compiled` are compiled all the same.
    """
    if request.node.get_closest_marker("compiled"):
        yield
        return
    from tests.support import harness  # not at the top: the tests of options and reports need no Inductor

    with harness.interpreted():
        yield
