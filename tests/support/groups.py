"""Producers of FP8 casts as a compiler sees them: traced graphs of ATen and our operators, fused and not, on
a CPU.

A `Case` is a function of plain torch and `fp8compile::` operators, with its inputs for a matrix [rows,
columns] and the *role* of each of its results:

    copy, transposed, amax, value, row, sum     as in `codegen.group`; a `transposed` belongs to the `copy`
                                                before it
    alone                                       a transposed copy without a row-major one
    other                                       not written by a kernel, but computed from a kernel's results

`made(case, ..)` traces the function and fuses the graph. The trace itself runs the reference operators: it is
the oracle.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import compat
from fp8compile.ir import ops
from fp8compile.passes.pipeline import run_post_grad
from tests.support import hooks
from tests.support.interpreter import kernels_on_cpu

aten = torch.ops.aten
FP8 = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
FNUZ = {"e4m3fnuz": (torch.float8_e4m3fnuz, 240.0), "e5m2fnuz": (torch.float8_e5m2fnuz, 57344.0)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# -- numbers --


def specials(dtype: torch.dtype) -> list[float]:
    """Zeros, denormals, edges of a dtype and of both FP8 formats, ties of FP8 values, infinities and NaN."""
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps
    small = [0.0, tiny, 3 * tiny, info.smallest_normal - tiny, info.smallest_normal]
    small += [2.0**-10, 2.0**-9, 1.5 * 2**-9, 2.0**-17]
    large = [1.0, 1.0625, 1.1875, 17.0, 19.0, 240.0, 448.0, 464.0, 465.0, 57344.0, 61440.0, 61472.0]
    large += [info.max / 2, info.max]
    return [sign * x for x in [*small, *large, float("inf")] for sign in (1.0, -1.0)] + [float("nan")]


def numbers(shape: Sequence[int], dtype: torch.dtype, data: str, seed: int) -> Tensor:
    """`normal`; `exact`: small integers, whose sums are exact in any order; `extreme`: specials in every
    second row; `moderate`: the same, without specials whose squares or sums leave the range of a dtype."""
    generator = torch.Generator().manual_seed(seed)
    if data == "exact":
        return torch.randint(-2, 3, tuple(shape), generator=generator).to(dtype)
    x = torch.randn(tuple(shape), generator=generator)
    x = torch.where(torch.rand(tuple(shape), generator=generator) < 0.05, 0.0, x).to(dtype)
    if data in ("extreme", "moderate") and x.numel():
        table = torch.tensor([x for x in specials(dtype) if data == "extreme" or not 1e5 < abs(x) < math.inf])
        table = table.to(dtype)
        chosen = table[torch.randint(len(table), tuple(shape), generator=generator)]
        taken = torch.rand(tuple(shape), generator=generator) < 0.3
        rows = torch.arange(shape[-2])[:, None] % 2 == 0 if len(shape) > 1 else torch.tensor(True)
        x = torch.where(taken & rows, chosen, x)
    return x


@dataclass
class Source:
    """Inputs of one call: each request makes a new tensor. The same `data` and seed give the same tensors."""

    rows: int
    columns: int
    dtype: torch.dtype
    data: str = "normal"
    seed: int = 0

    def full(self, dtype: torch.dtype | None = None) -> Tensor:
        return self(self.rows, self.columns, dtype=dtype)

    def row(self) -> Tensor:
        return self(self.rows, 1, dtype=torch.float32).abs().nan_to_num(1.0, 4.0) + 0.5

    def column(self) -> Tensor:
        return self(self.columns)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        self.seed += 1
        return numbers(shape, dtype or self.dtype, self.data, self.seed)

    def scale(self, value: float = 1.5) -> Tensor:
        return torch.tensor([value])


# -- cases --


class Cast:
    """The operators of a cast to one FP8 format."""

    def __init__(self, name: str = "e4m3"):
        self.dtype, self.largest = {**FP8, **FNUZ}[name]

    def copy(self, x: Tensor, scale: Tensor) -> Tensor:
        return ops.quantize(x, scale, self.dtype, self.largest, False)

    def transposed(self, x: Tensor, scale: Tensor) -> Tensor:
        return ops.quantize(x, scale, self.dtype, self.largest, True)

    def both(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return ops.quantize_both(x, scale, self.dtype, self.largest)


@dataclass(frozen=True)
class Case:
    name: str
    call: Callable[..., tuple]
    inputs: Callable[[Source], tuple]
    roles: tuple[str, ...]
    kernels: tuple[tuple[str, ...], ...]  # the roles that each kernel writes, in the order of the graph
    exact: str  # when a fused graph must have the bytes of the unfused operators: see below
    data: tuple[str, ...] = ("normal", "exact", "extreme")


# Values of `exact`. With such data, sums over rows are exact in any order: column sums must be equal, too.
ALWAYS, FOR_EXACT_SUMS, NEVER = "always", "for exact sums", "never: within one FP8 value"


CASES: dict[str, Case] = {}


def case(
    inputs: Callable[[Source], tuple], roles: str, *kernels: str, exact: str = ALWAYS, **more: Any
) -> Callable:
    """Registers a function of (cast, *inputs). `kernels`: the roles that each kernel writes; default: one
    kernel writes all."""

    def register(function: Callable) -> Callable:
        name, given = function.__name__, tuple(roles.split())
        everything = " ".join("transposed" if role == "alone" else role for role in given if role != "other")
        kinds = [tuple(sorted(x.split())) for x in kernels or (everything,)]
        CASES[name] = Case(name, function, inputs, given, tuple(kinds), exact, **more)
        return function

    return register


# plain casts


@case(lambda s: (s.full(), s.scale()), "copy transposed amax")
def weight(cast: Cast, w: Tensor, scale: Tensor) -> tuple:
    return *cast.both(w, scale), ops.amax(w)


@case(lambda s: (s.full(), s.scale()), "alone")
def weight_transposed(cast: Cast, w: Tensor, scale: Tensor) -> tuple:
    return (cast.transposed(w, scale),)


@case(lambda s: (s.full(), s.scale(), s.scale(0.37)), "copy alone copy")
def weight_in_two_formats(cast: Cast, w: Tensor, scale: Tensor, other: Tensor) -> tuple:
    return cast.copy(w, scale), Cast("e5m2").transposed(w, other), Cast("e4m3").copy(w, other)


def _gaps(s: Source) -> tuple:
    w = s(2 * s.rows, s.columns + 5)[::2, 3:-2]
    return w, s.scale(), w.stride(0)


@case(_gaps, "copy transposed amax")
def weight_with_gaps(cast: Cast, w: Tensor, scale: Tensor, stride: int) -> tuple:
    """Dynamo makes an input of a stride that equals no size: `stride`."""
    return *cast.both(w, scale), ops.amax(w)


@case(lambda s: (s.full(),), "amax copy transposed", "amax", "copy transposed")
def current_scaling(cast: Cast, x: Tensor) -> tuple:
    """The cast waits for the amax of the whole tensor, so it needs a second walk."""
    amax = ops.amax(x)
    return amax, *cast.both(x, ops.current_scale(amax, cast.largest, 0))


def _scales(s: Source) -> tuple:
    from fp8compile.features.delayed import state_page

    page = torch.arange(1.0, 1 + 3 * 8).reshape(3, 8) / 16  # ages are not negative: every slot is warm
    return s.full(), s(s.columns, s.rows), state_page.scales_of(page)


@case(_scales, "copy transposed copy transposed other", "amax copy transposed", "amax copy transposed")
def delayed_scaling(cast: Cast, x: Tensor, w: Tensor, scales: Tensor) -> tuple:
    """Scales are read at their slots in one input; amaxes are neighbours in one vector."""
    from fp8compile.features.delayed import slot_ops

    results, amaxes = [], []
    for slot, tensor in ((2, x), (0, w)):
        amaxes.append(ops.amax(tensor))
        results += cast.both(tensor, slot_ops.delayed_scale(scales, amaxes[-1], slot, cast.largest, 0))
    return *results, ops.gather(amaxes[::-1])


# forward


def _heads(s: Source) -> tuple:
    width = next(d for d in (4, 5, 1) if s.columns % d == 0)
    batch = next(b for b in (3, 2, 1) if s.rows % b == 0)
    return s(batch, s.columns // width, s.rows // batch, width), s.scale()


@case(_heads, "copy transposed amax")
def attention(cast: Cast, x: Tensor, scale: Tensor) -> tuple:
    """[B, H, T, D] with heads outside: the matrix is a permuted view, read at its strides."""
    x = x.permute(0, 2, 1, 3).reshape(x.shape[0] * x.shape[2], x.shape[1] * x.shape[3])
    return *cast.both(x, scale), ops.amax(x)


@case(lambda s: (s.full(), s.full(), s.scale()), "copy transposed amax", exact=NEVER)
def swiglu(cast: Cast, gate: Tensor, up: Tensor, scale: Tensor) -> tuple:
    y = F.silu(gate) * up
    return *cast.both(y, scale), ops.amax(y)


@case(lambda s: (s(s.rows, 2 * s.columns), s.scale()), "copy amax", exact=NEVER)
def swiglu_of_one_matrix(cast: Cast, x: Tensor, scale: Tensor) -> tuple:
    """Gate and up are the two halves of one matmul's result."""
    columns = x.shape[1] // 2
    y = F.silu(x[:, :columns]) * x[:, columns:]
    return cast.copy(y, scale), ops.amax(y)


@case(lambda s: (s.full(), s.full(), s.scale()), "value copy transposed amax")
def residual(cast: Cast, x: Tensor, branch: Tensor, scale: Tensor) -> tuple:
    y = x + branch
    return y, *cast.both(y, scale), ops.amax(y)


@case(lambda s: (s.full(), s(s.rows, s.columns, dtype=torch.float32), s.scale()), "value copy amax")
def dropout(cast: Cast, x: Tensor, noise: Tensor, scale: Tensor) -> tuple:
    """The mask is saved for backward."""
    mask = noise > 0.25
    y = x * mask * (1 / 0.75)
    return mask, cast.copy(y, scale), ops.amax(y)


@case(lambda s: (s.full(), s.column(), s.scale()), "row copy transposed amax", exact=FOR_EXACT_SUMS)
def rms_norm(cast: Cast, x: Tensor, weight: Tensor, scale: Tensor) -> tuple:
    f = x.to(torch.float32)
    rstd = (f.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    y = (f * rstd * weight).to(x.dtype)
    return rstd, *cast.both(y, scale), ops.amax(y)


@case(
    lambda s: (s.full(), s.full(), s.column(), s.scale()), "value row value copy amax", exact=FOR_EXACT_SUMS
)
def residual_rms_norm(cast: Cast, x: Tensor, branch: Tensor, weight: Tensor, scale: Tensor) -> tuple:
    """Other nodes read the residual sum, its norm, and the statistics in the dtype of the model."""
    x = x + branch
    f = x.to(torch.float32)
    rstd = (f.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    y = (f * rstd).to(x.dtype) * weight
    return x, rstd.to(x.dtype), y, cast.copy(y, scale), ops.amax(y)


@case(
    lambda s: (s.full(), s.column(), s.column(), s.scale()),
    "row row copy transposed amax",
    exact=NEVER,
    data=("normal", "exact", "moderate"),
)
def layer_norm(cast: Cast, x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> tuple:
    f = x.to(torch.float32)
    var, mean = torch.var_mean(f, [-1], correction=0, keepdim=True)
    rstd = (var + 1e-5).rsqrt()
    y = ((f - mean) * rstd * weight + bias).to(x.dtype)
    return mean, rstd, *cast.both(y, scale), ops.amax(y)


def _positions(s: Source) -> tuple:
    batch = next(b for b in (3, 2, 5, 1) if s.rows % b == 0)
    tokens = s.rows // batch
    return s(batch, tokens, s.columns), s(tokens, s.columns), s.column(), s(batch, tokens, 1), s.scale()


@case(_positions, "value copy transposed amax")
def positions(cast: Cast, x: Tensor, position: Tensor, bias: Tensor, gate: Tensor, scale: Tensor) -> tuple:
    """[B, T, C] with [T, C], [C] and [B, T, 1] broadcast to it."""
    y = (x + bias) * gate + position
    matrix = y.view(y.shape[0] * y.shape[1], y.shape[2])
    return y, *cast.both(matrix, scale), ops.amax(matrix)


@case(lambda s: (s.full(torch.float32), s.full(torch.float16), s.scale()), "copy transposed amax")
def casts(cast: Cast, x: Tensor, y: Tensor, scale: Tensor) -> tuple:
    z = (x.to(torch.bfloat16).to(torch.float16) + y).to(torch.float32) * x
    return *cast.both(z, scale), ops.amax(z)


@case(
    lambda s: (s.full(), s.full(), s.column()[:, None], s.scale()),
    "other copy amax",
    "value copy amax",
    exact=NEVER,
    data=("normal", "exact", "moderate"),  # the matmul adds what other libraries have rounded
)
def read_by_a_matmul(cast: Cast, gate: Tensor, up: Tensor, column: Tensor, scale: Tensor) -> tuple:
    """A matmul reads the high-precision value, and cannot recompute it: the value is written once."""
    y = F.silu(gate) * up
    return y.mm(column), cast.copy(y, scale), ops.amax(y)


@case(lambda s: (s.full(), s.full(), s.scale()), "other copy amax", "copy amax")
def read_by_cheap_others(cast: Cast, x: Tensor, y: Tensor, scale: Tensor) -> tuple:
    """A pointwise reader recomputes x * y: that takes two reads, instead of a write and a read."""
    z = x * y
    return z + 1.0, cast.copy(z, scale), ops.amax(z)


@case(lambda s: (s.full(), s.full(), s.full(), s.scale()), "other copy amax", "value copy amax")
def read_by_dear_others(cast: Cast, x: Tensor, y: Tensor, z: Tensor, scale: Tensor) -> tuple:
    """A pointwise reader would need three reads to recompute the value: the value is written."""
    z = x * y + z
    return z + 1.0, cast.copy(z, scale), ops.amax(z)


# backward


@case(
    lambda s: (s.full(), s.full(), s.scale(), s.scale(0.75)),
    "copy transposed amax sum alone",
    exact=NEVER,
    data=("normal", "exact", "moderate"),  # 1e38 times a derivative near 0, which operators one by one miss
)
def gelu_backward(cast: Cast, dy: Tensor, x: Tensor, scale: Tensor, scale_y: Tensor) -> tuple:
    """The gradient of a linear's output, its bias gradient, and the recomputed input of the next linear."""
    dx = aten.gelu_backward(dy, x, approximate="tanh")
    y = F.gelu(x, approximate="tanh")
    return *cast.both(dx, scale), ops.amax(dx), dx.sum(0), cast.transposed(y, scale_y)


@case(
    lambda s: (s.full(), s.full(), s.full(), s.scale(), s.scale(2.0), s.scale(0.75)),
    "copy transposed amax copy transposed amax alone",
    exact=NEVER,
)
def swiglu_backward(
    cast: Cast, dy: Tensor, gate: Tensor, up: Tensor, scale_g: Tensor, scale_u: Tensor, scale_y: Tensor
) -> tuple:
    silu = F.silu(gate)
    du = dy * silu
    dg = aten.silu_backward(dy * up, gate)
    return (
        *cast.both(dg, scale_g),
        ops.amax(dg),
        *cast.both(du, scale_u),
        ops.amax(du),
        cast.transposed(silu * up, scale_y),
    )


@case(lambda s: (s.full(), s.full(), s.scale()), "copy transposed amax sum")
def relu_squared_backward(cast: Cast, dy: Tensor, x: Tensor, scale: Tensor) -> tuple:
    dx = torch.where(x <= 0, 0.0, dy * 2.0 * F.relu(x))
    return *cast.both(dx, scale), ops.amax(dx), dx.sum(0, dtype=torch.float32)


def _norm_backward(s: Source) -> tuple:
    return s.full(), s.full(), s.column(), s.row(), s.full(), s.scale()


@case(_norm_backward, "value copy transposed amax sum", exact=FOR_EXACT_SUMS)
def rms_norm_backward(
    cast: Cast, dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, other: Tensor, scale: Tensor
) -> tuple:
    """The gradient is added to that of the residual stream, which other nodes read."""
    f = dy.to(torch.float32)
    normed, wdy = x.to(torch.float32) * rstd, f * weight
    dx = rstd * (wdy - normed * (normed * wdy).mean(-1, keepdim=True))
    dx = other + dx.to(x.dtype)
    return dx, *cast.both(dx, scale), ops.amax(dx), (f * normed).sum(0).to(weight.dtype)


def _layer_norm_backward(s: Source) -> tuple:
    return (
        s.full(),
        s.full(),
        s.column(),
        s(s.rows, 1, dtype=torch.float32).nan_to_num(0.5, 1.0, 1.0),
        s.row(),
        s.scale(),
    )


@case(_layer_norm_backward, "copy transposed amax sum sum", exact=FOR_EXACT_SUMS)
def layer_norm_backward(
    cast: Cast, dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, scale: Tensor
) -> tuple:
    f, size = dy.to(torch.float32), x.shape[-1]
    normed, wdy = (x.to(torch.float32) - mean) * rstd, f * weight
    one, two = wdy.sum(-1, keepdim=True), (wdy * normed).sum(-1, keepdim=True)
    dx = (rstd * (1.0 / size) * (wdy * size - one - normed * two)).to(x.dtype)
    return *cast.both(dx, scale), ops.amax(dx), (f * normed).sum(0).to(x.dtype), f.sum(0).to(x.dtype)


@case(lambda s: (s(1).reshape(()), s.rows, s.columns, s.scale()), "copy transposed amax")
def gradient_of_a_sum(cast: Cast, dy: Tensor, rows: int, columns: int, scale: Tensor) -> tuple:
    """One number is expanded to a matrix."""
    y = dy.expand(rows, columns)
    return *cast.both(y, scale), ops.amax(y)


@case(
    lambda s: (s.full(), s.full(), s.scale(), s.scale(0.5)),
    "copy amax alone amax",
    "copy amax",
    "transposed amax",
)
def strangers(cast: Cast, x: Tensor, y: Tensor, scale: Tensor, other: Tensor) -> tuple:
    """Two matrices with nothing in common: two kernels."""
    return cast.copy(x, scale), ops.amax(x), cast.transposed(y, other), ops.amax(y)


# -- graphs --


@dataclass
class Made:
    """A traced function (`oracle`), its fused graph, and the generated kernels."""

    oracle: GraphModule
    fused: GraphModule
    kinds: tuple[tuple[str, ...], ...]  # the roles that each kernel writes
    sources: tuple[str, ...]


def trace(function: Callable, inputs: tuple, mode: str = "fake") -> GraphModule:
    """The ATen graph as it leaves the partitioner: with Inductor's decompositions and fake values."""
    return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode=mode)(*inputs)


def fused(gm: GraphModule, config: tuple[int, int, int] | None = None, other: int = 0) -> Made:
    copy = compat.dynamo.copy_graph(gm)
    with kernels_on_cpu(config, other=other), hooks.generated() as (noted, _):
        run_post_grad(copy.graph)
    copy.recompile()
    kinds = tuple(tuple(sorted(output.content for output in kernel.group.outputs)) for kernel in noted)
    return Made(gm, copy, kinds, tuple(kernel.source for kernel in noted))


def unfused(gm: GraphModule) -> GraphModule:
    """The graph lowered without generated kernels."""
    copy = compat.dynamo.copy_graph(gm)
    with hooks.lowered_as_for_a_gpu():
        run_post_grad(copy.graph)
    copy.recompile()
    return copy


def made(
    case: Case, source: Source, cast: str, config: tuple[int, int, int] | None = None, mode: str = "fake"
) -> tuple[Made, tuple]:
    """A case traced and fused for the sizes and dtype of `source`, and its inputs."""
    return _made(case, source.rows, source.columns, source.dtype, cast, config, mode), case.inputs(source)


def traced(case: Case, source: Source, cast: str, mode: str = "fake") -> GraphModule:
    """A case traced for the sizes and dtype of `source`; once for all tests."""
    return _traced(case, source.rows, source.columns, source.dtype, cast, mode)


@functools.lru_cache(2)  # tests that ask for several kinds of data do so one after the other
def _made(case: Case, rows: int, columns: int, dtype: torch.dtype, cast: str, config: Any, mode: str) -> Made:
    return fused(_traced(case, rows, columns, dtype, cast, mode), config)


@functools.lru_cache(64)
def _traced(case: Case, rows: int, columns: int, dtype: torch.dtype, cast: str, mode: str) -> GraphModule:
    return trace(lambda *x: case.call(Cast(cast), *x), case.inputs(Source(rows, columns, dtype)), mode)
