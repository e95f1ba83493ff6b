"""What a graph says of the forward matmul of a weight: how both operands are cast. An export repeats it for a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...config.recipe import Scaling

Slot = tuple[int, int]  # the input of the graph whose weight owns the slot, and which use of it


@dataclass(frozen=True)
class Forward:
    """One fprop ``y[m, n] = x[m, k] @ w[n, k]^T`` as a graph decided it. Plain data: no tensor, no node.

    `reason`: why it stays in high precision, "" if it is FP8. All other fields are those of an FP8 matmul.
    `weight`, `data`: how the two operands are scaled. `weight_slot`, `data_slot`: the slots of their histories; None with a
    scale from the current amax. `together`: the inputs of the graph whose weights share one scale with this one, where matmuls
    are merged. `whole`: the operand is the parameter itself, not a slice of it or a tensor computed from it.
    `rows_are_outputs`: the parameter is stored as ``[out, in]``, as that of a Linear. `groups`: experts, where the weight is a
    stack of matrices. `fnuz`: the weight's FP8 encoding is AMD's.
    """

    recipe: str = ""
    reason: str = ""
    weight: Scaling | None = None
    data: Scaling | None = None
    weight_slot: Slot | None = None
    data_slot: Slot | None = None
    together: tuple[int, ...] = ()
    whole: bool = True
    rows_are_outputs: bool = True
    groups: int = 0
    fnuz: bool = False


@dataclass(frozen=True)
class Forwards:
    """Those of each weight of a graph, by the graph's input that is the weight, in the order of the graph."""

    by_input: Mapping[int, tuple[Forward, ...]] = field(default_factory=dict)
