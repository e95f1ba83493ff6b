"""The kernels that a compiled step would launch, with their bytes, their FLOPs and their modules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorLayout:
    """The layout in memory of a tensor that a kernel reads or writes, with hints for symbolic sizes.

    `buffer` names the memory; operands that are views of one buffer have the same name.
    """

    buffer: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


# how an FP8 matmul adds up: with fast accumulation, without, or by blocks with a scale each
FAST, PRECISE, BLOCKS = "fast", "precise", "blocks"


@dataclass(frozen=True)
class MatmulLaunch:
    """One matmul launch: out[..., m, n] = a[..., m, k] @ b[..., k, n]. `accumulation` matters in FP8 only."""

    op: str
    a: TensorLayout
    b: TensorLayout
    out: TensorLayout
    accumulation: str = FAST

    @property
    def _contracts_groups(self) -> bool:
        """Whether each group contracts over its part of a's columns."""
        return len(self.a.shape) == 2 and len(self.out.shape) == 3

    @property
    def flops(self) -> int:
        shape = self.out.shape[1:] if self._contracts_groups else self.out.shape
        return 2 * self.a.shape[-1] * math.prod(shape)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(groups, m, n, k) of each matmul. Groups whose sizes are data are taken to be equally large."""
        (*_, m, k), n = self.a.shape, self.out.shape[-1]
        if self._contracts_groups:
            groups = self.out.shape[0]
            return groups, m, n, -(-k // max(1, groups))
        if len(self.a.shape) == 2 and len(self.b.shape) == 3:
            groups = self.b.shape[0]
            return groups, -(-m // max(1, groups)), n, k
        return math.prod(self.out.shape[:-2]), m, n, k

    @property
    def dtype(self) -> str:
        """The dtype of the operands: "fp8", "bfloat16", "float32", ..."""
        return "fp8" if self.a.dtype.itemsize == 1 else str(self.a.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Attention:
    """Fused attention: q [..., T, D], k [..., S, D], v [..., S, Dv]. k and v may have fewer heads than q."""

    q: TensorLayout
    k: TensorLayout
    v: TensorLayout
    causal: bool
    backward: bool

    @property
    def flops(self) -> int:
        """The forward has 2 matmuls, q k^T and p v: 2 T S (D + Dv) FLOPs per head, half of that if causal.
        The backward has 5 matmuls, because it computes q k^T again: 2.5 times as many FLOPs
        (FlashAttention-2, arXiv:2307.08691, section 4.1)."""
        *heads, tokens, width = self.q.shape
        count = 2 * math.prod(heads) * tokens * self.k.shape[-2] * (width + self.v.shape[-1])
        return count * (5 if self.backward else 2) // (4 if self.causal else 2)


@dataclass(frozen=True)
class Touch:
    """A buffer of `size` bytes, and how many of them a launch reads or writes."""

    buffer: str
    size: int
    bytes: int
    written: bool


@dataclass(frozen=True)
class Launch:
    """One launch. `origin`: "triton" for a kernel that Inductor wrote, "user" for another Triton kernel,
    "extern" for cuBLAS or an ATen op. `bytes` are those that it reads and writes (`plan_traffic`), also those
    that it reads twice; `touched` says of which buffers.

    `fqn` is the module that the kernel belongs to ("" for none); of several, that with most of its operators.
    """

    origin: str
    name: str
    bytes: int
    matmul: MatmulLaunch | None = None
    attention: Attention | None = None
    fqn: str = ""
    touched: tuple[Touch, ...] = ()

    @property
    def generated(self) -> bool:
        """True if it is a kernel that Inductor or we wrote, and no matmul."""
        return self.origin != "extern" and self.matmul is None


@dataclass(frozen=True)
class Graph:
    """One graph that Inductor lowered: the forward, the backward, or an inference graph."""

    backward: bool
    kernels: tuple[Launch, ...]
    code: str
    targets: Counter[str]  # ATen (and other) targets of the FX graph that was lowered
    inputs: dict[str, TensorLayout]  # tensors only, by placeholder name
    makers: dict[str, str]  # the module that made an input, by placeholder name; "" for none
    outputs: frozenset[str] = frozenset()  # buffers that it returns

    @property
    def kept(self) -> dict[str, int]:
        """Bytes that a backward gets from its forward, by the module that made them. AOTAutograd names
        parameters primals_* and gradients tangents_*; saved tensors keep their names from the forward."""
        total: Counter[str] = Counter()
        for name, t in self.inputs.items():
            if self.backward and not name.startswith(("primals", "tangents")):
                total[self.makers[name]] += t.dtype.itemsize * math.prod(t.shape)
        return dict(total)

    @property
    def kept_for_backward(self) -> int:
        return sum(self.kept.values())

    def operands_once(self, weights: Collection[tuple[int, ...]] = ()) -> int:
        """The bytes that generated kernels must move, however they are fused: each buffer that matmuls,
        attention or the graph's inputs give them, read once, and each that these or the graph's outputs take,
        written once. A buffer between generated kernels counts if a kernel of another kind runs in between.
        Parameters of these shapes (`weights`) are not read: what updates them has them at hand."""
        given = {name for name, x in self.inputs.items() if name[:7] == "primals" and x.shape in weights}
        written: Counter[str] = Counter()
        read: Counter[str] = Counter()
        when: dict[str, int] = {}  # how many other kernels had run when a generated one wrote a buffer
        kept, others = set(self.outputs), 0
        for kernel in self.kernels:
            others += not kernel.generated
            for x in kernel.touched:
                if not kernel.generated:
                    kept.add(x.buffer)
                elif x.written:
                    written[x.buffer], when[x.buffer] = written[x.buffer] + x.bytes, others
                elif x.buffer not in given and when.get(x.buffer) != others:
                    read[x.buffer] = min(read[x.buffer] + x.bytes, x.size)
                    kept.add(x.buffer)
        return sum(read.values()) + sum(written[name] for name in kept)


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
        """Matmul FLOPs by operand dtype, without those of fused attention."""
        total: Counter[str] = Counter()
        for m in self.matmuls:
            total[m.dtype] += m.flops
        return dict(total)

    @property
    def kept_for_backward(self) -> int:
        return sum(g.kept_for_backward for g in self.graphs)

    @property
    def kept(self) -> dict[str, int]:
        """`kept_for_backward` by the module that made the tensors ("" if unknown)."""
        return dict(sum((Counter(g.kept) for g in self.graphs), Counter()))

    @property
    def code(self) -> str:
        return "\n".join(g.code for g in self.graphs)
