"""Second reads of generated kernels: which inputs a source loads in several loops, and when L2 holds them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from fp8compile.codegen import walks
from fp8compile.devices import catalog
from fp8compile.devices.gpu import H200
from fp8compile.dryrun.fake_gpu import trace, unavailable
from tests.support.gpu_steps import unallocated
from tests.support.harness import ALL_FP8

EXPECTED = Path(__file__).with_name("expected")
LOOP = """
    v0 = tl.load(x9)
    for start in range(0, 4096, BLOCK_C):
        v1 = tl.load(x0 + row * 4096 + col).to(tl.float32)
        v2 = tl.load(x1 + row * 4096 + col).to(tl.float32)
    r3 = tl.sum(v1, 1)
    for start in range(0, 4096, BLOCK_C):
        v4 = tl.load(x0 + row * 4096 + col).to(tl.float32)
    v5 = tl.load(x1 + row)
"""


def test_loops_over_columns():
    assert walks.loops(LOOP) == {"x0": 2, "x1": 1}
    assert walks.loops((EXPECTED / "swiglu_backward.py").read_text()) == {}
    assert walks.loops((EXPECTED / "blockwise_gelu_backward_bias.py").read_text())  # a span


@pytest.mark.parametrize("rows, columns, again", [(8192, 4096, 1), (8192, 768, 0), (65536, 768, 1)])
def test_l2_holds_what_is_resident(rows, columns, again):
    """Two inputs in bf16. Programs of 32 rows, at most 528 at a time, hold 134, 25 and 52 MB; half of L2 is
    31 MB."""
    size = 2 * rows * columns
    found = walks.read_again(LOOP, {"x0": size, "x1": size}, rows // 32, 8, H200)
    assert found == again * size
    assert walks.resident(H200, 8) == 528 and walks.resident(H200, 32) == 132


def test_l2_of_a_gpu_decides():
    size = 2 * 8192 * 1024  # 17 MB, all of them resident
    given = {"x0": size}, 256, 8
    assert walks.read_again(LOOP, *given, H200) == 0
    assert walks.read_again(LOOP, *given, dataclasses.replace(H200, L2_cache_size=30 << 20)) == size
    assert walks.read_again(LOOP, *given, dataclasses.replace(H200, L2_cache_size=None)) == size
    assert walks.read_again(LOOP, *given, catalog.find("b200").gpu) == 0


class Norm(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(columns), nn.Linear(columns, 128, bias=False)
        self.linear.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


@pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
@pytest.mark.parametrize(
    ("recipe", "rows", "columns", "bytes_"), [("delayed", 1024, 65536, 5), ("blockwise", 8192, 4096, 3)]
)
def test_bytes_of_a_launch(recipe: str, rows: int, columns: int, bytes_: int):
    """A norm and the cast of its result: 2 bytes an element in, one out, and rows that are too long for
    registers are read again."""
    options = {"policy": ALL_FP8, "recipe": recipe}
    model = unallocated(lambda: Norm(columns), torch.bfloat16)
    compiled = torch.compile(model, backend="fp8", options=options)
    x = torch.empty(rows, columns, dtype=torch.bfloat16)
    step = trace(lambda: compiled(x).sum().backward())
    moved = max(kernel.bytes for kernel in step.graphs[0].kernels if kernel.origin == "user")
    assert moved == pytest.approx(bytes_ * x.numel(), rel=0.02)
