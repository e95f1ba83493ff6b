"""Operators that read stored scales, in the namespace `fp8compile::`, with their reference implementations.

    delayed_scale(scales, amax, slot, ...)          the slot's scale; in a cold call from the current amax
    delayed_inverse(scales, scale, slot)            1 / scale
    votes(scales, slots); agreed_scale(...)         the same scale on all ranks that gather one tensor

`scales` is the graph's input of that name (`state_page`). `store.load_scales` lowers them: in compiled code,
which runs warm calls only, a stored scale is a number in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import compat
from ...ir.ops import define_op, one_number
from ...ir.scale import inverse_of, scale_of
from . import state_page


@define_op(
    "delayed_scale(Tensor scales, Tensor amax, int slot, float fp8_max, int margin) -> Tensor", one_number
)
def delayed_scale(scales: Tensor, amax: Tensor, slot: int, fp8_max: float, margin: int) -> Tensor:
    """The slot's scale; while the slot is cold that of the current amax, if it is finite. (The lowering
    always takes the slot's.)"""
    row = state_page.Rows(state_page.numbers_of(scales[slot]))
    return _stored_or_current(row.scale.reshape(1), row.cold, amax, fp8_max, margin)


def _stored_or_current(stored: Tensor, cold: Tensor, amax: Tensor, fp8_max: float, margin: int) -> Tensor:
    return torch.where(cold & amax.isfinite(), scale_of(amax, fp8_max, margin), stored)


def votes_of(scales: Tensor, slots: Sequence[int], cold: bool = True) -> Tensor:
    """`[len(slots) + 1]` float32: what this rank knows of the scales of tensors that are gathered from
    several ranks. The minimum over the ranks is what they agree on. `cold`: this call is cold. (The lowering
    always takes a warm call.)

    The scale of each slot, infinite while it has none in a cold call; then 1 in a cold call, 0 in a warm one.
    """
    rows = [state_page.Rows(state_page.numbers_of(scales.select(0, slot))) for slot in slots]
    stored = [
        (torch.where(row.cold, float("inf"), row.scale) if cold else row.scale).reshape(1) for row in rows
    ]
    return torch.cat([*stored, scales.new_full((1,), float(cold))])


votes = define_op("votes(Tensor scales, int[] slots, bool cold=True) -> Tensor")(votes_of)


@define_op(
    "agreed_scale(Tensor agreed, Tensor amax, int index, str group, float fp8_max, int margin) -> Tensor",
    one_number,
)
def agreed_scale(agreed: Tensor, amax: Tensor, index: int, group: str, fp8_max: float, margin: int) -> Tensor:
    """The scale of this rank's part of a tensor, the same on all ranks. `agreed`: the minimum of their votes.

    It is the scale that they agree on. Only if the call is cold on all ranks, they reduce their amaxes, and
    decide as `delayed_scale`: so all ranks wait for this all-reduce, or none. (The lowering takes `agreed`.)
    """
    stored = agreed[index : index + 1]
    if not bool(agreed[-1]):
        return stored
    amax = compat.process_groups.largest(amax, group)
    return _stored_or_current(stored.nan_to_num(posinf=1.0), stored.isinf(), amax, fp8_max, margin)


@define_op("delayed_inverse(Tensor scales, Tensor scale, int slot) -> Tensor", one_number)
def delayed_inverse(scales: Tensor, scale: Tensor, slot: int) -> Tensor:
    return inverse_of(scale)
