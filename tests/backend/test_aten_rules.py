"""Each FP8 matmul that Inductor calls in its plan for a GPU is one that ATen takes there (`tests/support/aten.py`).

The plans of steps are executed on a CPU, without their kernels: shapes, strides, dtypes and addresses are those of the plan,
values are not. Behind them: each rule is broken once, and the call is refused.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.devices.gpu import Gpu
from fp8compile.dryrun.fake_gpu import unavailable
from tests.support import hooks
from tests.support.aten import GAPS, RULES, Grouped, Library, Product, Refused, scaling
from tests.support.executed import Launched, Plan, executed
from tests.support.harness import ALL_FP8, noise
from tests.support.models import Experts, Mlp, make
from tests.support.operands import B200, E4M3, H100, MI300X, RTX4090, RTX5090, ends
from tests.support.reference_settings import RECIPES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E5M2, FNUZ, E8M0 = torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu
GPUS = {"sm_89": RTX4090, "sm_90": H100, "sm_100": B200, "sm_120": RTX5090, "gfx942": MI300X}

compiles = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")


@contextlib.contextmanager
def planned(gpu: Gpu, gaps: bool = False, kernels: bool = False) -> Iterator[Plan]:
    """Inside, steps are compiled for this GPU. `kernels`: they run, too."""
    with contextlib.ExitStack() as stack:
        if gpu is MI300X:
            stack.enter_context(hooks.fnuz())
        if not kernels:
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(Launched, "run", lambda self, *_, **__: None)
        yield stack.enter_context(executed(gpu=gpu, gaps=gaps))


def trained(model: nn.Module, recipe: str, rows: int, plan: Plan, dtype: torch.dtype) -> int:
    """FP8 matmuls by ATen in a warm step; a first one may be cold."""
    call = torch.compile(model, backend="fp8", options={"recipe": recipe, "policy": ALL_FP8})
    width = next(model.parameters()).shape[-1]
    for _ in range(2 if recipe == "delayed" else 1):
        call(noise(rows, width, dtype=dtype).requires_grad_()).sum().backward()
    assert [record.decision for record in fp8compile.report(model).matmuls].count("fp8") >= 4
    return plan.scaled


def expected(gpu: Gpu, recipe: str, whole: bool) -> int:
    """FP8 matmuls by ATen in a step of two layers. Others are ours, or in bf16."""
    if recipe == "mxfp8":
        return 6 if gpu in (B200, RTX5090) else 0
    if recipe == "blockwise":  # a weight's gradient has two operands of 1 x 128 blocks, whose K is the number of tokens
        return 4 if gpu is H100 and whole else 0
    return 4 if recipe == "rowwise_with_gw_hp" else 6


@compiles
@pytest.mark.compat
@pytest.mark.cases(test=3, slow=12)
@pytest.mark.parametrize(
    ("recipe", "dtype", "gpu", "rows", "width"),
    [
        pytest.param(recipe, dtype, gpu, rows, width, id=f"{recipe}-{str(dtype)[6:]}-{gpu}-{rows}x{width}")
        for recipe, dtype, gpu in itertools.product(RECIPES, (BF16, FP16, FP32), GPUS)
        for rows, width in ((33, 144), (64, 512))
    ],
)
def test_layers(recipe: str, dtype: torch.dtype, gpu: str, rows: int, width: int) -> None:
    """Layers with biases, an odd number of tokens, sizes that fit cuBLASLt's blocks and that do not."""
    with planned(GPUS[gpu]) as plan:
        found = trained(make(lambda: Mlp(width, width), dtype), recipe, rows, plan, dtype)
    assert found == expected(GPUS[gpu], recipe, rows == 64)
