"""Contraction of products and sums into one instruction is chosen, not inherited: of Triton's kernels that
are ours, none but matmuls are contracted. Read in the code that Inductor writes, and in PTX.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from tests.support.executed import executed, planning
from tests.support.harness import ALL_FP8, noise
from tests.support.machine_code import TARGETS, compile_source
from tests.support.models import Mlp
from tests.support.operands import H100, RTX4090
from tests.support.regenerate import EXPECTED

pytestmark = [planning, pytest.mark.compat]


@triton.jit
def of_the_user(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) * 2.0 + 1.0)


class WithAKernel(nn.Module):
    """An MLP, and a Triton kernel that is not ours."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        of_the_user[(x.numel() // 128,)](x, y, BLOCK=128)
        return self.mlp(x) + y


KINDS = [("delayed", H100, Mlp), ("blockwise", RTX4090, Mlp), ("tensorwise", H100, WithAKernel)]


@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize(("recipe", "gpu", "build"), KINDS, ids=[recipe for recipe, *_ in KINDS])
def test_inductor_is_told_for_each_kernel(recipe: str, gpu: Any, build: Any) -> None:
    with executed(gpu=gpu) as plan:
        run = torch.compile(build(), backend="fp8", options={"recipe": recipe, "policy": ALL_FP8})
        run(noise(64, 128)).sum().backward()
    told: dict[str, set[Any]] = {}
    for kernel in plan.kernels:
        kind = "inductor" if not kernel.ours else re.sub(r"(_[0-9a-f]{8})?_\d+$", "", kernel.name)
        told.setdefault(kind, set()).add(kernel.told["triton_meta"].get("enable_fp_fusion", "not said"))
    assert told.pop("inductor", {True}) == {True}  # its own choice
    assert build is Mlp or told.pop("of_the_user") == {"not said"}
    assert recipe != "blockwise" or told.pop("fp8_gemm") == {True}
    assert told and all(choice == {False} for choice in told.values()), told
    assert recipe != "delayed" or "fp8_column_sums" in told


BY_DEFAULT = {"enable_fp_fusion": True}


def operations(ptx: str) -> Counter[str]:
    return Counter(re.findall(r"\b(fma|mul|add|sub)(?:\.rn|\.ftz)*\.f32\b", ptx))


# kernels, and whether a compiler finds something else to contract in them
@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize(
    ("name", "more"), [("layer_norm_backward", True), ("gelu", False), ("weight_both_layouts", False)]
)
def test_it_acts(name: str, more: bool) -> None:
    """An element has the contractions of the source, and no other; Triton's default (to 3.9) has more."""
    source = (EXPECTED / f"{name}.py").read_text()
    ptx, contracted = (
        compile_source(source, (32, 128, 4), TARGETS["sm_90"], **x).asm["ptx"] for x in ({}, BY_DEFAULT)
    )
    elements, casts = 32 * 128 // 128, source.count(".to(tl.float8")
    asked = (len(re.findall(r"\btl\.fma\(", source)) - casts) * elements
    asked += 2 * ptx.count("cvt.rn.satfinite")  # one a cast; Triton 3.6 casts once for each layout
    assert casts and operations(ptx)["fma"] == asked >= casts * elements
    assert (operations(contracted)["fma"] > operations(ptx)["fma"]) is more
    assert (operations(contracted)["mul"] < operations(ptx)["mul"]) is more
