"""Writes tests/codegen/expected/<name>.py, the generated source of representative groups: `python -m
tests.support.regenerate`

A change of the generator shows as a readable diff of these files. tests/codegen/test_expected_kernels.py
compares them.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fp8compile.codegen import triton_kernels
from fp8compile.ir import ops  # also: registers the operators
from fp8compile.passes.fuse import fuse
from fp8compile.passes.lower import split_casts
from tests.support.interpreter import kernels_on_cpu

EXPECTED = pathlib.Path(__file__).parents[1] / "codegen" / "expected"
COMMAND = "python -m tests.support.regenerate"
BF16, F32 = torch.bfloat16, torch.float32
E4M3, E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)
aten = torch.ops.aten


def both(x: Tensor, scale: Tensor, form: tuple = E4M3) -> tuple[Tensor, ...]:
    """Both layouts and the amax: the outputs for a tensor with delayed scaling."""
    return *ops.quantize_both(x, scale, *form), ops.amax(x)


def weight_both_layouts(w: Tensor, scale: Tensor) -> Any:
    return both(w, scale)


def gelu(x: Tensor, scale: Tensor) -> Any:
    return both(aten.gelu(x), scale)


def gelu_backward(dy: Tensor, x: Tensor, scale: Tensor, scale_y: Tensor) -> Any:
    """The function and its derivative share a factor."""
    dx, y = aten.gelu_backward(dy, x), aten.gelu(x)
    return *both(dx, scale, E5M2), ops.quantize(y, scale_y, *E4M3, True), dx.sum([0])


def rope_backward(dy: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> Any:
    """The halves of a head are exchanged: what is read in one of them is read once."""
    y = dy * sin[:, None]
    y = dy * cos[:, None] + aten.cat([y[..., 64:], -y[..., :64]], -1)
    return both(y.view(8192, 4096), scale, E5M2)


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor, scale_gate: Tensor, scale_up: Tensor) -> Any:
    wide = gate.to(F32)
    sigmoid = aten.sigmoid(wide)  # spelled out: torch 2.11 decomposes silu_backward in another way
    d_gate = ((dy * up).to(F32) * sigmoid * (1 + wide * (1 - sigmoid))).to(BF16)
    d_up = dy * (wide * sigmoid).to(BF16)
    return *both(d_gate, scale_gate, E5M2), *both(d_up, scale_up, E5M2)


def layer_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, scale: Tensor
) -> Any:
    dx, dw, db = aten.native_layer_norm_backward(
        dy, x, [x.shape[1]], mean, rstd, weight, bias, [True, True, True]
    )
    return *both(dx, scale, E5M2), dw, db


def dynamic_rows(x: Tensor, scale: Tensor) -> Any:
    return both(aten.relu(x), scale)


def in_blocks(x: Tensor, block: list[int], power_of_2: bool = True) -> tuple[Tensor, ...]:
    """Both layouts, each with scales of its own blocks, and the inverses of the scales."""
    scale, other = (
        ops.current_scale(ops.amax_blocks(x, transposed, block), E4M3[1], 0, power_of_2)
        for transposed in (False, True)
    )
    return *ops.quantize_both(x, scale, *E4M3, other, block), ops.inverse(scale), ops.inverse(other)


def mxfp8_swiglu(gate: Tensor, up: Tensor) -> Any:
    return in_blocks(aten.silu(gate) * up, [1, 32])


def blockwise_gelu_backward_bias(dy: Tensor, x: Tensor) -> Any:
    """A tile of 128 x 128 would spill registers, so the kernel walks over it in strips."""
    dx = aten.gelu_backward(dy, x, approximate="tanh")
    return *in_blocks(dx, [1, 128]), dx.sum([0])


def rowwise_rms_norm(x: Tensor, weight: Tensor) -> Any:
    """Two kernels: the transposed copy waits for the amaxes of all columns."""
    wide = x.to(F32)
    rstd = (wide.pow(2).mean([-1], True) + 1e-6).rsqrt()
    return *in_blocks((wide * rstd * weight).to(BF16), [1, 0], power_of_2=False), rstd


# the shapes of the inputs: float32 where there is one column (scales, statistics of rows), else bf16
ROWS, HIDDEN, ONE = (16384, 1), (8192, 14336), (1,)
GROUPS: dict[Callable[..., Any], list[tuple[int, ...]]] = {
    weight_both_layouts: [(14336, 4096), ONE],
    gelu: [(16384, 3072), ONE],
    gelu_backward: [(16384, 16384), (16384, 16384), ONE, ONE],
    rope_backward: [(8192, 32, 128), (8192, 128), (8192, 128), ONE],
    swiglu_backward: [HIDDEN, HIDDEN, HIDDEN, ONE, ONE],
    layer_norm_backward: [(16384, 768), (16384, 768), ROWS, ROWS, (768,), (768,), ONE],
    dynamic_rows: [(1000, 512), ONE],
    mxfp8_swiglu: [HIDDEN, HIDDEN],
    blockwise_gelu_backward_bias: [(16384, 3072), (16384, 3072)],
    rowwise_rms_norm: [(8192, 4096), (4096,)],
}


def generate(function: Callable[..., Any]) -> str:
    """The kernels of a group, one source after the other."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    inputs = []
    for shape in GROUPS[function]:
        rows = DimDynamic.DYNAMIC if function is dynamic_rows and len(shape) == 2 else DimDynamic.STATIC
        context = StatelessSymbolicContext([rows, *[DimDynamic.STATIC] * (len(shape) - 1)])  # type: ignore[arg-type]
        real = torch.empty(shape, dtype=F32 if shape[-1] == 1 else BF16, device="meta")
        source = ConstantSource(f"input{len(inputs)}")
        inputs.append(mode.from_tensor(real, symbolic_context=context, source=source))
    with mode:
        inputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in inputs]
    # a kernel's name comes from the operators from which its nodes were decomposed
    with enable_python_dispatcher(), traceback.preserve_node_meta():
        graph = make_fx(function, decomposition_table=select_decomp_table())(*inputs).graph
    with kernels_on_cpu() as made:
        split_casts(graph)
        fuse(graph)
    return "\n\n".join(kernel.source for kernel in made if kernel.name not in vars(triton_kernels))


def main() -> None:
    sources = {function.__name__: generate(function) for function in GROUPS}
    EXPECTED.mkdir(exist_ok=True)
    for path in EXPECTED.glob("*.py"):
        path.unlink()
    for name, source in sources.items():
        (EXPECTED / f"{name}.py").write_text(source)


if __name__ == "__main__":
    main()
