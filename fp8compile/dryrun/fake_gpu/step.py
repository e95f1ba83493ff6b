"""What a compiled step would launch: kernels with their bytes, FLOPs and the module that they belong to."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorLayout:
    """A tensor that a kernel reads, as it is laid out in memory (symbolic sizes by their hints).

    `buffer` names the memory: operands that are views of one buffer share it.
    """

    buffer: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class MatmulLaunch:
    """One matmul launch: out[..., m, n] = a[..., m, k] @ b[..., k, n]."""

    op: str
    a: TensorLayout
    b: TensorLayout
    out: TensorLayout

    @property
    def flops(self) -> int:
        return 2 * self.a.shape[-1] * math.prod(self.out.shape)

    @property
    def dtype(self) -> str:
        """Of the operands: "fp8", "bfloat16", "float32", ..."""
        return "fp8" if self.a.dtype.itemsize == 1 else str(self.a.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Attention:
    """One launch of fused attention: q [..., T, D], k and v [..., S, D] (heads of k and v may be fewer than those of q)."""

    q: TensorLayout
    k: TensorLayout
    v: TensorLayout
    causal: bool
    backward: bool

    @property
    def flops(self) -> int:
        """Forward 2 matmuls, q k^T and p v: 2 T S (D + Dv) a head; half of it if causal. Backward 5 instead of 2, since it
        computes q k^T again, so 2.5 times as much (FlashAttention-2, arXiv:2307.08691, section 4.1)."""
        *heads, tokens, width = self.q.shape
        count = 2 * math.prod(heads) * tokens * self.k.shape[-2] * (width + self.v.shape[-1])
        return count * (5 if self.backward else 2) // (4 if self.causal else 2)


@dataclass(frozen=True)
class Launch:
    """One launch: of a "triton" kernel that Inductor wrote, a "user" Triton kernel, or an "extern" one (cuBLAS, an ATen op).

    `fqn` is the module that it belongs to ("" for none); of a kernel that serves several, the one with most of its operators.
    """

    origin: str
    name: str
    bytes: int
    matmul: MatmulLaunch | None = None
    attention: Attention | None = None
    fqn: str = ""
    backward: bool = False


@dataclass(frozen=True)
class Graph:
    """One graph that Inductor lowered: the forward, the backward, or an inference graph."""

    backward: bool
    kernels: tuple[Launch, ...]
    code: str
    targets: Counter[str]  # ATen (and other) targets of the FX graph that was lowered
    inputs: dict[str, TensorLayout]  # tensors only, by placeholder name
    makers: dict[str, str]  # the module that an input was made in, "" for none

    @property
    def kept(self) -> dict[str, int]:
        """Bytes that a backward gets from its forward, by the module that made them (AOTAutograd names parameters primals_*,
        gradients tangents_*, and what is saved as in the forward)."""
        total: Counter[str] = Counter()
        for name, t in self.inputs.items():
            if self.backward and not name.startswith(("primals", "tangents")):
                total[self.makers[name]] += t.dtype.itemsize * math.prod(t.shape)
        return dict(total)

    @property
    def kept_for_backward(self) -> int:
        return sum(self.kept.values())


@dataclass(frozen=True)
class Step:
    """All graphs of one step, forwards first."""

    graphs: tuple[Graph, ...]

    @property
    def kernels(self) -> list[Launch]:
        return [k for g in self.graphs for k in g.kernels]

    @property
    def matmuls(self) -> list[MatmulLaunch]:
        return [k.matmul for k in self.kernels if k.matmul is not None]

    @property
    def bytes_outside_matmuls(self) -> int:
        return sum(k.bytes for k in self.kernels if k.matmul is None)

    @property
    def flops(self) -> dict[str, int]:
        """Matmul FLOPs by operand dtype. Those inside of fused attention are `attention_flops`."""
        total: Counter[str] = Counter()
        for m in self.matmuls:
            total[m.dtype] += m.flops
        return dict(total)

    @property
    def attention_flops(self) -> int:
        return sum(k.attention.flops for k in self.kernels if k.attention is not None)

    @property
    def kept_for_backward(self) -> int:
        return sum(g.kept_for_backward for g in self.graphs)

    @property
    def kept(self) -> dict[str, int]:
        """`kept_for_backward` by the module that made it ("" where none is known)."""
        return dict(sum((Counter(g.kept) for g in self.graphs), Counter()))

    @property
    def code(self) -> str:
        return "\n".join(g.code for g in self.graphs)
