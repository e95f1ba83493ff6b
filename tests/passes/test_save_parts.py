"""`save="fp8"` where backward reads a tensor by parts: results of merged matmuls, and tensors that a model splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from fp8compile.dryrun import fake_gpu
from fp8compile.ir.records import KeptRecord
from tests.passes.test_save import Twins, aim, tiny  # noqa: F401
from tests.support.executed import executed
from tests.support.gpu_steps import unallocated
from tests.support.harness import ALL_FP8, compiled, leaf, noise
from tests.support.models import LlamaLayer, Stack, SwiGlu, make

needs_description = pytest.mark.skipif(fake_gpu.unavailable() is not None, reason=fake_gpu.unavailable() or "")
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


class Chunked(nn.Module):
    """SwiGLU with one linear for gate and up."""

    def __init__(self, width: int = 128, hidden: int = 256) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class NormalHeads(nn.Module):
    """Attention with norms of q and k. Backward of a norm can read FP8, attention's cannot: v is not merged with them."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(128), nn.RMSNorm(128)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, 128)) for layer in (self.q, self.k, self.v))
        parts = (part.transpose(1, 2) for part in (self.q_norm(q), self.k_norm(k), v))
        return x + self.o(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(-2))


def kept(model: nn.Module) -> list[KeptRecord]:
    return [record for graph in fp8compile.report(model).graphs for record in graph.kept]


CASES: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # model, its width, how many tensors it keeps in FP8
    "gate and up": (lambda: SwiGlu(128, 256), 128, 2),
    "chunked": (Chunked, 128, 2),
    "q and k": (NormalHeads, 256, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_each_part_gets_a_copy_and_the_whole_is_free(interpreted, name: str, dtype: torch.dtype) -> None:
    """Nothing that is kept lives in the memory of a merged result."""
    build, width, count = CASES[name]
    twins = Twins(make(build, dtype), merge_matmuls=True)
    saved: list[Tensor] = []
    for number in range(3):
        twins.zero()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            made = twins(noise(2, 48, width, seed=number, dtype=dtype))
        twins.backward(made)
    first, second = (twins(noise(2, 48, width, seed=number, dtype=dtype)) for number in (5, 6))
    twins.zero()
    twins.backward(second, first)
    twins.same_state()
    assert len(twins.kept()) == count
    assert all(max(sizes) == (0 if name == "chunked" else 2) for sizes in twins.merged())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: alive.append(x) or x, lambda x: x):
        alive: list[Tensor] = []
        twins.compiled[1](leaf(noise(2, 48, width, dtype=dtype)))
    assert sum(x.dtype == FP8 and x._base is None and x.shape == (96, x.shape[-1]) for x in alive) >= count
    wide = max(2 * 96 * 128, 96 * 2 * width)
    assert not any(x.dtype == dtype and x.untyped_storage().nbytes() >= wide * x.itemsize for x in alive)


def test_parts_that_128_does_not_divide(interpreted) -> None:
    """They are kept as one copy, if 128 divides their whole."""
    model = make(lambda: Chunked(128, 192))
    compiled(model, policy=ALL_FP8, save="fp8")(leaf(noise(2, 48, 128))).sum().backward()
    assert [record.tensor for record in kept(model)] == ["float32 [96 x 384]"]


@needs_description
@pytest.mark.slow
def test_the_bits_of_a_plan_for_a_gpu() -> None:
    """Where Inductor rounds each bf16 result, forward is to the bit what it is without. (Otherwise it rounds what it stores,
    and without `save` it stores some more.)"""

    def outputs(save: str) -> list[Tensor]:
        model = make(lambda: Stack(*(LlamaLayer(128, 2, 2, 256) for _ in range(2))), BF16)
        options = {"policy": ALL_FP8, "save": save, "merge_matmuls": True, "emulate_precision_casts": True}
        found = []
        with executed():
            run = torch.compile(model, backend="fp8", options=options)
            for number in range(3):
                out = run(leaf(noise(2, 32, 128, seed=number, dtype=BF16)))
                (out * aim(out)).mean().backward()
                found.append(out.detach())
        return found

    assert all(torch.equal(a, b) for a, b in zip(outputs("auto"), outputs("fp8"), strict=True))


LARGE = {
    "llama": (LlamaLayer, 4096, 0.62),
    "chunked": (lambda: Chunked(4096, 14336), 4096, 0.36),
    "q and k": (lambda: NormalHeads(4096), 4096, 0.725),
}


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE if name != "llama")])
@needs_description
def test_merged_matmuls_keep_no_more(name: str) -> None:
    """And casts and reads are parts of kernels that were there before."""
    build, width, most = LARGE[name]
    x = torch.empty(1, 8192, width, dtype=BF16, requires_grad=True)

    def step(**how: Any) -> fake_gpu.Step:
        torch._dynamo.reset()
        layer = torch.compile(unallocated(build, BF16), **how)
        return fake_gpu.trace(lambda: layer(x).sum().backward())

    def ours(save: str, merge: bool) -> fake_gpu.Step:
        return step(backend="fp8", options={"policy": ALL_FP8, "save": save, "merge_matmuls": merge})

    bf16, auto, apart, together = step(), ours("auto", True), ours("fp8", False), ours("fp8", True)
    assert together.kept_for_backward <= 1.001 * apart.kept_for_backward <= 1.001 * most * bf16.kept_for_backward
    assert len(together.kernels) <= len(auto.kernels) + 2
    assert together.bytes_outside_matmuls <= 1.05 * auto.bytes_outside_matmuls
