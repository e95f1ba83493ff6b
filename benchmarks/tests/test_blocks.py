"""Which blocks a kernel walks over its matrix in, for a described GPU."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any
from unittest import mock

import pytest
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import compat
from fp8compile.codegen import blocks, walks
from fp8compile.codegen.kernel import Kernel
from fp8compile.devices.gpu import H200
from fp8compile.passes.fuse import fuse
from fp8compile.passes.lower import split_casts
from tests.support import hooks, machine_code
from tests.support.interpreter import kernels_on_cpu

from ..families import FAMILIES, Source

NORMS = ("rms-norm", "layer-norm", "rms-norm-backward", "layer-norm-backward")
UNKNOWN = dataclasses.replace(H200, L2_cache_size=None)


@functools.cache
def kernel(name: str, rows: int, columns: int, described: Any = H200) -> tuple[Kernel, tuple[Any, ...], int]:
    """The kernel of a family, its blocks, and how many of them a program takes."""
    family = FAMILIES[name]
    with FakeTensorMode():
        inputs = family.inputs(Source(rows, columns, "cpu"))
    with enable_python_dispatcher():
        graph = make_fx(family.function, decomposition_table=select_decomp_table())(*inputs).graph
    described_gpu = mock.patch.object(blocks, "gpu_of", lambda device: described)
    with described_gpu, kernels_on_cpu(), hooks.generated() as (made, _):
        split_casts(graph)
        fuse(graph)
        (found,) = made
        return found, blocks.configurations(found.group), blocks.walk(found.group)


@pytest.mark.parametrize(
    "name, rows, columns, described, whole",
    [
        ("rms-norm", 8192, 4096, H200, True),
        ("rms-norm", 8192, 5120, H200, True),  # 8192 elements, of which the last are masked
        ("rms-norm-parts", 8192, 4096, H200, True),
        ("rms-norm", 16384, 768, H200, False),  # 25 MB: L2 holds what is read twice
        ("rms-norm", 8192, 4096, UNKNOWN, False),
        ("rms-norm", 1024, 20000, H200, False),  # too long for registers
        ("rms-norm-backward", 1024, 4096, UNKNOWN, True),  # for its column sum
        ("layer-norm-backward", 16384, 768, H200, True),
        ("layer-norm-backward", 8192, 8192, H200, False),
    ],
)
def test_whole_rows(name, rows, columns, described, whole):
    """Where a second read would come from memory, or column sums would be reduced for each block of rows."""
    made, (block,), walk = kernel(name, rows, columns, described)
    assert (block[1] >= columns) == whole == (not walks.loops(made.source))
    assert (walk > 1) == (whole and bool(made.group.sums))
    if walk > 1:  # not many partial sums, and enough programs
        assert rows // 512 <= walk * block[0] <= max(16, rows // 64)


@pytest.mark.parametrize("name", [*NORMS, "rms-norm-parts"])
@pytest.mark.parametrize("columns", [256, 768, 1536, 4096, 8192, 16384, 20480])
def test_loops_find_in_the_cache_what_they_read_again(name, columns):
    """No kernel reads an input twice from memory if its rows fit the registers. (`walks` reads sources.)"""
    rows = (1 << 27) // columns
    made, (block, *_), _ = kernel(name, rows, columns)
    group = made.group
    full = {f"x{i}": rows * columns * 2 for i, x in enumerate(group.inputs) if group.domain.is_full(x)}
    again = walks.read_again(made.source, full, -(-rows // block[0]), block[2], H200)
    longest = blocks.LONGEST_WALKED if group.sums else blocks.LONGEST
    assert again == 0 if columns <= longest else again > 0


def test_the_last_loop_goes_back():
    """What was read last is still in the cache; hints say what is read again."""
    source = kernel("layer-norm", 16384, 768)[0].source
    loops = [re.search(r"for (\w+) in", part)[1] for part in re.findall(r"for .* in range.*", source)]  # type: ignore[index]
    assert loops == ["done", "start", "done"]
    assert re.findall(r'eviction_policy="(\w+)"', source) == ["evict_last", "evict_last", "evict_first"]


# -- machine code --

# family, rows, columns: registers, and for an element instructions, shuffles, and barriers of 1,000 elements
LIMITS: dict[tuple[str, int, int], tuple[int, float, float, float]] = {
    ("rms-norm", 8192, 4096): (96, 17.5, 0.5, 1),
    ("rms-norm-parts", 8192, 4096): (80, 21.5, 0.5, 1),
    ("rms-norm-backward", 8192, 4096): (64, 42, 3, 1),
    ("layer-norm-backward", 8192, 4096): (128, 38, 3, 1.5),
    ("layer-norm-backward", 16384, 768): (128, 56, 3, 8),
    ("gelu-backward", 16384, 16384): (64, 45, 1, 1.6),
}


@pytest.mark.slow
@pytest.mark.skipif(compat.triton.converts_wrongly((9, 0)), reason="the limits are those of Triton 3.9")
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("name, rows, columns", LIMITS)
def test_machine_code(name, rows, columns, target):
    made, (block,), walk = kernel(name, rows, columns)
    compiled = machine_code.compile_source(made.source, block, machine_code.TARGETS[target])
    took = machine_code.resources(compiled)
    found = machine_code.executed(machine_code.sass_of(compiled), walk)
    registers, instructions, shuffles, barriers = LIMITS[name, rows, columns]
    elements = block[0] * walk * (columns if made.group.passes else block[1])
    each = 32 * block[2] / elements
    assert took.registers <= registers and took.spills == 0
    assert instructions * 0.5 < found.total() * each <= instructions
    assert 0 < found["SHFL"] * each <= shuffles
    assert 0 < found["BAR"] * 1000 / elements <= barriers
