"""Copies of weights that an optimizer's step writes (`in_step`). That whole trainings have the bits of those
without is in tests/optim/test_fp8_weights.py."""

from __future__ import annotations

import math

import pytest
import torch

from fp8compile.features.weight_cache import in_step, triton_recast
from fp8compile.features.weight_cache.in_step import launch_recast, recast
from fp8compile.ir.scale import inverse_of, scale_of
from tests.support import hooks
from tests.support.interpreter import OnCpu
from tests.support.machine_code import SHARED, TARGETS, compile_function, resources

E4M3 = torch.float8_e4m3fn


@pytest.mark.cases(test=5, slow=10)
@pytest.mark.parametrize("layouts", ["rc", "r", "c"])
@pytest.mark.parametrize("amax", [1.5, 448.0, 0.0, math.inf, math.nan, 2.0**-126, 3e38])
def test_the_kernel_casts_as_the_reference(
    layouts: str, amax: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the scale is another one; where it is the same, copies stay as they are."""
    OnCpu(monkeypatch, triton_recast, "fp8_recast")
    weight = torch.randn(80, 256, generator=torch.Generator().manual_seed(0)) * min(amax, 4.0)
    weight[3, 4] = amax
    weight = weight.bfloat16()
    bits = weight.abs().amax().float().view(torch.int32).view(1)
    now = inverse_of(scale_of(bits.view(torch.float32), 448.0, 1, True))
    for used in (now, now * 2, torch.tensor([0.3]), torch.tensor([math.nan])):
        found = []
        for function in (recast, launch_recast):
            rows = torch.full((80, 256), 7.0).to(E4M3) if "r" in layouts else None
            columns = torch.full((256, 96), 7.0).to(E4M3) if "c" in layouts else None
            inverse = torch.zeros(1)
            part = columns[:, 16:] if columns is not None else None
            cast = hooks.cast_in_step(rows, part, used)
            function(weight, cast, bits, 1, inverse)
            assert torch.equal(inverse, now)
            found.append([x.view(torch.uint8) for x in (rows, columns) if x is not None])
            changed = [bool((x.float() != 7).any()) for x in (rows, part) if x is not None]
            normal = now >= torch.finfo(torch.float32).tiny
            assert changed == [not torch.equal(used, now) or not normal] * len(changed) or function is recast
        tiny = torch.equal(used, now) and now < torch.finfo(torch.float32).tiny  # the kernel casts again
        assert tiny or all(map(torch.equal, *found))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles_to_machine_code(target: str) -> None:
    fp8 = "*fp8e4b8" if target == "gfx942" else "*fp8e4nv"
    types = {
        "weight": "*bf16",
        "rows": fp8,
        "columns": fp8,
        "amax": "*i32",
        "inverse": "*fp32",
        "used": "*fp32",
    }
    height, width, warps = in_step.RECAST
    constants = {"HEIGHT": 4096, "WIDTH": 4096, "APART": 4096, "REACH": 448.0, "FP8_MAX": 448.0}
    constants |= {"SATURATES": not target.startswith("gfx"), "BY_PTX": target in ("sm_89", "sm_90")}
    constants |= {"BLOCK_R": height, "BLOCK_C": width}
    made = compile_function(triton_recast.fp8_recast, types, constants, TARGETS[target], num_warps=warps)
    took = resources(made)
    assert not took.spills and took.shared <= SHARED[target], took
