"""`cache_weights` with `recast_weights=True`: one FP8 copy of a weight is kept between calls, where both
layouts share scales. Backward transposes it. (tests/equivalence: the bits are those of two copies.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile.devices import catalog
from fp8compile.dryrun import fake_gpu
from tests.support import hooks
from tests.support.cached import BF16, compiled, layer, same, trained
from tests.support.executed import planning
from tests.support.gpu_steps import unallocated
from tests.support.harness import ALL_FP8, noise
from tests.support.models import LlamaLayer, Moe, SwiGlu, Uses, make


class Turned(nn.Module):
    """Weights that lie as [inputs, outputs]: fprop reads the transposed copy, dgrad the other one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = (nn.Parameter(torch.randn(*sides) / 12) for sides in ((128, 272), (272, 128)))

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1.5) @ self.up @ self.down


class Uneven(nn.Module):
    """Sides of which 32 is no divisor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 272, bias=False), nn.Linear(272, 144, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x * 1.5))


def kept(build: Callable[[], nn.Module], recast: bool | str, recipe: str, **options: Any) -> int:
    """The bytes of the copies that are kept between calls."""
    model = build()
    call = compiled(model, True, recipe, recast_weights=recast, **options)
    with hooks.traced(), hooks.bytes_of_copies() as found:
        call(noise(1, 48, 128, dtype=next(model.parameters()).dtype)).sum().backward()
    return sum(found)


def both(build: Callable[[], nn.Module], recipe: str, **options: Any) -> tuple[int, int]:
    """The bytes of two copies and of one."""
    return kept(build, False, recipe, **options), kept(build, True, recipe, **options)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "merged": (lambda: make(SwiGlu, BF16), {"recipe": "delayed", "merge_matmuls": True}),
    "experts, turned": (lambda: make(lambda: Moe(turned=True), BF16), {"recipe": "blockwise"}),
    "turned": (Turned, {"recipe": "blockwise"}),
    "tiles of uneven sides": (lambda: make(Uneven), {"recipe": "mxfp8", "weight_tiles": True}),
    "kept in fp8": (layer, {"recipe": "tensorwise", "save": "fp8"}),
}


@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.compat
def test_half_the_memory(name: str) -> None:
    build, options = CASES[name]
    two, one = both(build, **options)
    weights = sum(p.numel() for p in build().parameters() if p.dim() > 1)
    assert weights <= one <= 1.01 * weights
    assert 0.3 * weights < two - one <= 1.01 * weights  # of weights with dgrad: after a batch, there is none


def test_layouts_with_scales_of_their_own_are_both_kept() -> None:
    """To transpose what fprop reads would multiply dgrad by values of another scale."""
    two, one = both(lambda: make(Uneven), "rowwise")
    assert one == two > 0
    policy = {"rules": [{"gemm": "dgrad", "margin": 1, "fp8": "on"}, *ALL_FP8["rules"]]}
    two, one = both(lambda: make(Uneven), "tensorwise", policy=policy)
    assert one == two > 0
    found = []
    for recast in (False, True):
        model = make(Uneven)
        call = compiled(model, True, "tensorwise", recast_weights=recast, policy=policy)
        found.append(trained(model, call, torch.optim.SGD(model.parameters(), lr=1e-2), 1, 2))
    assert same(*found)


@pytest.mark.slow
def test_what_is_kept_otherwise() -> None:
    """Of three slices of one parameter one is multiplied in both layouts by fprops, which no backward can
    transpose for. And who keeps copies between calls, and does not say how many, keeps both."""
    two, one = both(lambda: make(Uses), "tensorwise")
    assert 0 < one < two
    auto, two, one = (
        kept(lambda: make(Uneven), recast, "tensorwise", device="h200") for recast in ("auto", False, True)
    )
    assert auto == two > 1.5 * one > 0


def static(
    build: Callable[[], nn.Module], recast: bool, recipe: str, **options: Any
) -> tuple[fake_gpu.Step, int]:
    torch._dynamo.reset()
    model = unallocated(build, BF16)
    call = compiled(model, True, recipe, device="h100", recast_weights=recast, **options)
    x = torch.empty((1, 2048, 1024), dtype=BF16, requires_grad=True)
    step = fake_gpu.trace(lambda: call(x).sum().backward(), catalog.find("h100").gpu)
    return step, sum(p.numel() for p in model.parameters() if p.dim() == 2)


@pytest.mark.slow
@planning
@pytest.mark.parametrize(
    ("build", "recipe", "options", "count"),
    [
        (lambda: SwiGlu(1024, 2048), "delayed", {"merge_matmuls": True}, 2),
        pytest.param(lambda: LlamaLayer(1024, 8, 2, 2048), "blockwise", {}, 7, marks=pytest.mark.weekly),
    ],
)
def test_one_kernel_that_moves_2_bytes_an_element(
    build: Callable[[], nn.Module], recipe: str, options: dict[str, Any], count: int
) -> None:
    """In backward, for each weight, or group of merged ones. Casts write a byte a parameter less."""
    (two, weights), (one, _) = (static(build, recast, recipe, **options) for recast in (False, True))

    def sizes(step: fake_gpu.Step) -> tuple[int, int]:
        casts = [graph for graph in step.graphs if not any(x.matmul is not None for x in graph.kernels)]
        made = sum(kernel.bytes for graph in casts for kernel in graph.kernels)
        return made, step.bytes_outside_matmuls - made

    assert sizes(two)[0] - sizes(one)[0] == weights
    assert abs(sizes(one)[1] - sizes(two)[1] - 2 * weights) < 0.01 * weights
    assert one.kept_for_backward == two.kept_for_backward and one.flops == two.flops
    assert len(one.kernels) - len(two.kernels) == count
    backward = next(graph for graph in one.graphs if graph.backward)
    inputs = [x for name, x in backward.inputs.items() if name.startswith("primals")]
    assert sum(x.dtype == torch.float8_e4m3fn for x in inputs) == count
    assert any(x.matmul is not None for x in backward.kernels)
