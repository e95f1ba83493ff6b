"""Casts on sm_89 and sm_90, where Triton 3.6 converts float32 to FP8 through float16, or its ptxas miscompiles what it writes:
our kernels convert by PTX there, in one step.

No GPU executes the PTX here. So the bytes that a kernel stores are followed through it, and compared with Triton's own
conversion for sm_90.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton

from fp8compile import compat
from fp8compile.codegen.expressions import converted
from fp8compile.devices.gpu import Gpu
from tests.support.executed import Plan, executed, planning
from tests.support.harness import ALL_FP8, Pair, noise
from tests.support.machine_code import TARGETS, compile_function
from tests.support.models import Mlp, make
from tests.support.operands import H100, RTX4090

pytestmark = [planning, pytest.mark.compat]

FORMATS = {"e4m3x2": (torch.float8_e4m3fn, "*fp8e4nv"), "e5m2x2": (torch.float8_e5m2, "*fp8e5")}
OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)


def ptx(name: str, target: str, by_ptx: bool) -> str:
    dtype, pointer = FORMATS[name]
    cast = converted("tl.load(x + i)", dtype, by_ptx)
    source = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef casts(x, y, BLOCK: tl.constexpr):\n"
    source += f"    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    tl.store(y + i, {cast})\n"
    function = compat.triton.load_kernel("casts", source)
    return compile_function(function, {"x": "*fp32", "y": pointer}, {"BLOCK": 1024}, TARGETS[target], num_warps=4).asm["ptx"]


def stored(text: str) -> list[str]:
    """What a thread stores, byte by byte: the numbers that it has loaded, in their order, and how each was converted."""
    made: dict[str, Any] = {}
    loaded: list[str] = []
    found: list[str] = []
    text = re.sub(r"//.*", "", text[text.index("ld.global") :])
    words = r"(ld\.global\S*|st\.global\S*|cvt\.\S+x2\S*|cvt\.u32\.u16|shl\.b32|or\.b32|mov\.b32)\s+([^;]*);"
    for name, operands in re.findall(words, text):
        registers = re.findall(r"%\w+|\b[lhab]\b", re.sub(r"\[.*?\]", "", operands))
        if name.startswith("ld"):
            for register in registers:
                made[register] = [f"value {len(loaded)}"]
                loaded.append(register)
        elif name == "cvt.u32.u16":
            made[registers[0]] = [*made[registers[1]], "", ""]
        elif name == "shl.b32":  # by 16
            made[registers[0]] = ["", "", *made[registers[1]][:2]]
        elif name == "or.b32":
            made[registers[0]] = [x or y for x, y in zip(*(made[register] for register in registers[1:]), strict=True)]
        elif name.startswith("cvt"):  # the first source becomes the upper byte
            (to, high, low), kind = registers, name.removeprefix("cvt.")
            made[to] = [f"{made[low][0]} {kind}", f"{made[high][0]} {kind}"]
        elif name.startswith("mov"):  # the first source becomes the lower half
            to, *parts = registers
            made[to] = [byte for part in parts for byte in made[part]]
        else:
            found += [byte for register in registers for byte in made[register]]
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_are_those_of_a_gpu_that_triton_converts_for(name: str) -> None:
    expected = [f"value {i} rn.satfinite.{name}.f32" for i in range(8)]
    assert stored(ptx(name, "sm_90", False)) == expected == stored(ptx(name, "sm_89", True))
    assert ("cvt.rz.f16.f32" in ptx(name, "sm_89", False)) == OLD == compat.triton.converts_wrongly((8, 9))
    assert "cvt.rz.f16.f32" not in ptx(name, "sm_89", True)
    assert compat.triton.converts_wrongly((9, 0)) == OLD and not compat.triton.converts_wrongly((10, 0))


def plan_for(gpu: Gpu) -> Plan:
    """Two steps of the plan for this GPU, against the reference."""
    with executed(gpu=gpu) as plan:
        pair = Pair(make(Mlp), "tensorwise", policy=ALL_FP8, dynamic=False)
        for step in range(2):
            pair.step(noise(64, 128, seed=step))
    return plan


@pytest.mark.parametrize(("gpu", "wrongly"), [(RTX4090, True), (H100, True), (RTX4090, False)], ids=["sm_89", "sm_90", "newer"])
def test_kernels_convert_by_ptx_where_triton_does_it_wrongly(gpu: Gpu, wrongly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.triton, "converts_wrongly", lambda capability: wrongly and capability == gpu.capability)
    plan = plan_for(gpu)
    casts = [kernel for kernel in plan.kernels if kernel.ours and "_cast" in kernel.name]
    assert casts
    for kernel in casts:
        assert ("inline_asm_elementwise" in kernel.jitted.src) == wrongly
