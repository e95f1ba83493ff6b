"""Which blocks a kernel walks over its matrix in, for a described GPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest import mock

import pytest
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.codegen import blocks, walks
from fp8compile.codegen.kernel import Kernel
from fp8compile.devices.gpu import H200
from fp8compile.passes.fuse import fuse
from fp8compile.passes.lower import split_casts
from tests.support import hooks
from tests.support.interpreter import kernels_on_cpu

from ..families import FAMILIES, Source

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
