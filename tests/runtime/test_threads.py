"""Several threads compile and train, with a model each or with one model, as with any other backend."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fp8compile
from tests.support.harness import scaling_tensors
from tests.support.models import Mlp


def cosines(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return min(
        torch.cosine_similarity(p.flatten(), q.flatten(), 0).item()
        for p, q in zip(got, expected, strict=True)
    )


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Runs `work(0)`, `work(1)` ... each in a thread; raises the first error of a thread."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_models_of_their_own(interpreted) -> None:
    """One thread compiles while another one runs compiled code."""
    for _ in range(2):
        torch._dynamo.reset()
        start = threading.Barrier(3)

        def work(i: int, start: threading.Barrier = start) -> None:
            expected = Mlp()
            model = copy.deepcopy(expected)
            run = torch.compile(model, backend="fp8")
            start.wait(60)
            for _ in range(4):
                x = torch.randn(16, 128)
                got = torch.autograd.grad(run(x).square().mean(), list(model.parameters()))
                wanted = torch.autograd.grad(expected(x).square().mean(), list(expected.parameters()))
                assert cosines(got, wanted) > 0.97
            assert fp8compile.report(model).fp8_flop_fraction == 1.0

        in_threads(3, work)


@pytest.mark.feature("delayed")
def test_a_thread_that_is_not_the_main_one(interpreted) -> None:
    """Names, state and reports also work in a thread other than the main one."""

    def work(_: int) -> None:
        model = Mlp()
        torch.compile(model, backend="fp8")(torch.randn(16, 128)).square().mean().backward()
        assert {r.fqn for r in fp8compile.report(model).matmuls} == {"up", "down"}
        assert len(scaling_tensors(model)) > 5

    in_threads(1, work)
