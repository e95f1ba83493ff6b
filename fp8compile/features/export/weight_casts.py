"""FP8 bytes and scales of weights, by the operators that training casts with.

    weight   = saturate(w * scale), rounded to nearest even, float8_e4m3fn [out, in]
    scale    = 448 / (amax * 2**margin), float32, one a tensor, row or block; see `ir.scale`
    exported: the weight, and 1 / scale, which multiplies the values of the weight: [1], [out, 1], [out / 128, in / 128],
              [out, in / 32] or, for tiles, [out / 32, in / 32]; out / 32 is rounded up
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...config.recipe import WHOLE, Block, Scaling
from ...devices.formats import E4M3
from ...ir import ops
from ...ir.frozen import FrozenWeight
from ...ir.scale import inverse_of, scale_of
from ...runtime.state import Slot
from . import forward_records
from .exported_layers import ExportedLayer


class WeightCast(NamedTuple):
    """`values`: float8_e4m3fn ``[out, in]``. `scale_inv`: float32, as above. Both on the CPU."""

    values: Tensor
    scale_inv: Tensor


def cast(layer: ExportedLayer) -> WeightCast:
    """The weight of a layer, as the next forward of training would cast it.

    With a history, the scale is that of the history. If there is none, or the weight has just overflowed, it is that of the
    current amax, as in a cold call. Weights of merged matmuls share the smallest of their scales.
    """
    with torch.no_grad():
        weight = layer.weight
        if isinstance(weight, FrozenWeight) and Block(weight.block, weight.block) == layer.scaling.block:
            return WeightCast(weight.data_.cpu(), weight.inv_.cpu())  # as it is kept
        weight = weight.detach()
        scale = _scale(layer)
        values = ops.quantize(weight, scale, E4M3.dtype, E4M3.max, False, list(layer.scaling.block))
        return WeightCast(values.cpu(), inverse_of(scale).cpu())


def _scale(layer: ExportedLayer) -> Tensor:
    weights: Sequence[Tensor] = layer.partners or (layer.weight,)
    scales = [_own_scale(weight, layer.scaling) for weight in weights]
    return torch.stack([scale.to(layer.weight.device) for scale in scales]).amin(0) if len(scales) > 1 else scales[0]


def _own_scale(weight: Tensor, scaling: Scaling) -> Tensor:
    """The scale of one weight, float32: `[1]`, or one a block of it."""
    if scaling.delayed:
        slot = _slot(weight)
        if slot is not None and not bool(slot.numbers.cold):
            return slot.numbers.scale.detach().reshape(1).clone()
    weight = weight.detach()
    block = list(scaling.block)
    amax = ops.amax(weight) if scaling.block == WHOLE else ops.amax_blocks(weight, False, block)
    return scale_of(amax, E4M3.max, scaling.margin, scaling.power_of_2)


def _slot(weight: Tensor) -> Slot | None:
    found = (one.slot(one.forward.weight_slot, "weight") for one in forward_records.of(weight))
    return next((slot for slot in found if slot is not None), None)
