"""Casts on sm_89 and sm_90, where Triton 3.6 converts float32 to FP8 through float16, or its ptxas
miscompiles what it writes: our kernels convert by PTX there, in one step.

No GPU executes the PTX here. So the bytes that a kernel stores are followed through it, and compared with
Triton's own conversion for sm_90. And our kernels store no byte that nothing has written: ptxas 12.8, which
Triton 3.6 brings, compiles such stores for sm_90 from pairs of FP8 numbers that Triton's conversion makes: an
H200 gave wrong gradients.
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
from tests.support import hooks
from tests.support.executed import executed, planning
from tests.support.groups import CASES, Source, fused, traced
from tests.support.harness import ALL_FP8, Pair, noise
from tests.support.machine_code import TARGETS, compile_function, compile_source, sass_of
from tests.support.models import Mlp, make
from tests.support.operands import H100, RTX4090
from tests.support.undefined_bytes import stored_undefined

pytestmark = [planning, pytest.mark.compat]

FORMATS = {"e4m3x2": (torch.float8_e4m3fn, "*fp8e4nv"), "e5m2x2": (torch.float8_e5m2, "*fp8e5")}
OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)


def ptx(name: str, target: str, by_ptx: bool) -> str:
    dtype, pointer = FORMATS[name]
    cast = converted("tl.load(x + i)", dtype, by_ptx)
    source = "import triton\nimport triton.language as tl\n\n\n"
    source += "@triton.jit\ndef casts(x, y, BLOCK: tl.constexpr):\n"
    source += f"    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    tl.store(y + i, {cast})\n"
    function = compat.triton.load_kernel("casts", source)
    return compile_function(
        function, {"x": "*fp32", "y": pointer}, {"BLOCK": 1024}, TARGETS[target], num_warps=4
    ).asm["ptx"]


def stored(text: str) -> list[str]:
    """What a thread stores, byte by byte: the loaded numbers in their order, and how each was converted."""
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
            made[registers[0]] = [
                x or y for x, y in zip(*(made[register] for register in registers[1:]), strict=True)
            ]
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
    """And on all of NVIDIA's they saturate: kernels rely on it, and do not compare with the largest value."""
    expected = [f"value {i} rn.satfinite.{name}.f32" for i in range(8)]
    for target in ("sm_90", "sm_100", "sm_120"):
        assert stored(ptx(name, target, False)) == expected, target
    assert stored(ptx(name, "sm_89", True)) == expected
    assert ("cvt.rz.f16.f32" in ptx(name, "sm_89", False)) == OLD == compat.triton.converts_wrongly((8, 9))
    assert "cvt.rz.f16.f32" not in ptx(name, "sm_89", True)
    assert compat.triton.converts_wrongly((9, 0)) == OLD and not compat.triton.converts_wrongly((10, 0))


@pytest.mark.parametrize(
    ("gpu", "wrongly"), [(RTX4090, True), (H100, True), (RTX4090, False)], ids=["sm_89", "sm_90", "newer"]
)
def test_kernels_convert_by_ptx_where_triton_does_it_wrongly(
    gpu: Gpu, wrongly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of the plan for this GPU, against the reference."""
    capabilities = {gpu.capability} if wrongly else set()
    monkeypatch.setattr(compat.triton, "converts_wrongly", capabilities.__contains__)
    with executed(gpu=gpu) as plan:
        pair = Pair(make(Mlp), "tensorwise", policy=ALL_FP8, dynamic=False)
        for step in range(2):
            pair.step(noise(64, 128, seed=step))
    casts = [kernel for kernel in plan.kernels if kernel.ours and "_cast" in kernel.name]
    assert casts
    for kernel in casts:
        assert ("inline_asm_elementwise" in kernel.jitted.src) == wrongly


@pytest.mark.parametrize("early", [False, True])
def test_the_input_of_a_gelu_is_widened_by_ptx_where_triton_would_compute_it_twice(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its backward, for the transposed copy of the GELU, which nothing else decides."""
    monkeypatch.setattr(compat.triton, "widens_early", lambda: early)
    with executed(gpu=H100) as plan:
        pair = Pair(make(Mlp, torch.bfloat16), "tensorwise", policy=ALL_FP8, dynamic=False)
        for step in range(2):
            pair.step(noise(64, 128, seed=step, dtype=torch.bfloat16))
    sources = {kernel.name: kernel.jitted.src for kernel in plan.kernels if kernel.ours}
    assert any("0xffff0000" in source for source in sources.values()) == early, [*sources]
    assert all("gelu_backward" in name for name, source in sources.items() if "0xffff0000" in source)


# -- undefined bytes --

Block = tuple[int, int, int]
BLOCKS: list[Block] = [(64, 64, 4), (64, 128, 8)]


def source_of(name: str, rows: int, columns: int, wrongly: bool | None = None) -> str:
    """The kernel of a case for sm_90."""
    graph = traced(CASES[name], Source(rows, columns, torch.bfloat16), "e4m3")
    with hooks.written_for(H100, wrongly):
        (source,) = fused(graph).sources
    return source


def undefined(source: str, block: Block) -> list[tuple[str, int]]:
    return stored_undefined(sass_of(compile_source(source, block, TARGETS["sm_90"])))


# float32 and float16 in both layouts; one number; a weight
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize(
    "shape", [(17, 1000), (1000, 272), pytest.param((4096, 768), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(
    "name", ["casts", "gradient_of_a_sum", pytest.param("weight", marks=pytest.mark.slow)]
)
def test_none_is_stored(name: str, shape: tuple[int, int], block: Block) -> None:
    assert not undefined(source_of(name, *shape), block)


@pytest.mark.parametrize("name", ["casts", "gradient_of_a_sum"])
def test_those_of_the_conversion_of_triton_are_found(name: str) -> None:
    """Where they are: kernels convert by themselves just where Triton's conversion stores such bytes."""
    stored = bool(undefined(source_of(name, 1000, 272, wrongly=False), BLOCKS[0]))
    assert stored == ("inline_asm_elementwise" in source_of(name, 1000, 272))
