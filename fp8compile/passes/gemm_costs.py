"""What gemms cost, and the casts of their operands, for `weigh`: by the sizes of the trace, and by the nodes
that compute and read each tensor."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from .. import compat
from ..config.recipe import COSTS, RECIPES
from ..devices import cost
from ..devices.catalog import Device
from ..ir.fx_utils import hint, value
from ..ir.matmul import GEMMS, Matmul, OperandKey
from .gathered import arrives
from .tensor_traffic import Source, source

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Gemm:
    """A matmul that may become FP8. `sizes`: m, n, k by the trace. `tokens`: which of them counts tokens, the
    one that is no size of the weight; `m`: their number."""

    def __init__(self, matmul: Matmul):
        self.matmul, self.layer = matmul, matmul.fprop or matmul
        self.reads: list[tuple[CastCost, tuple[str, bool]]] = []  # casts, with the layouts
        self.known: dict[tuple[bool, float], float] = {}  # of `seconds`, asked often
        self.sizes = hint(matmul.m), hint(matmul.n), hint(matmul.k)
        weight = matmul.weight_operand
        self.tokens = 2 if weight is None else 1 if weight is matmul.a else 0
        self.m = self.sizes[self.tokens]
        self.dtype = value(matmul.node).dtype

    @property
    def recipe(self) -> str:
        """The recipe of the operand with the finer scaling."""
        return max((cast.recipe for cast, _ in self.reads), key=RECIPES.index)

    @property
    def fast(self) -> bool:
        """Whether it accumulates fast in FP8."""
        return self.matmul.recipe.use_fast_accum[GEMMS.index(self.matmul.gemm)]

    def seconds(self, device: Device, fp8: bool, grown: float = 1.0) -> float:
        """Seconds of the matmul alone, with `grown` times as many tokens as in the trace."""
        if (fp8, grown) not in self.known:
            self.known[fp8, grown] = self._seconds(device, fp8, grown)
        return self.known[fp8, grown]

    def _seconds(self, device: Device, fp8: bool, grown: float) -> float:
        groups = max(1, self.matmul.groups)  # each of them is taken to have equally many tokens
        grown /= groups
        sizes = list(self.sizes)
        sizes[self.tokens] = max(1, round(self.m * grown))
        m, n, k = sizes
        dtype, size = SHORT[self.dtype], self.dtype.itemsize
        if fp8:
            scaling, emulated = COSTS[self.recipe], self.matmul.decision.emulated
            return cost.block_gemm(device, m, n, k, scaling, size, dtype, emulated, groups, self.fast)
        return cost.gemm(device, m, n, k, dtype, size, groups=groups)


@dataclass(eq=False)
class Base:
    """A tensor that matmuls read, with all casts of it."""

    source: Source
    weight: bool
    outside: bool  # does a matmul that stays in high precision in any case read the tensor?
    casts: list[CastCost] = field(default_factory=list)

    def seconds(self, device: Device, chosen: set[Gemm], grown: float = 1.0) -> float:
        """Seconds for the FP8 copies that `chosen` read, and for the copy of readers in high precision."""
        factor = 1.0 if self.weight else grown
        readers = {gemm for cast in self.casts for gemm, _ in cast.readers} - chosen
        demanded = [(cast, cast.layouts(chosen)) for cast in self.casts]
        high = max((gemm.dtype.itemsize for gemm in readers), default=2 if self.outside else 0)
        tensor = replace(
            self.source,
            elements=round(self.source.elements * factor),
            producer_bytes=round(self.source.producer_bytes * factor),
            high_bytes=high or (self.source.itemsize if self.source.shared else 0),
        )
        copy = cost.high_copy(device, tensor)
        seconds = copy + sum(cast.seconds(device, tensor, count) - copy for cast, count in demanded if count)
        # a residual in float32 under autocast is written beside the bf16 copy
        if tensor.fused and self.source.shared and high not in (0, tensor.itemsize):
            seconds += cost.high_copy(device, replace(tensor, high_bytes=tensor.itemsize))
        return seconds


@dataclass(eq=False)
class CastCost:
    """The FP8 copies of a tensor under one `Scaling` (its recipe), and who reads them in which layout.
    `gathered`: the plain copy is there (FSDP2 has gathered it, or a frozen weight is kept so), so nothing is
    cast. `kept`: the copies come from an earlier call (`cache_weights`), and cost nothing, as if gradients
    were accumulated over very many micro-batches. `turned`: of those, one is kept, and the other layout is
    made of it."""

    base: Base
    recipe: str
    again: bool
    gathered: bool = False
    kept: bool = False
    turned: bool = False
    readers: list[tuple[Gemm, tuple[str, bool]]] = field(default_factory=list)

    def layouts(self, chosen: set[Gemm]) -> int:
        """How many copies are to be written."""
        made = {layout for gemm, layout in self.readers if gemm in chosen}
        return sum(transposed or not self.gathered for _, transposed in made)

    def seconds(self, device: Device, tensor: cost.CastInput, layouts: int) -> float:
        if self.kept or self.gathered:
            turns = 0 if self.kept and not self.turned else layouts - self.kept
            return turns * cost.transposed(device, tensor.elements) + cost.high_copy(device, tensor)
        scaling = COSTS[self.recipe]
        if tensor.scattered and scaling.walks == 1 and not compat.triton.reorders():
            tensor = replace(tensor, scattered=False)  # one walk of one of our kernels is enough
        return cost.casts(device, tensor, scaling, layouts, self.again)


def gemms_of(
    candidates: list[Matmul], kept: Container[int | None] = (), frozen: Container[int | None] = ()
) -> list[Gemm]:
    """The gemms with the tensors that they read. Gemms that read the same base with the same scaling share
    its casts. `kept`: the inputs of the graph whose copies are kept between calls, where the recipe says so;
    `frozen`: those that will arrive in FP8, where the recipe says so."""
    gemms: list[Gemm] = []
    bases: dict[Node, Base] = {}
    casts: dict[OperandKey, CastCost] = {}
    nodes = {matmul.node for matmul in candidates}
    for matmul in candidates:
        gemm, recipe = Gemm(matmul), matmul.recipe
        gemms.append(gemm)
        operands = zip(matmul.roles, (matmul.a.transposed, not matmul.b.transposed), strict=True)
        for (matrix, role), transposed in operands:
            weight, key = role == "weight", matmul.operand_key(matrix, role)
            # a weight that is recast, or whose region is recomputed, is read once more for its second copy
            again = weight and (recipe.recast_weights is True or "recompute" in matmul.node.meta)
            transposed = transposed and (again or not matmul.decision.either or not weight)
            asked = weight and not matmul.computed and recipe.frozen == "fp8"
            stored = arrives(matrix.base, key.scaling) or (asked and matmul.weight_among(frozen))
            if matrix.base not in bases:
                found = source(matrix)
                found = replace(found, itemsize=1) if stored else found
                bases[matrix.base] = Base(found, weight, not found.readers <= nodes)
            base = bases[matrix.base]
            if key not in casts:
                cached = weight and recipe.cache_weights and not matmul.computed
                stays = cached and matmul.weight_among(kept)
                square = key.scaling.block.rows == key.scaling.block.columns
                turned = stays and square and recipe.recast_weights is True
                casts[key] = CastCost(base, key.scaling.recipe, again, stored, stays, turned)
                base.casts.append(casts[key])
            layout = (str(matrix.shape), transposed)
            casts[key].readers.append((gemm, layout))
            gemm.reads.append((casts[key], layout))
    return gemms
