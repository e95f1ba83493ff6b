"""Kernels of the finer recipes against the reference operators, on a CPU by Triton's interpreter.

A kernel also returns the value of its producer. The reference operators run on that value, so copies, scales
and inverses are equal bit by bit, even if an exponential comes from another library.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8compile.codegen import blocks, text, walks
from fp8compile.ir import ops
from fp8compile.passes.fuse import fuse
from tests.support import hooks
from tests.support.groups import DTYPES, Made, Source, fused, trace
from tests.support.interpreter import OLD_INTERPRETER, kernels_on_cpu
from tests.support.kernel_checks import assert_bits, assert_close, layout

aten = torch.ops.aten
E4M3 = (torch.float8_e4m3fn, 448.0)
BLOCKS = {"rowwise": [1, 0], "blockwise": [1, 128], "square": [128, 128], "mxfp8": [1, 32], "tile": [32, 32]}
SHAPES = ((1, 128), (15, 17), (150, 170), (33, 300), (257, 40), (128, 128), (17, 1))

every_recipe = pytest.mark.parametrize("recipe", BLOCKS)


def scales(
    x: Tensor, transposed: bool, block: Sequence[int], power_of_2: bool | None = None, margin: int = 0
) -> tuple:
    """(scale, inverse) of a copy, from its own amaxes."""
    power_of_2 = block[1] > 0 if power_of_2 is None else power_of_2
    scale = ops.current_scale(ops.amax_blocks(x, transposed, block), 448.0, margin, power_of_2)
    return scale, ops.inverse(scale)


def both(x: Tensor, recipe: str, **how: Any) -> tuple[Tensor, ...]:
    """Both copies of a tensor and the inverses of their scales, as in the joint graph."""
    block = BLOCKS[recipe]
    scale, inverse = scales(x, False, block, **how)
    if recipe in ("square", "tile"):
        other, other_inverse = scale.permute(1, 0), inverse.permute(1, 0)
    else:
        other, other_inverse = scales(x, True, block, **how)
    return *ops.quantize_both(x, scale, *E4M3, other, block), inverse, other_inverse


def check(made: Made, inputs: tuple, expected: Sequence[Tensor] | None = None) -> tuple:
    """Compares bit by bit; returns the results."""
    with torch.no_grad():
        got = made.fused(*inputs)
        expected = made.oracle(*inputs) if expected is None else expected
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert (a.shape, a.dtype, layout(a)) == (b.shape, b.dtype, layout(b)), f"result {i}"
        assert_bits(a, b, f"result {i}")
    return got


def made_of(
    function: Callable, inputs: tuple, mode: str = "fake", config: tuple[int, int, int] | None = None
) -> Made:
    return fused(trace(lambda *x: function(*x), inputs, mode), config)


KERNELS = {  # recipe: the outputs of each kernel
    "rowwise": ["copy row column_amax", "transposed"],
    "blockwise": ["copy transposed blocks blocks"],
    "square": ["copy transposed blocks"],
    "mxfp8": ["copy transposed blocks blocks"],
    "tile": ["copy transposed blocks"],
}


def assert_kernels(made: Made, *kernels: str) -> None:
    assert Counter(made.kinds) == Counter(tuple(sorted(x.split())) for x in kernels)


# -- plain tensors --


@pytest.mark.cases(test=18)
@every_recipe
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_in_memory(recipe: str, shape: tuple[int, int]) -> None:
    dtype = list(DTYPES.values())[(SHAPES.index(shape) + list(BLOCKS).index(recipe)) % 3]
    made = made_of(lambda x: both(x, recipe), (Source(*shape, dtype).full(),))
    assert_kernels(made, *KERNELS[recipe])
    for data in ("normal", "extreme"):
        got = check(made, (Source(*shape, dtype, data).full(),))
    rows = shape[0]
    assert not got[1][:, rows:].view(torch.uint8).any(), "padding"


@pytest.mark.cases(test=1, slow=2)
@every_recipe
def test_blocks_of_one_number(recipe: str) -> None:
    """Zeros, denormals, values whose scale would overflow, infinities and NaN: alone in a block, and beside
    other numbers."""
    made = None
    for value in (0.0, 1e-40, 2.0**-126, 3e38, math.inf, math.nan):
        x = torch.full((130, 140), value)
        x[:70, :70] = Source(70, 70, torch.float32).full()
        x[3, 5] = value
        made = made or made_of(lambda x: both(x, recipe), (x,), config=(256, 256, 8))
        check(made, (x,))


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize(("fp8_max", "margin"), [(448.0, 0), (240.0, 3), (57344.0, 0), (448.0, 64)])
def test_a_scale_is_that_of_the_state_for_every_amax(fp8_max: float, margin: int, power_of_2: bool) -> None:
    """One division in float32 equals the rounded float64 division, also for denormals and overflows. One
    number a block."""

    def call(x: Tensor) -> tuple:
        scale = ops.current_scale(ops.amax_blocks(x, False, [1, 32]), fp8_max, margin, power_of_2)
        return scale, ops.inverse(scale), ops.quantize(x, scale, torch.float8_e4m3fn, 448.0, False, [1, 32])

    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (20_000,), generator=generator).to(torch.int32)
    edges = torch.arange(-1, 2)[:, None] + (torch.arange(0, 256) << 23)[None, :]  # around each power of two
    x = torch.cat([bits, edges.flatten().clamp(0).to(torch.int32)]).view(torch.float32)[:, None]
    made = made_of(call, (x,), config=(4096, 32, 4))
    assert_kernels(made, "blocks blocks copy")
    check(made, (x,))


@pytest.mark.cases(test=1, slow=2)
@every_recipe
@pytest.mark.parametrize("config", [(128, 128, 8), (256, 128, 8), (128, 256, 8)], ids=str)
def test_other_tiles(recipe: str, config: tuple[int, int, int]) -> None:
    """Also of sizes that smaller tiles divide."""
    for shape in ((150, 300), (192, 128)):
        x = Source(*shape, torch.bfloat16, "extreme").full()
        check(made_of(lambda x: both(x, recipe, margin=1, power_of_2=False), (x,), config=config), (x,))


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_no_rows(recipe: str) -> None:
    x = torch.zeros(0, 40, dtype=torch.bfloat16)
    check(made_of(lambda x: both(x, recipe), (x,)), (x,))


@pytest.mark.cases(test=2, slow=2)
@every_recipe
def test_sizes_as_arguments(recipe: str) -> None:
    """One kernel, traced for 27 rows of 140 columns, serves any numbers of rows and columns."""
    if OLD_INTERPRETER and recipe == "rowwise":
        pytest.skip("Triton's interpreter takes no argument as the end of a range before 3.7, with numpy 2.4")
    made = made_of(lambda x: both(x, recipe), (Source(27, 140, torch.bfloat16).full(),), "symbolic")
    assert_kernels(made, *KERNELS[recipe])
    for shape in ((129, 40), (130, 140)):
        check(made, (Source(*shape, torch.bfloat16, "extreme").full(),))


# -- producers --


def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    wide = x.to(torch.float32)
    rstd = (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    return (wide * rstd * weight).to(x.dtype), rstd


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    var, mean = torch.var_mean(x.to(torch.float32), [-1], correction=0, keepdim=True)
    rstd = (var + 1e-5).rsqrt()
    return ((x.to(torch.float32) - mean) * rstd * weight + bias).to(x.dtype), mean, rstd


def gelu_backward(dy: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    dx = aten.gelu_backward(dy, x, approximate="tanh")
    return dx, dx.sum(0)


PRODUCERS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[[Source], tuple], str]] = {
    "residual": (lambda x, y: (x + y,), lambda s: (s.full(), s.full()), ""),
    "swiglu": (lambda gate, up: (F.silu(gate) * up,), lambda s: (s.full(), s.full()), ""),
    "gelu_backward": (gelu_backward, lambda s: (s.full(), s.full()), "sum"),
    "rms_norm": (rms_norm, lambda s: (s.full(), s.column()), "row"),
    "layer_norm": (layer_norm, lambda s: (s.full(), s.column(), s.column()), "row row"),
}


def apart(recipe: str, name: str) -> bool:
    """Whether the sums over rows are in their own kernel: a program cannot hold a block's whole rows."""
    return BLOCKS[recipe][1] == 128 and name.endswith("norm")


@pytest.mark.cases(test=3, slow=3)
@every_recipe
@pytest.mark.parametrize("name", PRODUCERS)
def test_behind_a_producer(recipe: str, name: str) -> None:
    """The kernel casts the producer's value, and that value equals the operators' up to a rounding."""
    produce, inputs, more = PRODUCERS[name]
    place = list(PRODUCERS).index(name) + list(BLOCKS).index(recipe)
    shape, dtype = [(150, 140), (33, 300), (15, 17)][place % 3], [torch.bfloat16, torch.float32][place % 2]

    def call(*given: Tensor) -> tuple:
        y, *others = produce(*given)
        return y, *others, *both(y, recipe)

    made = made_of(call, inputs(Source(*shape, dtype)))
    first, *second = KERNELS[recipe]
    if apart(recipe, name):
        assert_kernels(made, f"value {more}", first)
    else:
        assert_kernels(made, f"{first} value {more}", *second)
    given = inputs(Source(*shape, dtype, "normal", seed=7))
    with torch.no_grad():
        y, *others = made.fused(*given)[: 1 + len(more.split())]
        expected = made.oracle(*given)
        check(made, given, [y, *others, *both(y, recipe)])
    for i, (a, b) in enumerate(zip(expected, [y, *others], strict=False)):
        assert_close(a, b, 32.0 * max(shape), f"result {i}")


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("width", [32, 128])
def test_whole_rows_with_scales_of_their_parts(name: str, width: int, monkeypatch: Any) -> None:
    """A program holds whole rows where the cache does not, also such as are shorter than a block."""
    monkeypatch.setattr(blocks, "evicted", lambda group: True)
    produce, inputs, more = PRODUCERS[name]

    def cast(y: Tensor) -> tuple:
        scale, inverse = scales(y, False, [1, width])
        return ops.quantize(y, scale, *E4M3, False, [1, width]), inverse

    def call(*given: Tensor) -> tuple:
        y, *others = produce(*given)
        return y, *others, *cast(y)

    for shape in ((33, 300), (70, 17)):
        given = inputs(Source(*shape, torch.bfloat16))
        made = made_of(call, given)
        assert_kernels(made, f"copy blocks value {more}")
        assert not walks.loops(made.sources[0])
        with torch.no_grad():
            y, *others = made.fused(*given)[: 1 + len(more.split())]
            check(made, given, [y, *others, *cast(y)])
            for i, (a, b) in enumerate(zip(made.oracle(*given), [y, *others], strict=False)):
                assert_close(a, b, 32.0 * max(shape), f"result {i}")


@pytest.mark.parametrize("width", [32, 128])
def test_loops_with_scales_of_parts_of_a_row(width: int) -> None:
    """A tile of 256 columns would take 81 instructions an element, with twice the registers, this one 30."""

    def call(*given: Tensor) -> tuple:
        y, _ = rms_norm(*given)
        return ops.quantize(y, scales(y, False, [1, width])[0], *E4M3, False, [1, width]), y

    graph = trace(call, PRODUCERS["rms_norm"][1](Source(150, 300, torch.bfloat16))).graph
    with kernels_on_cpu(), hooks.generated() as (kernels, _):
        fuse(graph)
    assert blocks.configurations(kernels[0].group)[0] == (32, 128, 8)


@pytest.mark.parametrize("block", [None, [1, 32], [1, 128]], ids=str)
@pytest.mark.parametrize("columns", [40, 100, 128, 200, 256, 300])
def test_every_configuration_that_autotuning_may_choose(columns: int, block: list[int] | None) -> None:
    """One source serves them: masks and loops are those of the default. Sums of small integers are exact."""

    def call(x: Tensor, weight: Tensor) -> tuple:
        y, rstd = rms_norm(x, weight)
        if block is None:
            return y, rstd, ops.quantize(y, x.new_ones(1).float(), *E4M3, False), ops.amax(y)
        scale, inverse = scales(y, False, block)
        return y, rstd, ops.quantize(y, scale, *E4M3, False, block), inverse

    x, weight = PRODUCERS["rms_norm"][1](Source(70, columns, torch.bfloat16))
    given = (x.clamp(-8, 8).round(), weight)
    gm = trace(call, given)
    with torch._inductor.config.patch(max_autotune=True), torch.no_grad():
        default, *others = (fused(gm, other=other).fused(*given) for other in range(3))
    for found in others:
        for i, (a, b) in enumerate(zip(default, found, strict=True)):
            assert_bits(a, b, f"result {i}")


READERS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {  # and whether the rounding is written
    "matmul": (lambda y: y.to(torch.bfloat16) @ y.new_ones(y.shape[1], 8).to(torch.bfloat16), True),
    "pointwise": (lambda y: y.to(torch.bfloat16) + 1, False),
    "wider": (lambda y: y.to(torch.float32) @ y.new_ones(y.shape[1], 8).float(), False),
    "integers": (lambda y: y.to(torch.int8), False),
    "raw": (lambda y: y.to(torch.float8_e4m3fn), False),
}


@pytest.mark.parametrize("name", READERS)
def test_roundings_that_others_read(name: str) -> None:
    """The kernel of the cast, which reads the value before it is rounded, writes them, unless computing one
    again costs less."""
    read, written = READERS[name]

    def call(x: Tensor) -> tuple:
        y = (x if name == "wider" else x.to(torch.float32)) * 3
        scale, inverse = scales(y, False, [1, 128])
        return ops.quantize(y, scale, *E4M3, False, [1, 128]), inverse, read(y)

    x = Source(70, 140, torch.bfloat16).full()
    made = made_of(call, (x,))
    assert_kernels(made, "copy blocks" + " value" * written)
    assert "x1" not in made.sources[0]
    check(made, (x,))


# -- scales in memory --


@pytest.mark.cases(test=8, slow=4)
@every_recipe
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("shape", "mode"), [((150, 170), "fake"), ((40, 300), "symbolic"), ((33, 17), "fake")], ids=str
)
def test_a_scale_from_memory(recipe: str, transposed: bool, shape: tuple[int, int], mode: str) -> None:
    """The backward casts a tensor that the forward has not kept, with a scale that the forward has saved."""
    block = BLOCKS[recipe]

    def call(x: Tensor, y: Tensor, scale: Tensor) -> tuple:
        return (ops.quantize(x * y, scale.t() if recipe == "square" else scale, *E4M3, transposed, block),)

    source = Source(*shape, torch.bfloat16, "extreme")
    x, y = source.full(), source.full()
    scale = scales(x, transposed, block)[0]
    given = (x, y, scale.t().contiguous() if recipe == "square" else scale)
    made = made_of(call, given, mode)
    assert_kernels(made, "transposed" if transposed else "copy")
    check(made, given)


def scales_alone(recipe: str) -> Callable[[Tensor], tuple]:
    """The forward saves the scales of a copy that the backward makes."""

    def call(x: Tensor) -> tuple:
        scale, inverse = scales(x, False, BLOCKS[recipe])
        later = scales(x, True, BLOCKS[recipe])
        return ops.quantize(x, scale, *E4M3, False, BLOCKS[recipe]), inverse, *later

    return call


def of_rows_and_whole(w: Tensor) -> tuple:
    """rowwise_with_gw_hp: fprop's copy has a scale a row, dgrad's transposed one has one for all."""
    scale, inverse = scales(w, False, [1, 0])
    whole = ops.current_scale(ops.amax(w), 448.0, 0)
    plain, turned = ops.quantize(w, scale, *E4M3, False, [1, 0]), ops.quantize(w, whole, *E4M3, True)
    return plain, inverse, turned, ops.inverse(whole)


def two_recipes(x: Tensor) -> tuple:
    """Readers with different recipes: one read makes three copies, with three kinds of scales."""
    turned = ops.quantize(x, x.new_ones(1).float(), *E4M3, True)
    return *both(x, "mxfp8"), *both(x, "blockwise")[:2], turned, ops.amax(x)


def both_gradients(x: Tensor) -> tuple:
    """Of a gated activation: two matrices in one walk, each with a bias gradient. Small sums are exact."""
    dy = x.float().nan_to_num(0, 0, 0).clamp(-2, 2).round().to(x.dtype)
    return *both(dy * 2, "mxfp8"), *both(dy * dy, "mxfp8"), (dy * 2).sum(0), (dy * dy).sum(0)


MIXED: dict[str, tuple[Callable[[Tensor], tuple], list[str]]] = {
    **{f"scales alone, {recipe}": (scales_alone(recipe), ["copy blocks blocks blocks"]) for recipe in BLOCKS},
    "scales alone, rowwise": (scales_alone("rowwise"), ["copy row column_amax"]),
    "only scales of rows": (lambda x: scales(x, False, [1, 0]), ["row row"]),
    "only scales of blocks": (lambda x: scales(x, False, [1, 32]), ["blocks blocks"]),
    "of rows and whole": (of_rows_and_whole, ["copy row amax", "transposed number"]),
    "two recipes": (two_recipes, ["copy transposed blocks blocks copy transposed transposed amax"]),
    "both gradients": (
        both_gradients,
        ["copy transposed blocks blocks copy transposed blocks blocks sum sum"],
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_scales_and_copies_that_differ(name: str) -> None:
    function, kernels = MIXED[name]
    x = Source(140, 150, torch.bfloat16, "normal" if name == "both gradients" else "extreme").full()
    made = made_of(function, (x,))
    assert_kernels(made, *kernels)
    check(made, (x,))


# -- choices --


def test_more_bytes_than_inductor_would_move_stay_with_it() -> None:
    x = Source(256, 384, torch.bfloat16).full()
    with hooks.traffic() as noted:
        assert made_of(lambda x: both(x, "mxfp8"), (x,)).kinds
    ((ours, inductors),) = noted
    # it reads a second time for the blocks of columns
    assert 4 * x.numel() < ours < inductors < 8 * x.numel()
    with hooks.traffic((2, 1)):
        made = made_of(lambda x: both(x, "mxfp8"), (x,))
    assert not made.kinds
    check(made, (x,))


@pytest.mark.slow
@every_recipe
@pytest.mark.parametrize("name", ["residual", "gelu_backward", "layer_norm"])
def test_tiles_hold_whole_blocks(recipe: str, name: str) -> None:
    """True of every configuration that autotuning may choose. None is larger than what masks are made for."""
    produce, inputs, _ = PRODUCERS[name]
    graph = trace(lambda *x: both(produce(*x)[0], recipe), inputs(Source(150, 140, torch.bfloat16))).graph
    with kernels_on_cpu(), hooks.generated() as (kernels, _):
        fuse(graph)
    assert kernels
    for group in (kernel.group for kernel in kernels):
        with torch._inductor.config.patch(max_autotune=True):
            configs = blocks.configurations(group)
        assert configs and (not group.sums or len({rows for rows, _, _ in configs}) == 1)
        for rows, columns, _ in configs:
            assert rows % group.block[0] == 0 and columns % group.block[1] == 0
            assert text.MOST_ROWS % rows == 0 and text.MOST_COLUMNS % columns == 0
