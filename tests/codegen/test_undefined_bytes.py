"""Our kernels store no byte that nothing has written. ptxas 12.8, which Triton 3.6 brings, compiles such stores for sm_90 from
pairs of FP8 numbers that Triton's own conversion makes: an H200 gave wrong gradients.
"""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch

from fp8compile import compat
from fp8compile.codegen import kernel
from fp8compile.devices.gpu import H200
from tests.support.executed import planning
from tests.support.groups import CASES, Source, fused, traced
from tests.support.machine_code import TARGETS, compile_function, sass_of
from tests.support.undefined_bytes import stored_undefined

pytestmark = [planning, pytest.mark.compat]

TYPES = {"bfloat16": "*bf16", "float32": "*fp32", "float16": "*fp16", "float8_e4m3fn": "*fp8e4nv"}
BLOCKS = [(64, 64, 4), (64, 128, 8)]
OLD = compat.triton.converts_wrongly((9, 0))


def machine_code(name: str, rows: int, columns: int, block: tuple[int, int, int]) -> str:
    """The machine code of a case's kernel for sm_90, as it is written for an H200."""
    graph = traced(CASES[name], Source(rows, columns, torch.bfloat16), "e4m3")
    with mock.patch.object(kernel, "gpu_of", lambda device: H200):
        (source,) = fused(graph).sources
    function = compat.triton.load_kernel(re.findall(r"def (\w+)\(", source)[0], source)
    types = {key: TYPES[kind] for key, kind in re.findall(r"# ([xy]\d+): (?:\w+ )?(\w+)", source)}
    types |= {key: "*fp32" if key.startswith("s") else "*i32" for key in function.arg_names if re.match(r"s\d|amax", key)}
    constants = {"BLOCK_R": block[0], "BLOCK_C": block[1]}
    return sass_of(compile_function(function, types, constants, TARGETS["sm_90"], num_warps=block[2]))


# float32 and float16 in both layouts; one number; a weight
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", [(17, 1000), (1000, 272), pytest.param((4096, 768), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", ["casts", "gradient_of_a_sum", pytest.param("weight", marks=pytest.mark.slow)])
def test_none_is_stored(name: str, shape: tuple[int, int], block: tuple[int, int, int]) -> None:
    assert not stored_undefined(machine_code(name, *shape, block))


@pytest.mark.skipif(not OLD, reason="Triton's ptxas has no such fault")
@pytest.mark.parametrize("name", ["casts", "gradient_of_a_sum"])
def test_those_of_the_conversion_of_triton_are_found(name: str) -> None:
    with mock.patch.object(compat.triton, "converts_wrongly", lambda capability: False):
        assert stored_undefined(machine_code(name, 1000, 272, BLOCKS[0]))
