"""forwards: what the graph says of the forward matmul of each weight, for an export (see `forward`). Changes nothing.

    y = linear(x, w)      ->    {input of w: (Forward(recipe, how w and x are scaled, where their histories are),)}
"""

from __future__ import annotations

from ... import compat
from ...ir.matmul import Matmul
from ...passes.gathered import arrived
from ...passes.joint import Joint
from ...passes.plan import Operand, Plan
from .forward import Forward, Forwards, Slot


def forwards(joint: Joint) -> int:
    """Note the fprops of each weight, by the graph's input that is the weight, in the order of the graph."""
    found: dict[int, tuple[Forward, ...]] = {}
    for matmul in joint.matmuls:
        index = compat.input_index(matmul.parameter) if matmul.parameter is not None else None
        if matmul.gemm == "fprop" and index is not None:
            found[index] = (*found.get(index, ()), _forward(matmul, joint.plan))
    joint.results.put(Forwards(found))
    return len(found)


def _forward(matmul: Matmul, plan: Plan) -> Forward:
    if not matmul.fp8:
        return Forward(reason=matmul.reason or "")
    operands = {role: (matrix, plan.of(matrix, role, matmul)) for matrix, role in matmul.roles}
    stored, weight = operands["weight"]
    data = operands["input"][1]
    return Forward(
        recipe=matmul.recipe.name,
        weight=weight.scaling,
        data=data.scaling,
        weight_slot=_slot(weight),
        data_slot=_slot(data),
        together=tuple(compat.input_index(other.parameter) for other in matmul.merged),  # type: ignore[misc, arg-type]
        whole=matmul.weight is matmul.parameter or arrived(matmul.weight),
        rows_are_outputs=stored.transposed == (matmul.b is stored),
        groups=matmul.groups,
        fnuz=weight.format.name.endswith("fnuz"),
    )


def _slot(operand: Operand) -> Slot | None:
    return (operand.key.input, operand.key.use) if operand.slot >= 0 else None
