"""Matmuls of operands with several scales: the choice between ATen and our kernel, and our kernel against
`ops.block_product`.

The kernel runs in Triton's interpreter, and is compiled to machine code for each GPU. test_scaled_mm.py tests
the ATen calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fp8compile.codegen import block_gemm, scaled_mm, triton_kernels
from fp8compile.codegen.scaled_mm_kind import AFTER, BLOCKWISE, EMULATED, MX, REFERENCE, ROWWISE, TRITON, how
from fp8compile.config.recipe import ROW, WHOLE
from fp8compile.devices.gpu import Gpu
from fp8compile.ir import ops
from tests.support import hooks, interpreter
from tests.support.interpreter import OLD_INTERPRETER
from tests.support.kernel_checks import assert_close
from tests.support.machine_code import SHARED, TARGETS, compile_function, resources
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
    RTX4090,
    RTX5090,
    SQUARE,
    operand,
)

PAIRS = list(itertools.product((LINE, SQUARE), repeat=2))

CPU = None


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    """Makes every version of torch choose as a build with a new CUDA does."""
    with hooks.cuda_version(13, 0):
        yield


def magnitudes(a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, a_block: Any, b_block: Any) -> Tensor:
    """For each element of the result, the sum of the magnitudes of its terms."""
    absolute = [x.to(F32).abs() for x in (a, b)]
    return ops.block_product(*absolute, a_inv, b_inv, None, F32, False, a_block, b_block).to(torch.float64)


# -- the choice --


BIG = (4096, 4096, 4096)
# the way, GPUs, pairs of blocks, and what is not (64, 64, 64)
CHOICES: list[tuple[str, list[Any], Any, dict[str, Any]]] = [
    (ROWWISE, [H100, B200, MI300X], [(ROW, ROW), (ROW, WHOLE), (WHOLE, ROW)], {}),
    (ROWWISE, [H100], [(ROW, ROW)], {"out_dtype": F32}),  # cuBLASLt
    (AFTER, [MI300X], [(ROW, ROW)], {"out_dtype": F32}),
    (AFTER, [MI300X], [(ROW, ROW)], {"out_dtype": F16}),
    # Hopper with an old CUDA needs fast accumulation
    (ROWWISE, [H100], [(ROW, ROW)], {"out_dtype": BF16, "fast_accum": True, "cuda": (12, 6)}),
    (AFTER, [H100], [(ROW, ROW)], {"out_dtype": BF16, "fast_accum": False, "cuda": (12, 6)}),
    # CUTLASS writes float32 in newer versions of torch
    (AFTER, [RTX4090, B200], [(ROW, ROW)], {"out_dtype": F32, "torch": "2.14.1"}),
    (ROWWISE, [RTX4090, B200], [(ROW, ROW)], {"out_dtype": F32, "torch": "2.15.0+cu132"}),
    (ROWWISE, [RTX4090, B200], [(ROW, ROW)], {"out_dtype": F16, "torch": "2.14.1"}),
    # blocks are cuBLAS's on Hopper where its sizes fit; it has no pair of squares
    (BLOCKWISE, [H100], [(LINE, SQUARE), (SQUARE, LINE), (LINE, LINE)], {"sizes": BIG}),
    (BLOCKWISE, [H100], [(LINE, LINE)], {"sizes": (4096, 4096, 128)}),
    (TRITON, [H100], [(LINE, SQUARE)], {"sizes": (4096, 4096, 768)}),
    (TRITON, [H100], [(LINE, SQUARE)], {"sizes": (4097, 4096, 4096)}),
    (TRITON, [H100], [(LINE, SQUARE), (LINE, LINE)], {"sizes": (4096, 4096, 4112)}),
    (TRITON, [H100], [(SQUARE, SQUARE)], {"sizes": BIG}),
    (TRITON, [H100], [(LINE, SQUARE)], {"sizes": BIG, "cuda": (12, 6)}),
    (TRITON, [RTX4090, B200, RTX5090, MI300X], [(LINE, SQUARE)], {"sizes": BIG}),
    (MX, [B200, RTX5090], [(MX_BLOCK, MX_BLOCK)], {}),
    (EMULATED, [H100, RTX4090, MI300X], [(MX_BLOCK, MX_BLOCK)], {}),
    (EMULATED, [B200], [(MX_BLOCK, MX_BLOCK)], {"cuda": (12, 6)}),
    (EMULATED, [B200], [(LINE, SQUARE)], {"launches": False}),
    (BLOCKWISE, [H100], [(LINE, SQUARE)], {"sizes": (512, 512, 512), "launches": False}),
    (REFERENCE, [CPU], [(LINE, SQUARE), (ROW, ROW)], {}),
]


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for way, gpus, pairs, given in CHOICES:
        given = {**given}
        sizes, cuda = given.pop("sizes", (64, 64, 64)), given.pop("cuda", (13, 0))
        monkeypatch.setattr(torch, "__version__", given.pop("torch", "2.13.0"))
        with hooks.cuda_version(*cuda):
            for gpu, pair in itertools.product(gpus, pairs):
                assert how(gpu, *pair, *sizes, **given) == way, (way, gpu, pair, sizes, cuda, given)


def test_sizes_that_only_a_run_knows_are_no_promise() -> None:
    """A dynamic size that was a multiple of 512 during tracing may be 16 in a later call."""
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(4096, 512), symbolic_context=dynamic)
    assert how(H100, LINE, LINE, 4096, 4096, x.shape[0]) == TRITON
    assert how(H100, LINE, SQUARE, x.shape[0], 4096, 4096) == TRITON


# -- our kernel --


def launched(call: Any, given: Sequence[Tensor], dynamic: bool, tile: tuple[int, int]) -> GraphModule:
    """A graph with one `ops.block_mm`, lowered to a launch that the interpreter runs on the CPU."""
    with hooks.block_mm_by(TRITON, (*tile, 4, 1)):
        return interpreter.launched(call, given, ops.block_mm, scaled_mm.lower_mm, dynamic)


def run(
    given: Sequence[Tensor], out_dtype: torch.dtype, blocks: tuple, tile: tuple[int, int] = (64, 32)
) -> Tensor:
    """The kernel's result. `given`: a, b, the inverses of their scales, and perhaps a bias."""

    def call(*given: Tensor) -> Tensor:
        return ops.block_mm(*(*given, None)[:5], out_dtype, False, *map(list, blocks))

    return launched(call, given, False, tile)(*given)


TILED = [((33, 48, 272), (64, 32)), ((1, 16, 16), (64, 32))]
TILED += [((70, 48, 128), (16, 64)), ((130, 80, 400), (128, 128))]


@pytest.mark.cases(test=12, slow=2)
@pytest.mark.parametrize("blocks", PAIRS, ids=str)
@pytest.mark.parametrize(("sizes", "tile"), TILED, ids=str)
def test_kernel(blocks: tuple, sizes: tuple[int, int, int], tile: tuple[int, int]) -> None:
    """Odd numbers of rows; K of less than a block, of one block, and of several blocks and a part."""
    m, n, k = sizes
    (a, a_inv), (b, b_inv) = operand(m, k, blocks[0]), operand(n, k, blocks[1], seed=1)
    expected = ops.block_product(a, b, a_inv, b_inv, None, F32, False, *blocks)
    got = run((a, b, a_inv, b_inv), F32, blocks, tile)
    assert_close(expected, got, magnitudes(a, b, a_inv, b_inv, *blocks), "a product")
    # a wrong scale would show: the product of no block is negligible
    wrong = ops.block_product(a, b, a_inv.flip(0) * 2, b_inv, None, F32, False, *blocks)
    assert not torch.allclose(expected, wrong)


@pytest.mark.parametrize(
    ("fp8", "out", "bias"),
    [(E4M3, BF16, BF16), (E4M3, BF16, F32), (E4M3, F16, BF16), (E4M3, F32, F32), (FNUZ, BF16, BF16)],
)
def test_kernel_with_bias_and_other_dtypes(fp8: torch.dtype, out: torch.dtype, bias: torch.dtype) -> None:
    if fp8 == FNUZ and OLD_INTERPRETER:
        pytest.skip("Triton's interpreter has no fnuz dtypes before 3.7")
    (a, a_inv), (b, b_inv) = operand(40, 192, LINE, fp8), operand(48, 192, SQUARE, fp8, seed=1)
    a_inv, b_inv = a_inv.clamp(max=1.0), b_inv.clamp(max=1.0)  # fp16 ends at 65504
    added = torch.randn(48, generator=torch.Generator().manual_seed(2)).mul(100).to(bias)
    expected = ops.block_product(a, b, a_inv, b_inv, added, out, False, LINE, SQUARE)
    assert expected.isfinite().all()
    got = run((a, b, a_inv, b_inv, added), out, (LINE, SQUARE))
    assert_close(expected, got, magnitudes(a, b, a_inv, b_inv, LINE, SQUARE), "a product")


def test_kernel_keeps_nan_and_its_place() -> None:
    (a, a_inv), (b, b_inv) = operand(40, 144, LINE), operand(48, 144, LINE, seed=1)
    a.view(torch.uint8)[7, 130] = 0x7F  # NaN
    got = run((a, b, a_inv, b_inv), F32, (LINE, LINE))
    assert got[7].isnan().all() and got.isnan().sum() == 48


@pytest.mark.cases(test=4, slow=2)
@pytest.mark.parametrize("blocks", PAIRS, ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_launch(blocks: tuple, dynamic: bool) -> None:
    """Traced for one size and run with others, also a K of one block; permuted scales, a strided bias."""
    if dynamic and OLD_INTERPRETER:
        pytest.skip("Triton's interpreter takes no argument as the end of a range before 3.7")

    def call(a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, bias: Tensor) -> Tensor:
        return 2 * ops.block_mm(a, b, a_inv, b_inv.t(), bias[:, 0], BF16, False, *map(list, blocks))

    def inputs(m: int, k: int) -> tuple[Tensor, ...]:
        (a, a_inv), (b, b_inv) = operand(m, k, blocks[0]), operand(144, k, blocks[1], seed=1)
        return a, b, a_inv, b_inv.t().contiguous(), torch.randn(144, 3)

    first = (33, 272) if dynamic or PAIRS.index(blocks) % 2 else (40, 48)
    graph = launched(call, inputs(*first), dynamic, (64, 32))
    for m, k in (first, (70, 400), (17, 16)) if dynamic else (first,):
        given = inputs(m, k)
        a, b, a_inv, b_inv, _ = given
        sizes = magnitudes(a, b, a_inv, b_inv.t(), *blocks)
        assert_close(call(*given), graph(*given), 2 * sizes, f"{m} rows")


# -- machine code --

INSTRUCTION = {"sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx942": "v_mfma", "gfx950": "v_mfma"}


def gpu(target: str) -> Gpu:
    if target.startswith("gfx"):
        return Gpu(major=9, minor=4, gcnArchName=target)
    return Gpu(major=int(target[3:-1]), minor=int(target[-1]))


def compiled(
    function: Any, target: str, tile: tuple, sizes: dict[str, int | None], more: str, fixed: dict[str, Any]
) -> Any:
    """A matmul with a bf16 result, compiled as by Inductor: pointers are declared multiples of 16. `sizes`:
    of an argument each; None: that only a run knows. `more`: another argument, with its type."""
    fp8 = "*fp8e4b8" if target == "gfx942" else "*fp8e4nv"
    types = {"a": fp8, "b": fp8, "a_inv": "*fp32", "b_inv": "*fp32", "y": "*bf16"}
    types |= dict([more.split()]) | {name: "i32" for name, size in sizes.items() if size is None}
    rows, columns, warps, stages = tile
    fixed = {**fixed, "BLOCK_R": rows, "BLOCK_C": columns, **dict.fromkeys(sizes.keys() - types.keys())}
    return compile_function(function, types, fixed, TARGETS[target], num_warps=warps, num_stages=stages)


CASES = [((8192, 4096, 4096), (LINE, SQUARE)), ((None, 4096, None), (LINE, LINE))]
CASES += [((None, 4096, 1040), (SQUARE, LINE))]


def assert_machine_code(made: Any, target: str, where: object, mx: bool = False) -> None:
    """FP8 tensor cores (MX: those that there are), 16-byte loads, shared memory that fits, no spills."""
    took, amd = resources(made), target.startswith("gfx")
    assert took.shared <= SHARED[target] and took.spills == 0, (target, where, took)
    text = made.asm["amdgcn" if amd else "ptx"]
    if mx:
        scaled = {"sm_100": "kind::mxf8f6f4", "sm_120": "kind::mxf8f6f4.block_scale"}
        assert scaled.get(target, "v_mfma" if amd else "bf16") in text
    else:
        assert INSTRUCTION.get(target, "mma.sync.aligned.m16n8k32") in text
        assert "e4m3" in text or "fp8" in text or "f8f6f4" in text
    assert amd or "cp.async.cg.shared.global" in text


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize(
    ("target", "cases"),
    [("sm_90", CASES[:1]), *(pytest.param(target, CASES, marks=pytest.mark.slow) for target in TARGETS)],
    ids=lambda x: x if isinstance(x, str) else len(x),
)
def test_machine_code(target: str, cases: list[tuple]) -> None:
    """At the default tile; for sm_90 at each one."""
    for sizes, blocks in cases:
        tiles = block_gemm.configurations(gpu(target), SHARED[target], blocks[1])
        fixed = {"A_SQUARE": blocks[0] == SQUARE, "B_SQUARE": blocks[1] == SQUARE}
        fixed |= dict(zip("MNK", sizes, strict=True))
        arguments = dict(zip(("m", "n", "k16"), sizes, strict=True))
        for tile in tiles if target == "sm_90" and len(cases) > 1 else tiles[:1]:
            made = compiled(triton_kernels.fp8_gemm, target, tile, arguments, "bias *bf16", fixed)
            assert_machine_code(made, target, (sizes, blocks, tile))
