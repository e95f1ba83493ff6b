"""Fixtures of all tests: Dynamo starts afresh, random numbers are fixed, and a fall back to eager is an
error."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed

import fp8compile
from tests.support import hooks

pytest_plugins = ["tests.support.budget", "tests.support.tiers"]

# a compilation makes millions of objects: with Python's 700, a tenth of the time goes there
gc.set_threshold(20_000, 20, 20)


def pytest_configure() -> None:
    """The name "fp8" is the installed package's. On a machine with a checkout alone, the tests give it."""
    if not entry_points(group="torch_dynamo_backends", name="fp8"):
        import torch._dynamo

        torch._dynamo.register_backend(fp8compile.fp8, name="fp8")  # type: ignore[arg-type]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped without a CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


_compiled_for: list[str] = []  # the file whose tests share the code that Dynamo has


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test compiles from nothing, with the same seeds.

    Past its recompile limit, Dynamo runs a function in eager mode and at best logs it: the test then compares
    the model with itself. Whether a test reaches the limit depends on the tests before it in the process. So
    nothing is kept between tests, and reaching the limit is an error. Tests of a file that is marked
    `shares_graphs` keep what the file's earlier tests have compiled: another instance of a class, with the
    same options and shapes, runs the same graph with a state of its own.

    AOTAutograd's cache is off: tests put other passes instead of ours, which is no part of a cache key.
    `FP8COMPILE_TEST_CACHE=1` leaves it on. The full garbage collection that Dynamo runs after each
    compilation is off, too.

    pytest gives its handlers to all loggers that do not propagate. At torch's structured trace, they would
    make torch write down every graph and guard, which takes about a twentieth of the time.
    """
    trace = logging.getLogger("torch.__trace")
    trace.propagate = True
    trace.handlers.clear()
    shares = request.node.get_closest_marker("shares_graphs") is not None
    file = request.node.nodeid.partition("::")[0]
    if shares and _compiled_for == [file]:
        hooks.forget_trainings()
    else:
        hooks.forget()
    _compiled_for[:] = [file] if shares else []
    with hooks.strictly(shares):
        yield
    if not shares:
        torch._dynamo.reset()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of features that are not there, and the cases of others that name the recipe of one."""
    names = [name for marker in item.iter_markers("feature") for name in marker.args]
    names += ["delayed"] if "delayed" in item.name.partition("[")[2] else []
    if missing := [name for name in names if find_spec(f"fp8compile.features.{name}") is None]:
        pytest.skip(f"without {', '.join(missing)}")


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Graphs are rewritten as usual, and run on our reference operators: Inductor's C++ costs 10 s a graph,
    lowering a third.

    A whole module can ask for this fixture: its tests that are marked `compiled` are compiled all the same,
    those marked `lowered` run the graph that our passes have lowered.
    """
    if request.node.get_closest_marker("compiled"):
        yield
        return
    with hooks.lowered() if request.node.get_closest_marker("lowered") else hooks.interpreted():
        yield


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[str]:
    """A default process group of this process alone; its name."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]
    torch.distributed.destroy_process_group()
