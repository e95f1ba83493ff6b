"""The families of generated kernels, as functions of plain torch and the operators of `fp8compile::` on a
matrix [R, C].

Each family is the part of a graph around one cast: the producer of the matrix, its FP8 copies in both
layouts, its amax, and other outputs that read it. Inputs are bfloat16. Forward tensors are cast to E4M3,
gradients to E5M2. A delayed scale is an input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8compile.ir import merged, ops

E4M3, E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)
HEAD = 128  # width of an attention head


@dataclass(frozen=True)
class Family:
    name: str
    title: str
    function: Callable[..., tuple[Tensor, ...]]
    inputs: Callable[[Source], tuple[Tensor, ...]]
    again: int = 0  # so many of its first inputs have to be read twice


@dataclass
class Source:
    """Makes inputs on `device`: random ones, or (`empty`) uninitialised ones whose values are not used."""

    rows: int
    columns: int
    device: str
    empty: bool = False

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        made: Any = torch.empty if self.empty else torch.randn
        return made(shape, dtype=dtype, device=self.device)

    def full(self) -> Tensor:
        return self(self.rows, self.columns)

    def column(self) -> Tensor:
        return self(self.columns)

    def row(self) -> Tensor:
        """A column [R, 1] of positive float32 values, like a norm's statistics."""
        return self(self.rows, 1, dtype=torch.float32).abs() + 0.5

    def scale(self, format: tuple[torch.dtype, float] = E4M3) -> Tensor:
        """The scale of a tensor whose largest magnitude is 8, so that normal values do not saturate."""
        return torch.full((1,), format[1] / 8, device=self.device)


FAMILIES: dict[str, Family] = {}


def family(title: str, inputs: Callable[[Source], tuple[Tensor, ...]], again: int = 0) -> Callable:
    def register(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        name = function.__name__.replace("_", "-")
        FAMILIES[name] = Family(name, title, function, inputs, again)
        return function

    return register


def both(x: Tensor, scale: Tensor, format: tuple[torch.dtype, float] = E4M3) -> tuple[Tensor, Tensor, Tensor]:
    return *ops.quantize_both(x, scale, *format), ops.amax(x)


@family("weight cast, both layouts, amax", lambda s: (s.full(), s.scale()))
def weight(w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return both(w, scale)


def _heads(s: Source) -> tuple[Tensor, ...]:
    width = next(w for w in (HEAD, 8, 1) if s.columns % w == 0)
    return s(1, s.rows, s.columns // width, width).transpose(1, 2), s.scale()


@family("attention output cast", _heads)
def attention(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """x is [B, H, T, D], with the memory layout of flash attention's output: [B, T, H, D]."""
    batch, heads, tokens, width = x.shape
    return both(x.transpose(1, 2).reshape(batch * tokens, heads * width), scale)


@family("GELU and cast", lambda s: (s.full(), s.scale()))
def gelu(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return both(F.gelu(x, approximate="tanh"), scale)


@family("SwiGLU and cast", lambda s: (s.full(), s.full(), s.scale()))
def swiglu(gate: Tensor, up: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return both(F.silu(gate) * up, scale)


@family("GELU backward, cast, bias gradient", lambda s: (s.full(), s.full(), s.scale(E5M2)))
def gelu_backward(dy: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    dx = torch.ops.aten.gelu_backward(dy, x, approximate="tanh")
    return *both(dx, scale, E5M2), dx.sum(0)


def _merged(s: Source) -> tuple[Tensor, ...]:
    return s.full(), s(s.rows, 2 * s.columns), s.scale(E5M2), s.scale()


@family("SwiGLU backward, gate and up in one matrix, five casts", _merged)
def swiglu_backward_merged(dy: Tensor, gate_up: Tensor, scale: Tensor, scale_y: Tensor) -> tuple[Tensor, ...]:
    """As a Llama layer has it: the copies of both gradients are parts of larger ones, which one matmul reads,
    and the product is cast once more, transposed."""
    gate, up = gate_up[:, : dy.shape[1]], gate_up[:, dy.shape[1] :]
    silu = F.silu(gate)
    gradients = torch.ops.aten.silu_backward(dy * up, gate), dy * silu
    plain, transposed = zip(*(ops.quantize_both(x, scale, *E5M2) for x in gradients), strict=True)
    wholes = merged.side_by_side([*plain], 1), merged.side_by_side([*transposed], 0)
    return *wholes, *map(ops.amax, gradients), ops.quantize(silu * up, scale_y, *E4M3, True)


@family("RMSNorm and cast", lambda s: (s.full(), s.column(), s.scale()))
def rms_norm(x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    f = x.to(torch.float32)
    rstd = (f.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    return rstd, *both((f * rstd * weight).to(x.dtype), scale)


@family("RMSNorm and cast, a scale for 128 of a row", lambda s: (s.full(), s.column()))
def rms_norm_parts(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    f, block = x.to(torch.float32), [1, 128]
    rstd = (f.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    y = (f * rstd * weight).to(x.dtype)
    scale = ops.current_scale(ops.amax_blocks(y, False, block), E4M3[1], 0, True)
    return rstd, ops.quantize(y, scale, *E4M3, False, block), ops.inverse(scale)


@family("LayerNorm and cast", lambda s: (s.full(), s.column(), s.column(), s.scale()))
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    f = x.to(torch.float32)
    var, mean = torch.var_mean(f, [-1], correction=0, keepdim=True)
    rstd = (var + 1e-5).rsqrt()
    return mean, rstd, *both(((f - mean) * rstd * weight + bias).to(x.dtype), scale)


def _layer_norm_backward(s: Source) -> tuple[Tensor, ...]:
    return s.full(), s.full(), s.full(), s.column(), s(s.rows, 1, dtype=torch.float32), s.row(), s.scale(E5M2)


@family("LayerNorm backward, residual, cast, weight and bias gradients", _layer_norm_backward)
def layer_norm_backward(
    residual: Tensor, dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, scale: Tensor
) -> tuple[Tensor, ...]:
    """The gradient is added to that of the residual stream. The sum goes on in the stream, and is also the
    output gradient of the previous linear."""
    f, size = dy.to(torch.float32), x.shape[-1]
    normed, wdy = (x.to(torch.float32) - mean) * rstd, f * weight
    one, two = wdy.sum(-1, keepdim=True), (wdy * normed).sum(-1, keepdim=True)
    dx = residual + (rstd * (1.0 / size) * (wdy * size - one - normed * two)).to(x.dtype)
    return dx, *both(dx, scale, E5M2), (f * normed).sum(0).to(x.dtype), f.sum(0).to(x.dtype)


def _rms_norm_backward(s: Source) -> tuple[Tensor, ...]:
    return s.full(), s.full(), s.full(), s.full(), s.column(), s.row(), s.scale(E5M2)


@family("RMSNorm backward, residual, cast, weight gradient", _rms_norm_backward)
def rms_norm_backward(
    residual: Tensor, dy: Tensor, x: Tensor, y: Tensor, weight: Tensor, rstd: Tensor, scale: Tensor
) -> tuple[Tensor, ...]:
    """The same for the norm of a sum x + y, as in a Llama layer."""
    f, size = dy.to(torch.float32), x.shape[-1]
    h, wdy = (x + y).to(torch.float32), f * weight
    slope = (wdy * h).sum(-1, keepdim=True) * -0.5 * rstd.pow(3) / size
    dx = residual + (wdy * rstd + slope * (h * 2)).to(x.dtype)
    return dx, *both(dx, scale, E5M2), (f * (h * rstd)).sum(0).to(x.dtype)


@family("current scaling: amax pass, cast pass", lambda s: (s.full(),), again=1)
def tensorwise(x: Tensor) -> tuple[Tensor, ...]:
    """The cast needs the amax of the whole matrix, so the matrix is read twice."""
    amax = ops.amax(x)
    return *ops.quantize_both(x, ops.current_scale(amax, E4M3[1], 0), *E4M3), amax


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def must_move(family: Family, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> int:
    """Bytes that any implementation moves: each input once (the first `again` twice), each output once."""
    return sum(map(size_of, [*inputs, *inputs[: family.again], *outputs]))
