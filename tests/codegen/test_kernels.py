"""Every generated kernel against the reference operators, on a CPU by Triton's interpreter.

A fused kernel gives the bits of the unfused operators. Where that is impossible (an exponential of another
library, a sum in another order), FP8 values differ by at most one. A transposed copy is exactly the transpose
of the row-major copy, and an amax is exactly the amax of the written values.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8compile import compat
from fp8compile.codegen import blocks, launch
from tests.support.groups import (
    CASES,
    DTYPES,
    FNUZ,
    FP8,
    Case,
    Cast,
    Made,
    Source,
    fused,
    made,
    trace,
    traced,
    unfused,
)
from tests.support.interpreter import OLD_INTERPRETER, offsets
from tests.support.kernel_checks import assert_bits, check

aten = torch.ops.aten
SHAPES = ((1, 128), (15, 17), (17, 1000), (128, 128), (1000, 15), (3, 4097), (4097, 17), (17, 1), (1, 1))
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def assert_kinds(case: Case, made: Made, shape: tuple[int, int]) -> None:
    """The graph has the expected kernels, each with the expected outputs. A matrix of one row or column looks
    like a vector: outputs of it that are not FP8 may be left to Inductor."""

    def shown(kinds: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(x for x in kinds if 1 not in shape or x in ("copy", "transposed", "amax"))

    if not case.kernels and 1 in shape:
        return
    assert Counter(map(shown, made.kinds)) == Counter(map(shown, case.kernels))


@pytest.mark.cases(test=40, slow=20)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_against_the_reference(name: str, shape: tuple[int, int]) -> None:
    """Dtypes, formats and data take turns: each case runs with all of them."""
    case = CASES[name]
    a, b = SHAPES.index(shape), list(CASES).index(name)
    dtype, cast = list(DTYPES.values())[(a + b) % 3], list(FP8)[(a + b) // 3 % 2]
    # large tiles: the interpreter's time depends on the number of programs, not of elements
    config = {(4097, 17): (256, 32, 8), (3, 4097): (16, 512, 4)}.get(shape)
    if config and name == "delayed_scaling":  # its weight has the other shape
        config = (256, 512, 8)
    graph, _ = made(case, Source(*shape, dtype), cast, config)
    assert_kinds(case, graph, shape)
    for data in case.data if shape == (15, 17) else [case.data[(2 * a + b) % 3]]:
        check(case, graph, case.inputs(Source(*shape, dtype, data)), data)


EVERY_FORMAT = [("weight", dtype, cast) for dtype in DTYPES for cast in (*FP8, *FNUZ)]
EVERY_FORMAT += [("residual", "bf16", "e4m3fnuz"), ("residual", "fp32", "e5m2fnuz")]
EVERY_FORMAT += [("swiglu", "fp16", "e4m3fnuz")]


@pytest.mark.parametrize(("name", "dtype", "cast"), EVERY_FORMAT)
def test_every_dtype_and_format(name: str, dtype: str, cast: str) -> None:
    if cast in FNUZ and OLD_INTERPRETER:
        pytest.skip("Triton's interpreter has no fnuz dtypes before 3.7")
    case = CASES[name]
    for data in ("normal", "extreme"):
        graph, inputs = made(case, Source(33, 60, DTYPES[dtype], data), cast)
        assert_kinds(case, graph, (33, 60))
        check(case, graph, inputs, data)
        # saturated where finite, NaN where not
        if name == "weight" and data == "extreme":
            copy, w = graph.fused(*inputs)[0].to(torch.float32), inputs[0].to(torch.float32)
            assert torch.equal(copy.isnan(), ~w.isfinite())
            assert copy[w.isfinite()].abs().max() == Cast(cast).largest


@every_case
def test_without_kernels(case: Case) -> None:
    """The same graph lowered without generated kernels gives the oracle's bits."""
    source = Source(37, 70, torch.float32)
    graph, inputs = traced(case, source, "e5m2"), case.inputs(replace(source, data="extreme"))
    for i, (a, b) in enumerate(zip(graph(*inputs), unfused(graph)(*inputs), strict=True)):
        assert_bits(a, b, f"result {i} ({case.roles[i]})")


@pytest.mark.cases(test=28, slow=2)
@every_case
def test_other_tiles(case: Case) -> None:
    """No result depends on the tiles, so autotuning changes only the time. Every offset that is added to a
    pointer is 64-bit, except for single numbers."""
    config = [(16, 32, 4), (128, 16, 4)][list(CASES).index(case.name) % 2]
    data = "moderate" if "moderate" in case.data else "extreme"
    graph, inputs = made(case, Source(37, 70, torch.float32, data), "e5m2", config)
    assert_kinds(case, graph, (37, 70))
    with offsets() as widths:
        check(case, graph, inputs, data)
    assert widths == ({8} if case.kernels else set())


@pytest.mark.cases(test=6, slow=2)
@pytest.mark.parametrize("name", CASES)
def test_sizes_as_arguments(name: str) -> None:
    """One kernel, traced for 27 rows of 40 columns, serves any numbers of rows and columns."""
    case = CASES[name]
    graph, _ = made(case, Source(27, 40, torch.bfloat16), "e4m3", mode="symbolic")
    assert_kinds(case, graph, (27, 40))
    if OLD_INTERPRETER and any(re.search(r"in (tl\.)?range", source) for source in graph.sources):
        pytest.skip("Triton's interpreter takes no argument as the end of a range before 3.7, with numpy 2.4")
    shape, data = (((33, 68), case.data[0]), ((129, 20), case.data[2]))[list(CASES).index(name) % 2]
    check(case, graph, case.inputs(Source(*shape, torch.bfloat16, data)), data)


@pytest.mark.cases(test=7, slow=7)
@pytest.mark.parametrize("name", CASES)
def test_no_rows(name: str) -> None:
    """An expert without a token: nothing is read, the transposed copy is only padding, the amax is 0."""
    graph, inputs = made(CASES[name], Source(0, 40, torch.bfloat16), "e4m3")
    check(CASES[name], graph, inputs, "normal")


def _halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The backward of a rotary embedding, as in Hugging Face's models."""
    y = x * sin
    return x * cos + torch.cat([y[..., 8:], -y[..., :8]], -1)


def _tables_of_a_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, two = x[..., :8], x[..., 8:]
    cos, sin = cos[..., :8].clone(), sin[..., :8].clone()
    return torch.cat([one * cos + two * sin, two * cos - one * sin], -1)


def _quarters(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b, c, d = (x[..., i : i + 4] for i in range(0, 16, 4))
    return torch.cat([c, -d, b, a], -1) * sin


def _of_a_wider_one(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.cat([-x[..., 6:10], x[..., 1:5]], -1)


def _of_a_part(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    y = x[..., 3:13] * sin[..., 3:13]
    return torch.cat([y[..., 5:], y[..., :5]], -1)


@pytest.mark.parametrize(
    ("function", "loads"),
    [(_halves, 4), (_tables_of_a_half, 4), (_quarters, 4), (_of_a_wider_one, 2), (_of_a_part, 2)],
)
def test_exchanged_parts_are_read_once(function: Any, loads: int) -> None:
    """Each input is read once for each place of a row at which an element needs it, which halves of the whole
    share."""

    def graph(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: torch.Tensor) -> tuple:
        y = function(x, cos[:, None], sin[:, None])
        return Cast().both(y.view(y.shape[0], y.shape[1] * y.shape[2]), scale)

    s = Source(37, 48, torch.bfloat16, "extreme")
    inputs = (s(37, 3, 16), s(37, 16), s(37, 16), s.scale())
    made = fused(trace(graph, inputs), (16, 32, 4))
    assert made.kinds == (("copy", "transposed"),)
    assert made.sources[0].count("tl.load(x") == loads
    for i, (a, b) in enumerate(zip(made.oracle(*inputs), made.fused(*inputs), strict=True)):
        assert_bits(a, b, f"result {i}")


def test_equal_sizes_as_arguments() -> None:
    """Sizes that were equal during tracing become one symbol, and the number of rows is its square."""
    case = CASES["positions"]

    def inputs(batch: int, tokens: int, columns: int) -> tuple:
        s = Source(batch * tokens, columns, torch.bfloat16)
        return s(batch, tokens, columns), s(tokens, columns), s.column(), s(batch, tokens, 1), s.scale()

    graph = fused(trace(lambda *x: case.call(Cast(), *x), inputs(5, 5, 24), "symbolic"))
    assert_kinds(case, graph, (25, 24))
    check(case, graph, inputs(7, 7, 40), "normal")


@pytest.mark.parametrize(("hip", "most"), [(None, 32), ("7.0", 16)])
def test_a_program_has_1024_threads_at_most(
    hip: str | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An AMD warp has 64 threads, so fewer warps are allowed."""
    monkeypatch.setattr(torch.version, "hip", hip)
    source = f"import triton\n\n\n@triton.jit\ndef probe(x, BLOCK_R, BLOCK_C):  # {most}\n    pass\n"
    made = launch.tuned(compat.triton.load_kernel("probe", source), blocks.HEAVY_TILES)
    assert max(config.num_warps for config in made.configs) == most
