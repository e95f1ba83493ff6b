"""forwards: what a graph says of the forward matmul of each weight, and how that is kept with the record of
the parameter. An export repeats it for a server. The pass changes nothing.

    y = linear(x, w)  ->  {input of w: (Forward(recipe, how w and x are scaled, where their histories are),)}

A training graph counts more than an evaluation: evaluations may stay in high precision, and have no
histories. Of several graphs of one kind the newest counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ... import compat
from ...config.recipe import Scaling
from ...extension import stored_scales
from ...ir.matmul import Matmul
from ...passes.gathered import arrived
from ...passes.joint import Joint
from ...passes.plan import Operand, Plan
from ...runtime.parameters import all_records, find, record_of

Slot = tuple[int, int]  # the input of the graph whose weight owns the slot, and which use of it


@dataclass(frozen=True)
class Forward:
    """One FP8 fprop ``y[m, n] = x[m, k] @ w[n, k]^T`` as a graph decided it. Plain data: no tensor, no node.

    `weight`, `data`: how the two operands are scaled. `weight_slot`, `data_slot`: the slots of their
    histories; None with a scale from the current amax. `together`: the inputs of the graph whose weights
    share one scale with this one, where matmuls are merged. `whole`: the operand is the parameter itself, not
    a slice of it or a tensor computed from it. `rows_are_outputs`: the parameter is ``[out, in]``, as a
    Linear's. `groups`: experts, where the weight is a stack of matrices. `fnuz`: it has AMD's encoding.
    `alike`: the ranks that have parts of the weight scale them alike (`amax_group`). `owners`: in a call with
    known parameters, those of its slots and of `together`, by input."""

    recipe: str
    weight: Scaling
    data: Scaling
    weight_slot: Slot | None = None
    data_slot: Slot | None = None
    together: tuple[int, ...] = ()
    whole: bool = True
    rows_are_outputs: bool = True
    groups: int = 0
    fnuz: bool = False
    alike: bool = False
    owners: Mapping[int, weakref.ref] = field(default_factory=dict, compare=False, repr=False)

    def stored_scale(self, slot: Slot | None, role: str) -> float | None:
        """The stored scale of an operand; None if it has none, or none yet."""
        owner = self.owners[slot[0]]() if slot is not None and slot[0] in self.owners else None
        if slot is None or owner is None:
            return None
        found = stored_scales([owner]).get((id(owner), role, slot[1]))
        return None if found is None or found.cold else found.scale

    def partners(self) -> list[Any]:
        """The weights that share one scale, this one among them; [] if it has a scale of its own."""
        found = [self.owners[i]() for i in self.together if i in self.owners]
        return [tensor for tensor in found if tensor is not None]


@dataclass(frozen=True)
class Forwards:
    """Those of each weight of a graph, by the graph's input that is the weight, in the order of the graph; ()
    if one of its fprops is in high precision."""

    by_input: Mapping[int, tuple[Forward, ...]] = field(default_factory=dict)


def forwards(joint: Joint) -> int:
    """Note the fprops of each weight, by the graph's input that is the weight, in the order of the graph."""
    found: dict[int, tuple[Forward, ...]] = {}
    kept: set[int] = set()  # with an fprop in high precision
    for matmul in joint.matmuls:
        index = compat.dynamo.input_index(matmul.parameter) if matmul.parameter is not None else None
        if matmul.gemm == "fprop" and index is not None:
            if matmul.fp8:
                found[index] = (*found.get(index, ()), _forward(matmul, joint.plan))
            else:
                kept.add(index)
    found |= dict.fromkeys(kept, ())
    joint.results.put(Forwards(found))
    return len(found)


def _forward(matmul: Matmul, plan: Plan) -> Forward:
    operands = {role: (matrix, plan.of(matrix, role, matmul)) for matrix, role in matmul.roles}
    stored, weight = operands["weight"]
    data = operands["input"][1]
    return Forward(
        recipe=matmul.recipe.name,
        weight=weight.scaling,
        data=data.scaling,
        weight_slot=_slot(weight),
        data_slot=_slot(data),
        together=tuple(compat.dynamo.input_index(other.parameter) for other in matmul.merged),  # type: ignore[misc, arg-type]
        whole=matmul.weight is matmul.parameter or arrived(matmul.weight),
        rows_are_outputs=stored.transposed == (matmul.b is stored),
        groups=matmul.groups,
        fnuz=weight.format.name.endswith("fnuz"),
        alike=bool(matmul.recipe.amax_group),
    )


def _slot(operand: Operand) -> Slot | None:
    return (operand.key.input, operand.key.use) if operand.scaling.delayed else None


# -- by parameter --


@dataclass(eq=False)
class KnownForwards:
    """Of one parameter: those of the newest graph that trains (True), and of the newest that evaluates."""

    of: dict[bool, tuple[Forward, ...]] = field(default_factory=dict)


def know(
    owners: Mapping[int, weakref.ref], forwards: Mapping[int, tuple[Forward, ...]], trains: bool
) -> None:
    """Record that a graph with these weights, by input, multiplies so."""
    for index, several in forwards.items():
        owner = owners[index]() if index in owners else None
        if owner is not None:
            made = tuple(replace(forward, owners=owners) for forward in several)
            record_of(owner).extras.of(KnownForwards).of[trains] = made


def of(parameter: Any) -> tuple[Forward, ...]:
    """The forward matmuls of a parameter in training, else in evaluation; () if no graph multiplies by it, or
    one does in high precision."""
    known = find(parameter).extras.of(KnownForwards).of
    return known.get(True, known.get(False, ()))


def share(parameter: Any, other: Any) -> None:
    """`other`, a new tensor, is multiplied as a parameter is."""
    record_of(other).extras.of(KnownForwards).of.update(find(parameter).extras.of(KnownForwards).of)


def forget() -> None:
    """All graphs are gone."""
    for _, record in all_records():
        record.extras.pop(KnownForwards)
