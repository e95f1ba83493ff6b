"""Matmuls of operands with several scales by ATen: layouts of scales, and the emulation.

The matmuls are traced with fake CUDA tensors, so ATen checks their layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.codegen import lowerings, scaled_mm, scaled_mm_kind
from fp8compile.codegen.inline import Inliner
from fp8compile.codegen.scaled_mm_kind import AFTER, EMULATED, TRITON
from fp8compile.config.recipe import ROW, WHOLE
from fp8compile.devices.formats import fnuz
from fp8compile.devices.gpu import Gpu, gpu_of
from fp8compile.ir import ops
from tests.support import hooks
from tests.support.operands import (
    B200,
    BF16,
    E4M3,
    F16,
    F32,
    FNUZ,
    H100,
    LINE,
    MI300X,
    MX_BLOCK,
    MX_TILE,
    SQUARE,
    operand,
)


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (200, 9), (384, 16), (1000, 40)], ids=str)
def test_swizzle(shape: tuple[int, int]) -> None:
    """The order is torchao's, and so are the E8M0 values, from 2**-127 to 2**127."""
    from torchao.prototype.mx_formats.utils import to_blocked

    exponents = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(0))
    exponents.flatten()[0] = -127
    inverse = torch.ldexp(torch.ones(shape), exponents)
    expected = to_blocked((exponents + 127).to(torch.uint8))
    got = lowerings.swizzled(inverse, shape[0], 1)
    assert got.dtype == torch.float8_e8m0fnu and got.is_contiguous()
    assert torch.equal(got.view(torch.uint8), expected)
    assert torch.equal((exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu).to(F32), inverse)


@pytest.mark.parametrize("shape", [(128, 128), (16, 32), (208, 288), (384, 512), (1000, 1280)], ids=str)
@pytest.mark.parametrize("flipped", [False, True])
def test_swizzle_of_tiles(shape: tuple[int, int], flipped: bool) -> None:
    """The scale of 32 x 32 elements is that of 1 x 32 in each of its rows, also where the scales are a
    permuted view."""
    copy, inverse = operand(*shape, MX_TILE)
    given = inverse.t().contiguous().t() if flipped else inverse
    every_row = inverse.repeat_interleave(32, 0)[: shape[0]]
    got, expected = lowerings.swizzled(given, shape[0], 32), lowerings.swizzled(every_row, shape[0], 1)
    inside = lowerings.swizzled(torch.full_like(every_row, 2.0**-126), shape[0], 1).view(torch.uint8) > 0
    assert got.shape == expected.shape and got.is_contiguous() and inside.any()
    assert torch.equal(got.view(torch.uint8)[inside], expected.view(torch.uint8)[inside])


@pytest.mark.parametrize("k", [64, 48])
def test_emulation_is_exact(k: int) -> None:
    """Every E4M3 number times any power of two is exact in bf16, so bf16 matmuls give exact results."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).to(F32).nan_to_num(0.0).repeat(k // 16)
    a = codes.view(16 * k // 16, -1)[:, :16].repeat(1, k // 16).to(E4M3)
    inverse = 2.0 ** torch.arange(-100, 100).to(F32)[: a.shape[0] * ops.blocks(k, 32)].view(a.shape[0], -1)
    values, rows = scaled_mm.dequantized(a, inverse, MX_BLOCK)
    assert rows is None and values.dtype == BF16
    assert torch.equal(values.to(F32), a.to(F32) * ops.spread(inverse, a.shape, MX_BLOCK))
    (a, a_inv), (b, b_inv) = operand(33, k, MX_BLOCK), operand(32, k, MX_BLOCK, seed=1)
    x, y = (scaled_mm.dequantized(*given, MX_BLOCK)[0].to(F32) for given in ((a, a_inv), (b, b_inv)))
    assert torch.equal(x @ y.t(), ops.block_product(a, b, a_inv, b_inv, None, F32, False, MX_BLOCK, MX_BLOCK))


def product(blocks: tuple[Any, Any], out_dtype: torch.dtype) -> Callable[..., Tensor]:
    def call(a: Tensor, a_inv: Tensor, b: Tensor, b_inv: Tensor, *bias: Tensor) -> Tensor:
        return ops.block_mm(a, b, a_inv, b_inv, *(*bias, None)[:1], out_dtype, False, *map(list, blocks))

    return call


def graph_of(
    sizes: tuple[int, int, int],
    blocks: tuple[Any, Any],
    bias: torch.dtype | None,
    out_dtype: torch.dtype,
    gpu: Gpu,
    dtype: torch.dtype = E4M3,
) -> GraphModule:
    """An `ops.block_mm` on fake CUDA tensors, traced and lowered: ATen has checked the arguments."""
    m, n, k = sizes
    given = [*operand(m, k, blocks[0], dtype), *operand(n, k, blocks[1], dtype)]
    given += [torch.zeros(n, dtype=bias)] if bias is not None else []
    mode = FakeTensorMode()

    def moved(x: Tensor) -> Tensor:
        with mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

    call = product(blocks, out_dtype)
    with mock.patch("torch._subclasses.fake_tensor.init_gpu_context", lambda *_: None, create=True):
        traced = make_fx(call)(*map(moved, given))
        (node,) = traced.graph.find_nodes(op="call_function", target=ops.block_mm)
        properties = mock.Mock(shared_memory_per_block_optin=227 << 10)
        with hooks.matmuls_for(gpu), mock.patch("torch.cuda.get_device_properties", lambda *_: properties):
            result = scaled_mm.lower_mm(node, Inliner())
    node.replace_all_uses_with(result)
    traced.graph.erase_node(node)
    traced.graph.lint()
    traced.recompile()
    assert result.meta["val"].dtype == out_dtype and str(result.meta["val"].device) == "cuda:0"
    return traced


def test_other_threads_may_call_compiled_functions_meanwhile() -> None:
    """A lowering is traced by fx. Up to torch 2.13, compiled functions ask one flag of the process."""
    compiled = torch.compile(torch.sin, backend="eager")
    x, found = torch.ones(3), []
    compiled(x)

    def function(t: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as other:
            found.append(other.submit(compiled, x).result())
        return t.cos()

    graph = make_fx(torch.exp, tracing_mode="fake")(x).graph
    (given,), (output,) = (graph.find_nodes(op=op) for op in ("placeholder", "output"))
    Inliner()(output, function, given)
    assert torch.equal(found[0], x.sin())


def product_of(graph: Graph) -> tuple[Any, ...]:
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default)
    return tuple(x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in node.args)


def layout(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(x.shape), tuple(x.stride())


def test_the_scale_of_one_row_is_found_in_its_vector() -> None:
    """`as_strided` counts from the storage's beginning, so a view of one of many scales is copied."""
    inverses = torch.tensor([8.0, 0.5, 2.0])
    zeros = torch.zeros(1, 32)
    given = scaled_mm.ScaledProduct(zeros, zeros, inverses[1:2], inverses[2:3], None, BF16, False)
    with hooks.scales_of_products() as scales:
        scaled_mm.rowwise(given)
    assert [x.item() for x in scales] == [0.5, 2.0]


ROWS = [((40, 1), (1, 1)), ((1, 64), (64, 1))]
BLOCKS = {"sizes": (256, 192, 512), "bias": None}
# operands, what else is given, layouts of the scales
GRAPHS: dict[str, tuple[tuple[Any, Any], dict[str, Any], list[Any]]] = {
    "rows": ((ROW, ROW), {}, ROWS),
    "rows and one": ((ROW, WHOLE), {}, ROWS),
    "one and rows": ((WHOLE, ROW), {}, ROWS),
    "rows, scaled after": (
        (ROW, WHOLE),
        {"bias": None, "out": F16, "gpu": MI300X, "dtype": FNUZ},
        [((1, 1), (1, 1))] * 2,
    ),
    # scales of 1 x 128 blocks are contiguous along the rows, scales of 128 x 128 blocks along K
    "lines and squares": ((LINE, SQUARE), BLOCKS, [((256, 4), (1, 256)), ((4, 2), (1, 4))]),
    "squares and lines": ((SQUARE, LINE), BLOCKS, [((2, 4), (4, 1)), ((4, 192), (192, 1))]),
    "lines": (
        (LINE, LINE),
        {"sizes": (256, 192, 384), "bias": None, "out": F32},
        [((256, 3), (1, 256)), ((3, 192), (192, 1))],
    ),
    # tensor cores take a tile as 32 blocks with one scale
    **{
        f"mx {k} {i}": (pair, {"sizes": (200, 144, k), "gpu": B200}, [((2 * 128 * 4,), (1,))] * 2)
        for k in (64, 48)
        for i, pair in enumerate(itertools.product((MX_BLOCK, MX_TILE), repeat=2))
    },
}


@pytest.mark.parametrize("name", GRAPHS)
def test_the_layout_of_scales(name: str) -> None:
    """ATen's matmul gets the layouts that it needs; K is padded as cuBLASLt needs it for MX."""
    pair, given, scales = GRAPHS[name]
    given = {"sizes": (40, 64, 48), "bias": BF16, "out": BF16, "gpu": H100, **given}
    (m, n, k), out = given["sizes"], given.pop("out")
    a, b, *rest = product_of(graph_of(blocks=pair, out_dtype=out, **given).graph)
    k = -(-k // 32) * 32 if name.startswith("mx") else k
    assert layout(a) == ((m, k), (k, 1)) and layout(b) == ((k, n), (1, k))
    assert [layout(x) for x in rest[:2]] == scales
    assert {x.dtype for x in rest[:2]} == {torch.float8_e8m0fnu if name.startswith("mx") else F32}
    assert rest[4] == (F32 if "after" in name else out)


def test_a_bias_of_another_dtype_is_added_after() -> None:
    for bias, out_dtype in ((F32, BF16), (F32, F32), (BF16, F16)):
        args = product_of(graph_of((40, 64, 48), (ROW, ROW), bias, out_dtype, H100).graph)
        assert args[4] is None and args[6] == F32


@pytest.mark.parametrize(("bias", "out", "overload"), [(None, BF16, "default"), (BF16, F16, "dtype")])
def test_emulated_graph(bias: torch.dtype | None, out: torch.dtype, overload: str) -> None:
    graph = graph_of((40, 64, 48), (MX_BLOCK, MX_BLOCK), bias, out, H100).graph
    (mm,) = graph.find_nodes(op="call_function", target=getattr(torch.ops.aten.mm, overload))
    assert {x.meta["val"].dtype for x in mm.args[:2]} == {BF16}
    assert mm.meta["val"].dtype == (F32 if bias else BF16)


def swizzled(inverse: Tensor) -> Tensor:
    return lowerings.swizzled(inverse, inverse.shape[0], 1)


def tiles(inverse: Tensor) -> Tensor:
    return lowerings.swizzled(inverse, 32 * inverse.shape[0], 32)


FORMS = [(swizzled, True), (tiles, False), (tiles, True)]
FORMS += [(lowerings.columns_first, True), (lowerings.rows_first, False)]


@pytest.mark.parametrize(("form", "flipped"), FORMS)
def test_scales_of_sizes_that_are_symbols(form: Callable[[Tensor], Tensor], flipped: bool) -> None:
    """Traced with a K of one block, a graph is right for any number of blocks: it is not specialised."""

    def call(x: Tensor) -> Tensor:
        amax = ops.amax_blocks(x, False, list(LINE))
        return form(amax.t() if flipped else amax)

    graph = make_fx(call, tracing_mode="symbolic")(torch.ones(40, 48))
    for shape in ((40, 48), (33, 272), (130, 1040)):
        x = torch.randn(shape)
        expected, got = call(x), graph(x)
        assert expected.shape == got.shape and got.is_contiguous()
        assert torch.equal(expected.to(F32), got.to(F32))


# -- on a device --

PAIRS = [(ROW, ROW), (ROW, WHOLE), (LINE, SQUARE), (SQUARE, LINE), (LINE, LINE), (SQUARE, SQUARE)]
PAIRS += [(MX_BLOCK, MX_BLOCK), (MX_BLOCK, MX_TILE)]
OTHER_WAYS = {ROW: [AFTER], WHOLE: [AFTER], LINE: [TRITON], SQUARE: [TRITON], MX_BLOCK: [EMULATED]}


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("sizes", [(512, 384, 1024), (37, 144, 272), (1, 256, 16)], ids=str)
@pytest.mark.parametrize(
    ("out_dtype", "bias"), [(BF16, BF16), (BF16, None), (F32, None), (F16, F32)], ids=str
)
def test_on_a_device(
    pair: tuple, sizes: tuple[int, int, int], out_dtype: torch.dtype, bias: torch.dtype | None
) -> None:
    """The device's own implementation, and those of other devices, against the reference on the device.
    Tensor cores keep about 14 bits of a sum of FP8 products."""
    m, n, k = sizes
    dtype = FNUZ if fnuz() else E4M3
    given = [x.cuda() for x in (*operand(m, k, pair[0], dtype), *operand(n, k, pair[1], dtype, seed=1))]
    given[1::2] = [x.clamp(max=0.25) for x in given[1::2]]  # fp16 ends at 65504
    given += [torch.randn(n, dtype=bias, device="cuda")] if bias is not None else []

    call = product(pair, out_dtype)
    expected = call(*given)
    assert expected.isfinite().all()
    absolute = [x.to(F32).abs().to(dtype) for x in given[:4:2]]
    terms = ops.block_product(absolute[0], absolute[1], given[1], given[3], None, F32, False, *pair)
    gpu, made = gpu_of(torch.device("cuda", 0)), F32 if bias == F32 else out_dtype
    first = scaled_mm_kind.how(gpu, *pair, m, n, k, made)
    for way in dict.fromkeys((first, *OTHER_WAYS[pair[0]])):
        graph = make_fx(call, tracing_mode="fake")(*given)
        (node,) = graph.graph.find_nodes(op="call_function", target=ops.block_mm)
        with hooks.block_mm_by(way):
            node.replace_all_uses_with(scaled_mm.lower_mm(node, Inliner()))
        graph.graph.erase_node(node)
        graph.recompile()
        got = graph(*given)
        error = (got.to(F32) - expected.to(F32)).abs()
        allowed = 2.0**-10 * terms + 2 * torch.finfo(out_dtype).eps * expected.to(F32).abs()
        assert (error <= allowed).all(), way
