"""Inputs cast as vLLM casts them (`serve`): the operators, their C++ and a generated kernel against
`vllm_cast`, the formula of vLLM's own kernel in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fp8compile.config.recipe import LEAST, Recipe
from fp8compile.devices.gpu import Gpu
from fp8compile.ir import cpu, ops
from fp8compile.passes.resolve import Facts, settle
from tests.support.groups import DTYPES, Source, fused, trace
from tests.support.kernel_checks import assert_bits
from tests.support.reference_casts import vllm_cast

E4M3 = (torch.float8_e4m3fn, 448.0)


def inputs(columns: int = 256) -> Iterator[Tensor]:
    """Normal and special numbers; all mantissas of bf16 beside each of them as the amax; amaxes around both
    limits and around powers of two."""
    for dtype in DTYPES.values():
        for data in ("normal", "extreme"):
            yield Source(150, columns, dtype, data).full()
    mantissas = 1 + torch.arange(128) / 128
    pairs = mantissas.repeat(128, 2)
    pairs[:, 0] = pairs[:, -1] = 2 * mantissas
    yield pairs.bfloat16()
    peaks = torch.cat([mantissas * factor for factor in (2, 448, 1e-10, 4e-8, 2.0**-130)])
    x = torch.randn(len(peaks), columns, generator=torch.Generator().manual_seed(0))
    x = x.clamp(-1, 1) * peaks[:, None]
    x[:, 0] = peaks
    yield from (x, x.bfloat16())
    powers = (448 * 2.0 ** torch.arange(-20, 20)).view(torch.int32)[:, None]
    beside = (powers + torch.arange(-3, 4).int()).view(torch.float32).reshape(-1, 1)
    yield torch.cat([beside.expand(-1, 128), torch.randn(len(beside), 128)], 1)


def served(x: Tensor, power_of_2: bool) -> tuple[Tensor, ...]:
    """Both copies and their inverses, as in the joint graph."""
    made = []
    for transposed in (False, True):
        amax = ops.amax_blocks(x, transposed, [1, 128])
        inverse = ops.served_inverse(amax, E4M3[1], LEAST[power_of_2], power_of_2)
        scale = ops.inverse(inverse) if power_of_2 else inverse
        made += [ops.quantize(x, scale, *E4M3, transposed, [1, 128], None, not power_of_2), inverse]
    return tuple(made)


@pytest.mark.parametrize("power_of_2", [False, True])
def test_the_bits_are_those_of_vllm(power_of_2: bool) -> None:
    differ = 0
    for i, x in enumerate(inputs()):
        rows = x.shape[0]
        expected = vllm_cast(x, rounded=power_of_2), vllm_cast(x.t(), rounded=power_of_2)
        made = fused(trace(lambda x: served(x, power_of_2), (x,), "fake"), None)
        assert [sorted(kinds) for kinds in made.kinds] == [["blocks", "blocks", "copy", "transposed"]]
        with torch.no_grad():
            sides = {"operators": served(x, power_of_2), "kernel": made.fused(x)}
        scale = ops.inverse(sides["operators"][1]) if power_of_2 else sides["operators"][1]
        sides["C++"] = (cpu.quantize(x, scale, *E4M3, False, [1, 128], None, not power_of_2),)
        for name, got in sides.items():
            assert_bits(expected[0].values, got[0], f"copy of input {i}, {name}")
        for name in ("operators", "kernel"):
            copy, inverse, late, late_inverse = sides[name]
            assert_bits(expected[0].scale_inv, inverse, f"inverses of input {i}, {name}")
            assert_bits(expected[1].values, late[:, :rows], f"transposed copy of input {i}, {name}")
            assert_bits(expected[1].scale_inv, late_inverse, f"its inverses of input {i}, {name}")
        amax = ops.amax_blocks(x, False, [1, 128])
        ours = ops.quantize(x, ops.current_scale(amax, 448.0, 0, power_of_2), *E4M3, False, [1, 128])
        differ += int((ours.view(torch.uint8) != copy.view(torch.uint8)).sum())
    assert differ > 0, "the setting changes nothing"


@pytest.mark.parametrize(
    ("gpu", "powers", "served_by"),
    [
        (None, False, "vllm"),
        (Gpu(major=8, minor=9), False, "vllm"),
        (Gpu(), True, "vllm"),
        (Gpu(major=10), True, "vllm"),
        (Gpu(gcnArchName="gfx942"), True, "none"),
    ],
)
def test_powers_of_two_by_gpu(gpu: Gpu | None, powers: bool, served_by: str) -> None:
    """Unless they are given. vLLM has another FP8 maximum where encodings are fnuz."""
    recipe, lines = settle(Recipe("blockwise", serve="vllm"), Facts(gpu, ("input", "weight")))
    assert (recipe.power_of_2_scale, recipe.serve) == (powers, served_by) and len(lines) == 1
    assert recipe.scaling("input", "fprop").divides == (served_by == "vllm" and not powers)
    assert not recipe.scaling("weight", "fprop").least and not recipe.scaling("gradient", "dgrad").least
    given = Recipe("blockwise", serve="vllm", power_of_2_scale=not powers)
    assert settle(given, Facts(gpu, ("input", "weight")))[0].power_of_2_scale is not powers
