"""Every generated kernel of the test models compiles to machine code for each GPU with FP8, with no GPU at
hand.

The models are traced at their real sizes for a described H200; Triton and its assemblers do the rest. For
sm_90, kernels are compiled in all sizes; for the others, one kernel of each title (what it computes).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import pytest

from fp8compile.dryrun.fake_gpu import unavailable
from tests.support import hooks
from tests.support.machine_code import (
    MODELS,
    RECIPES,
    SHARED,
    TARGETS,
    Generated,
    compile_kernel,
    executed,
    resources,
    sass_of,
    traced,
    with_fnuz,
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")]

REGISTERS = {"cuda": 255, "hip": 512}


@functools.cache
def kernels(key: str, amd: bool = False) -> tuple[Generated, ...]:
    """The kernels of all models and both recipes, one of each `key`, an attribute. For AMD, of one model."""
    found: dict[str, Generated] = {}
    for name in ("llama",) if amd else MODELS:
        for recipe in RECIPES:
            for kernel in _traced(name, recipe, amd=amd):
                found.setdefault(getattr(kernel, key), kernel)
    return tuple(found.values())


_traced = functools.cache(traced)


@functools.cache
def compiled(target: str) -> list[tuple[Generated, Any]]:
    """Triton's object for each kernel at its default tile."""
    found = kernels("text" if target == "sm_90" else "title", target.startswith("gfx"))
    return [(kernel, compile_for(kernel, target)) for kernel in found]


def compile_for(kernel: Generated, target: str) -> Any:
    """A kernel at its default tile; it fits the registers and the shared memory."""
    kernel = with_fnuz(kernel) if target == "gfx942" else kernel
    made = compile_kernel(kernel, kernel.configs[0], TARGETS[target])
    took = resources(made)
    assert 0 < took.registers <= REGISTERS[TARGETS[target].backend], (kernel.name, took)
    assert took.shared <= SHARED[target], (kernel.name, took)
    return made


def assert_no_spills(kernels: Iterable[tuple[Generated, Any]]) -> None:
    took = {f"{x.model}: {x.name} at {x.configs[0]}": resources(made) for x, made in kernels}
    spilled = [f"{kernel}: {found}" for kernel, found in took.items() if found.spills]
    assert not spilled, f"{len(spilled)} of {len(took)} kernels spill:\n" + "\n".join(spilled)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_to_machine_code(target):
    assert target.startswith("gfx") or len(compiled(target)) >= 15
    for kernel, made in compiled(target):
        binary = made.asm["hsaco" if target.startswith("gfx") else "cubin"]
        assert binary[:4] == b"\x7fELF", kernel.name
        if "cast" in kernel.name and "transpose" in kernel.name:
            rows, columns, _ = kernel.configs[0]
            # the transposition goes through shared memory; whole rows have a kernel of its own for it
            assert rows < 16 or resources(made).shared >= rows * columns // 4, kernel.name


def test_nothing_spills_at_the_default_tile():
    assert_no_spills(compiled("sm_90"))


FINER = {
    "ffn": ("rowwise", "blockwise", "mxfp8", "mxfp8 tiles"),
    "llama": ("blockwise",),
    "moe": ("rowwise", "blockwise", "mxfp8"),
}


@functools.cache
def finer(model: str, amd: bool = False) -> tuple[Generated, ...]:
    """Kernels of the recipes with several scales a tensor, each form once."""
    found: dict[str, Generated] = {}
    for recipe in FINER[model]:
        for kernel in _traced(model, recipe, amd=amd):
            found.setdefault(kernel.form, kernel)
    return tuple(found.values())


@pytest.mark.weekly
@pytest.mark.parametrize("model", FINER)
def test_kernels_of_the_finer_recipes_do_not_spill(model):
    assert_no_spills((kernel, compile_for(kernel, "sm_90")) for kernel in finer(model))


@pytest.mark.weekly
@pytest.mark.parametrize("target", [target for target in TARGETS if target != "sm_90"])
def test_kernels_of_the_finer_recipes_compile_to_machine_code(target):
    """Of each recipe, one kernel of each title. For AMD, those of one model."""
    amd = target.startswith("gfx")
    every = [kernel for model in (("ffn",) if amd else ("ffn", "moe")) for kernel in finer(model, amd)]
    for kernel in {(x.title, x.recipe): x for x in every if re.search("transpose|columns", x.name)}.values():
        compile_for(kernel, target)


def test_scales_are_divided_as_in_the_reference():
    """The division is rounded correctly and keeps denormals."""
    kernel = next(x for x in finer("ffn") if "tl.div_rn(448.0" in x.source)
    ptx = compile_kernel(kernel, kernel.configs[0], TARGETS["sm_90"]).asm["ptx"]
    assert "div.rn.f32" in ptx
    assert "ftz" not in ptx and "div.full" not in ptx and "div.approx" not in ptx


def test_swiglu_backward():
    """No division of an element is rounded correctly: it was, with torch 2.11, and took 128 registers."""
    kernel = next(x for x in _traced("llama", "delayed") if "silu_backward" in x.name)
    assert "div_rn" not in re.sub(r".*(scale|amax|s\d+_value).*", "", kernel.source)
    assert resources(compile_kernel(kernel, kernel.configs[0], TARGETS["sm_90"])).registers <= 104


@pytest.mark.parametrize("target", ["sm_90"])
@pytest.mark.parametrize("model", ["gpt2", "ffn"])
def test_gelu_backward(model, target):
    """Nothing is computed once for each layout: Triton 3.6 did so, and took 58 and 55 instructions."""
    kernel = next(x for x in _traced(model, "delayed") if "gelu_backward" in x.name)
    (walk,) = re.findall(r"range\(strip \* (\d+)", kernel.source)
    rows, columns, warps = kernel.configs[0]
    sass = sass_of(compile_kernel(kernel, kernel.configs[0], TARGETS[target]))
    each = 32 * warps / (rows * columns * int(walk))
    assert executed(sass, int(walk)).total() * each <= 46.5


def test_a_spill_is_seen():
    """A tile that is too large for the registers of its threads shows as a spill."""
    kernel = next(x for x in kernels("form") if "silu_backward_cast_transpose" in x.name)
    assert resources(compile_kernel(kernel, (128, 128, 4), TARGETS["sm_90"])).spills > 100


def test_fnuz_sources_are_those_of_a_gpu_that_wants_them():
    """`with_fnuz` rewrites the source; tracing with the fnuz encodings gives the same source."""
    with hooks.fnuz(), hooks.matmuls_unread():
        expected = [kernel.source.replace(kernel.name, "kernel") for kernel in traced("ffn", "delayed")]
    made = [with_fnuz(kernel) for kernel in _traced("ffn", "delayed", amd=True)]
    assert [kernel.source.replace(kernel.name, "kernel") for kernel in made] == expected
    every = "".join(expected)
    assert "tl.float8e4b8" in every and "tl.float8e5b16" in every
    assert not any(text in every for text in ("e4nv", "float8e5)", "448.0"))


def stores(ptx: str) -> list[int]:
    """The bytes that one thread writes in each store to global memory."""
    found = re.findall(r"st\.global\S*?((?:\.v\d)?)\.[a-z](\d+)\b", ptx)
    return [int(vector[2:] or 1) * int(bits) // 8 for vector, bits in found]


@pytest.mark.parametrize("dynamic", [False, True])
def test_both_layouts_are_stored_by_whole_words(dynamic):
    """The purpose of tiles: in either layout a thread writes adjacent elements, at least 4 bytes of FP8."""
    made = traced("ffn", "delayed", dynamic=dynamic)
    chosen = [x for x in made if "cast_transpose" in x.name and "norm" not in x.name]
    assert len(chosen) >= 3
    for kernel in chosen:
        ptx = compile_kernel(kernel, kernel.configs[0], TARGETS["sm_90"]).asm["ptx"]
        rows, columns, warps = kernel.configs[0]
        each = rows * columns // (32 * warps)  # bytes of FP8 that a thread writes in each layout
        assert min(stores(ptx)) >= 4 and sum(stores(ptx)) >= 2 * each, (kernel.name, stores(ptx), each)
