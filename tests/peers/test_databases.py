"""Whatever the stock path can do, ours can: the samples of PyTorch's databases of operators and modules,
forward and backward.

Without an FP8 matmul, results have the bits of the stock path. With one, they are above a floor in dB (see
`databases.py`). Errors name the operator, the dtype and the number of the sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.peers.databases import (
    DTYPES,
    Case,
    Found,
    cases_of,
    cases_of_module,
    check,
    inductor,
    name_of,
    ours,
)
from tests.support.harness import noise

pytest.importorskip("expecttest")  # torch's databases import it

pytestmark = [pytest.mark.usefixtures("interpreted", "as_eager")]

FLOOR = 20.0  # dB, of one FP8 matmul and its gradients: E4M3 with E5M2 gradients has 24
TOGETHER = 16  # cases of one graph
PARTS = 64  # of the operators
MODULES = 24  # parts of the modules

FAMILY = (
    "addmm", "addmm.decomposed", "baddbmm", "bmm", "einsum", "inner", "linalg.multi_dot", "matmul",
    "__rmatmul__", "mm", "nn.functional.linear", "tensordot",
)  # fmt: skip
IN_FP8 = {"addmm", "addmm.decomposed", "einsum", "linalg.multi_dot", "matmul", "mm", "nn.functional.linear"}


@pytest.fixture
def as_eager() -> Iterator[None]:
    """Random numbers are those of eager, and Dynamo compiles as many variants of a function as needed."""
    many = {"recompile_limit": 1000, "accumulated_recompile_limit": 10_000}
    with torch._inductor.config.patch(fallback_random=True), torch._dynamo.config.patch(many):
        yield


@functools.cache
def operators() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)  # takes 10 s of imports: not while tests are collected


def judge(cases: list[Case], **ways: Callable) -> Found:
    found = Found()
    for start in range(0, len(cases), TOGETHER):
        check(cases[start : start + TOGETHER], FLOOR, found, **ways)
    assert not found.faults, "\n".join(f"{name}: {fault}" for name, fault in sorted(found.faults.items()))
    assert found.cases == len(cases) > 0
    return found


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("part", "number"), [(0, 1), *((part, 4) for part in range(PARTS))])
def test_operators(part: int, number: int) -> None:
    for dtype in DTYPES:
        judge([case for op in operators()[part::PARTS] for case in cases_of(op, dtype, number)])


@pytest.mark.weekly
@pytest.mark.parametrize(("part", "number"), [(0, 1), *((part, 4) for part in range(MODULES))])
def test_modules(part: int, number: int) -> None:
    from torch.testing._internal.common_modules import module_db

    for dtype in DTYPES:
        judge([case for info in module_db[part::MODULES] for case in cases_of_module(info, dtype, number)])


def enlarged(x: Tensor) -> Tensor:
    """Normal noise of 16 times the size in the last two dimensions, as far as they are no 1."""
    shape = [*x.shape[:-2], *(n * 16 if n > 1 else n for n in x.shape[-2:])]
    return noise(*shape, dtype=x.dtype, seed=len(shape)).requires_grad_(x.requires_grad)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "recipe", ["tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"]
)
def test_matmuls(recipe: str, dtype: torch.dtype) -> None:
    """Samples that are large enough for FP8, with everything but the first tensor as parameters."""
    cases = [case for op in operators() if name_of(op) in FAMILY for case in cases_of(op, dtype, 4, enlarged)]
    found = judge(cases, mine=functools.partial(ours, recipe=recipe))
    assert {name.split()[0] for name in found.floors} >= IN_FP8


@pytest.mark.compiled
@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("names", "number"), [(("nn.functional.linear",), 1), (("addmm", "mm"), 1), (FAMILY, 6)]
)
def test_matmuls_by_inductor(names: tuple[str, ...], number: int) -> None:
    chosen = [op for op in operators() if name_of(op) in names]
    cases = [case for op in chosen for case in cases_of(op, torch.bfloat16, number, enlarged)]
    assert judge(cases, theirs=inductor).floors


@pytest.mark.slow
def test_faults_are_seen_and_named() -> None:
    """An error of ours alone, a wrong bit without FP8, a low ratio with it: each with its sample's name."""

    def wrong(model: Any) -> Callable:
        run = ours(model)
        return lambda: [out * 1.5 if isinstance(out, Tensor) else out for out in run()]

    def failing(model: Any) -> Callable:
        raise ZeroDivisionError("ours")

    chosen = [op for op in operators() if name_of(op) in ("sin", "mm")]
    cases = [case for op in chosen for case in cases_of(op, torch.float32, 1, enlarged)]
    assert {case.name for case in cases} == {"mm float32 0", "sin float32 0"}
    for way in (wrong, failing):
        with pytest.raises(AssertionError, match=r"mm float32 0: .*\n *sin float32 0: "):
            judge(cases, mine=way)
    found = judge(cases)
    assert (found.equal, [*found.floors]) == (["sin float32 0"], ["mm float32 0"])
