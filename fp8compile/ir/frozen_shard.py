"""FrozenShard: the rows of a `FrozenWeight` that one rank of FSDP2 keeps. It looks like a part of the weight.

    w [R, C], S = R / ranks rows, rounded up; rank r begins in row r * S
    data_ [S, C] FP8, fewer rows on the last ranks
    inv_ [k, C / 128] float32   scales of 128 x 128: of the blocks that its rows touch, k on each rank; those
                                of a block that a cut divides are on both ranks
    inv_ [S, 1]; inv_ [1]       one for each row; one for the weight: on each rank
    data_ [S, N, K], inv_ [S, N / 128, K / 128]             a stack of matrices

FSDP2 gathers the bytes and the scales (`fsdp_pre_all_gather`, `fsdp_post_all_gather`), and compiled graphs
read a `FrozenWeight` of what has arrived. All other readers get values of the shard's own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..config.recipe import WHOLE, Block
from ..errors import Fp8CompileError, ShardingError
from . import ops
from .frozen import FrozenWeight

aten = torch.ops.aten
MOVES = (aten._to_copy.default, aten._pin_memory.default)


@dataclass
class Cut:
    """Of the weight that has this shape, a rank's rows from `start` on. `rows`: how many the first rank has.
    Views of one memory share it."""

    shape: torch.Size
    rows: int
    start: int = 0


class FrozenShard(FrozenWeight):
    place: Cut

    def __init__(self, data: Tensor, inv: Tensor, dtype: torch.dtype, place: Cut, *how: Any):
        super().__init__(data, inv, dtype, *how)
        self.place = place

    def like(self, data: Tensor, inv: Tensor) -> FrozenShard:
        return FrozenShard(data, inv, self.dtype, self.place, *self.how, self.stored)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        names, meta = super().__tensor_flatten__()
        return names, {**meta, "place": (self.place.shape, self.place.rows, self.place.start)}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: dict[str, Any], size: Any, stride: Any
    ) -> FrozenShard:
        return FrozenShard(inner["data_"], inner["inv_"], meta["dtype"], Cut(*meta["place"]), *meta["how"])

    @property
    def scales(self) -> Tensor:
        side, rows = side_of(self), self.data_.numel() // math.prod(self.place.shape[1:])
        first = self.place.start % side if side else 0
        return self.inv_.repeat_interleave(side, 0)[first : first + rows] if side else self.inv_

    def dequantized(self) -> Tensor:
        data = self.data_.view(-1, *self.place.shape[1:])
        block = Block(1, self.block.columns) if data.dim() == 2 and side_of(self) else self.block
        return ops.dequantize(data, self.scales, self.dtype, [*block]).view(self.shape)

    def _take(self, values: Tensor) -> FrozenWeight:
        if isinstance(values, FrozenShard):
            self.data_.copy_(values.data_)
            self.inv_[: len(values.inv_)].copy_(values.inv_)
            self.place.start = values.place.start
        elif not torch.equal(values.to(self.device, self.dtype), self.dequantized()):
            what = "other values for a weight that is held in FP8, and that fully_shard has sharded"
            raise Fp8CompileError(f"{what}: load them before fully_shard, with load_fp8")
        return self

    # -- what FSDP2 gathers --

    def sent(self) -> tuple[Tensor, Tensor]:
        """The bytes of this rank, padded to as many rows as the first one has, and its scales."""
        data = self.data_.view(torch.uint8)
        if missing := self.place.rows - len(data):
            data = torch.cat((data, data.new_zeros(missing, *data.shape[1:])))
        return data, self.inv_

    def whole(self, data: Tensor, inv: Tensor, dtype: torch.dtype) -> FrozenWeight:
        """The weight of what all ranks have sent, of which it is a view; but for scales that stand twice."""
        data = data[: self.place.shape[0]].view(self.data_.dtype)
        return FrozenWeight(data, self._scales(inv), dtype, *self.how, self.stored)

    def _scales(self, inv: Tensor, out: Tensor | None = None) -> Tensor:
        """The scales of the weight. `inv`: [ranks * k, ..], as gathered. A view, unless a cut divides a
        block: then the scales of each block are taken from the rank that has its first row."""
        side, rows = side_of(self), self.place.shape[0]
        if not self._cut:
            return inv[: ops.blocks(rows, side)]
        parts = []
        for i, own in enumerate(inv.split(len(self.inv_))):
            start, end = i * self.place.rows, min((i + 1) * self.place.rows, rows)
            first = start // side
            parts.append(own[ops.blocks(start, side) - first : max(ops.blocks(end, side) - first, 0)])
        return torch.cat(parts) if out is None else torch.cat(parts, out=out)

    @property
    def _cut(self) -> bool:
        """True if the end of some shard divides a block."""
        side, place = side_of(self), self.place
        return bool(side) and place.rows < place.shape[0] and place.rows % side != 0

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        # With more arguments, FSDP2 would want all tensors to have the shape of a padded shard.
        return self.sent(), None

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        inv = outputs[1] if len(outputs) > 1 else self.inv_.to(outputs[0].device)  # a rank alone gets one
        if out is None:
            made = self.whole(outputs[0], inv, dtype)
            return made, (made.inv_,) if self._cut else ()
        if self._cut:  # all else is a view of memory that has been filled
            with torch.no_grad(), compat.fsdp.no_versions(out.inv_):
                self._scales(inv, out.inv_)
        return None


def side_of(weight: FrozenWeight) -> int:
    """How many rows share a scale; 0: all."""
    if weight.block == WHOLE:
        return 0
    dimensions = len(weight.place.shape) if isinstance(weight, FrozenShard) else weight.dim()
    return 1 if dimensions == 3 else weight.block.rows


def gathered(parameter: Any) -> FrozenWeight:
    """The weight, of the shards of all ranks: a collective. `parameter`: a DTensor of a `FrozenShard`."""
    local: FrozenShard = compat.fsdp.local(parameter)
    group, sent = compat.fsdp.shard_group(parameter), local.sent()
    if group is None:
        return local.whole(*sent, parameter.dtype)
    data, inv = (x.new_empty(len(x) * group.size(), *x.shape[1:]) for x in sent)
    for whole, part in zip((data, inv), sent, strict=True):
        compat.process_groups.all_gather(whole, part.contiguous(), group)
    return local.whole(data, inv, parameter.dtype)


# -- what FSDP2 does to make shards --


def _of_fsdp(weight: FrozenWeight, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an operator by which FSDP2 makes or moves shards; NotImplemented for all others."""
    if isinstance(weight, FrozenShard):
        inner = [*weight.place.shape[1:]]
        if func is aten.view.default and ([*args[1]] == [-1] or [*args[1]][1:] == inner):
            return weight.like(weight.data_.view(args[1]), weight.inv_)
        if func is aten.slice.Tensor and [*args[1:3]] == [0, 0] and len(args) < 5:
            return weight.like(func(weight.data_, *args[1:]), weight.inv_)
        if func is aten.is_pinned.default:
            return func(weight.data_)
        if func in MOVES and kwargs.get("dtype") in (None, weight.dtype):
            kwargs = {key: value for key, value in kwargs.items() if key != "dtype"}
            return weight.like(func(weight.data_, **kwargs), func(weight.inv_, **kwargs))
    if func not in (aten.split.Tensor, aten.new_zeros.default):
        return NotImplemented
    name = compat.fsdp.sharding()
    if name is None:
        return NotImplemented
    if func is aten.split.Tensor:
        return _split(weight, name, *args[1:])
    return _zeros(weight, args[1])


def _split(weight: FrozenWeight, name: str, rows: int, dim: int = 0) -> list[FrozenShard]:
    if dim:
        what = f"{name} is held in FP8, and shard_placement_fn shards it along dimension {dim}"
        fix = "return Shard(0) for it, or leave it whole by ignored_params=fp8compile.fp8_parameters(model)"
        raise ShardingError(f"{what}: {fix}")
    made, side = [], side_of(weight)
    for start in range(0, len(weight.data_), rows):
        data = weight.data_[start : start + rows]
        inv = weight.inv_[start // side : ops.blocks(start + len(data), side)] if side else weight.inv_
        place = Cut(weight.shape, rows, start)
        made.append(FrozenShard(data, inv, weight.dtype, place, *weight.how, weight.stored))
    return made


def _zeros(weight: FrozenWeight, size: Sequence[int]) -> FrozenShard:
    """Memory for a shard of this size."""
    side = side_of(weight)
    count = ops.blocks(size[0] + side - math.gcd(size[0], side), side)
    shape = weight.place.shape if isinstance(weight, FrozenShard) else weight.shape
    data, inv = weight.data_.new_zeros(size), weight.inv_.new_zeros(count, *weight.inv_.shape[1:])
    return FrozenShard(data, inv, weight.dtype, Cut(shape, size[0]), *weight.how, weight.stored)


FrozenWeight.of_fsdp = _of_fsdp  # type: ignore[method-assign, assignment]
for _name in ("to", "cpu", "cuda"):  # a shard that has moved is a shard
    setattr(FrozenShard, _name, getattr(Tensor, _name))
