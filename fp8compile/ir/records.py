"""The report of a compiled graph: a record for every matmul with its decision and reason, and for every op that hides
matmuls. Plain data: it holds no tensor and no node of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FP8: Literal["fp8"] = "fp8"
HIGH_PRECISION: Literal["high_precision"] = "high_precision"


@dataclass(frozen=True)
class MatmulRecord:
    """One gemm of a graph: ``out[m, n] = a[m, k] @ b[k, n]``, `batch` times. The sizes are those of this gemm itself.

    So for a linear on M tokens, from K to N features: fprop is (M, N, K), dgrad (M, K, N), wgrad (N, K, M).
    `groups`: the experts that the tokens are divided between; M counts the tokens of all of them, N and K are those of one.
    `gemm` is "matmul" for one without a weight, as in attention. `reason` is "" for fp8, `recipe` is "" for high precision.
    `dynamic`: some size is symbolic, and the number here is that of the call that was compiled. `symbolic`: which ones, letters
    of "mnkb" (b: the batch).
    `parameter` is the name of the weight, `rule` that of the policy's rule that decided.
    Where a device's description decided: `bf16_us` and `fp8_us` are this gemm's estimated times in high precision (which may
    be float32) and in FP8, `cast_us` its share of the casts (all in microseconds), `break_even_m` the number of tokens from
    which its layer gains.
    `emulated`: the device has no tensor cores for the recipe; FP8 values are multiplied in bf16, which is exact and not faster.
    `merged`: the layers, itself among them, for whose gemms of this kind there is one matmul.
    `overrides`: what makes the settings that run other than those that were chosen, a line each.
    """

    fqn: str
    gemm: Literal["fprop", "dgrad", "wgrad", "matmul"]
    m: int
    n: int
    k: int
    decision: Literal["fp8", "high_precision"]
    reason: str = ""
    recipe: str = ""
    batch: int = 1
    groups: int = 0
    op: str = "mm"
    dynamic: bool = False
    parameter: str = ""
    rule: str = ""
    bf16_us: float | None = None
    fp8_us: float | None = None
    cast_us: float | None = None
    break_even_m: int | None = None
    emulated: bool = False
    merged: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    symbolic: str = ""

    @property
    def how(self) -> str:
        """The recipe, as reports show it."""
        notes = [note for note, holds in (("emulated", self.emulated), ("merged", self.merged)) if holds]
        return f"{self.recipe} ({', '.join(notes)})" if notes else self.recipe

    @property
    def flops(self) -> int:
        """Multiplications and additions: 2 * batch * m * n * k."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Gatherable:
    """What a training graph says of a weight: whether FSDP2 may gather it in FP8, as its matmuls cast it, with one scale of its
    own amax, or one for each square block of `block` rows. `reason`: why not, "" if it may. `shared`: it may not, since not
    only matmuls read it, but an FP8 matmul does."""

    reason: str = ""
    shared: bool = False
    margin: int = 0
    power_of_2: bool = False
    fnuz: bool = False
    block: int = 0  # 0: one scale for all


@dataclass(frozen=True)
class GatherRecord:
    """What FSDP2 gathers in training for one parameter, as `dtype`, where `fp8_all_gather` was asked for. `reason`: why it is
    not FP8, "" if it is."""

    parameter: str
    gathered: Literal["fp8", "high_precision"]
    dtype: str
    reason: str = ""
    matrix: bool = True


@dataclass(frozen=True)
class CollectiveRecord:
    """A collective of a graph (`kind`) whose result an FP8 matmul reads. `tensor`: the matmul and the role, "mlp.up (input)".
    The bytes are those that a rank sends, `before` without our passes. `reason`: why they are not FP8, "" if they are."""

    tensor: str
    bytes: int
    before: int
    reason: str = ""
    kind: Literal["all-gather", "all-to-all"] = "all-gather"


@dataclass(frozen=True)
class KeptRecord:
    """A tensor that forward keeps for backward in FP8, because `save="fp8"` asked for it. `module` made it; `tensor` is its
    dtype and sizes; the bytes are those of the copy with its scales, `before` those of the tensor."""

    module: str
    tensor: str
    before: int
    bytes: int


@dataclass(frozen=True)
class FrozenRecord:
    """A matrix that does not train, where `frozen="fp8"` asked for its FP8 copy alone. The bytes are those in memory, `before`
    without the option. `reason`: why it is kept in high precision, "" if it is kept in FP8 only."""

    parameter: str
    before: int
    bytes: int
    reason: str = ""


@dataclass(frozen=True)
class OpaqueRecord:
    """An op that hides matmuls: they are not listed one by one, and the op is not rewritten.

    `reason` names the family of the op ("attention", "convolution"), or says after a colon why the op is left alone.
    """

    fqn: str
    op: str
    reason: str
    matmuls: tuple[MatmulRecord, ...] = ()  # of a nested graph: those can be listed


@dataclass(frozen=True)
class GraphReport:
    """One compiled graph. `name` is for people, e.g. "GPT, training"; `note` holds for the whole graph.

    `edges` are pairs of positions in `matmuls`: the output of the first reaches the second with no matmul between them.
    `device` names the device description by which FP8 was weighed, "" if there was none. `remarks` are further notes.
    `collectives` are the graph's own; all-gathers of FSDP2 are outside of graphs. `kept`: what is kept for backward in FP8 with
    `save="fp8"`. `frozen`: the matrices that do not train, with `frozen="fp8"`.
    """

    index: int
    name: str
    matmuls: tuple[MatmulRecord, ...]
    opaque: tuple[OpaqueRecord, ...] = ()
    note: str = ""
    edges: tuple[tuple[int, int], ...] = ()
    device: str = ""
    remarks: tuple[str, ...] = ()
    collectives: tuple[CollectiveRecord, ...] = ()
    kept: tuple[KeptRecord, ...] = ()
    frozen: tuple[FrozenRecord, ...] = ()


@dataclass(frozen=True)
class Findings:
    """What is told of a graph: its report, what is complained about before its summary, and what after it."""

    report: GraphReport
    training: bool
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


FORWARD = {"dgrad": "mkn", "wgrad": "kmn"}  # which of a gemm's own sizes are m, n and k of the forward


def forward_sizes(record: MatmulRecord) -> tuple[int, int, int]:
    """(m, n, k) of the forward gemm that `record` is the dgrad or wgrad of."""
    m, n, k = (getattr(record, name) for name in FORWARD.get(record.gemm, "mnk"))
    return m, n, k
