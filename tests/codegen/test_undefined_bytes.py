"""Our kernels store no byte that nothing has written. ptxas 12.8, which Triton 3.6 brings, compiles such stores for sm_90 from
pairs of FP8 numbers that Triton's own conversion makes: an H200 gave wrong gradients.
"""

from __future__ import annotations

import pytest
import torch

from tests.support import hooks
from tests.support.executed import planning
from tests.support.groups import CASES, Source, fused, traced
from tests.support.machine_code import TARGETS, compile_source, sass_of
from tests.support.operands import H100
from tests.support.undefined_bytes import stored_undefined

pytestmark = [planning, pytest.mark.compat]

Block = tuple[int, int, int]
BLOCKS: list[Block] = [(64, 64, 4), (64, 128, 8)]


def machine_code(name: str, rows: int, columns: int, block: Block, wrongly: bool | None = None) -> str:
    """The machine code of a case's kernel for sm_90."""
    graph = traced(CASES[name], Source(rows, columns, torch.bfloat16), "e4m3")
    with hooks.written_for(H100, wrongly):
        (source,) = fused(graph).sources
    return sass_of(compile_source(source, block, TARGETS["sm_90"]))


# float32 and float16 in both layouts; one number; a weight
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", [(17, 1000), (1000, 272), pytest.param((4096, 768), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", ["casts", "gradient_of_a_sum", pytest.param("weight", marks=pytest.mark.slow)])
def test_none_is_stored(name: str, shape: tuple[int, int], block: Block) -> None:
    assert not stored_undefined(machine_code(name, *shape, block))


@pytest.mark.parametrize("name", ["casts", "gradient_of_a_sum"])
def test_those_of_the_conversion_of_triton_are_found(name: str) -> None:
    """Where they are: kernels convert by themselves where, and only where, Triton's conversion stores such bytes."""
    stored = bool(stored_undefined(machine_code(name, 1000, 272, BLOCKS[0], wrongly=False)))
    with hooks.written_for(H100):
        source = fused(traced(CASES[name], Source(1000, 272, torch.bfloat16), "e4m3")).sources[0]
    assert stored == ("inline_asm_elementwise" in source)
