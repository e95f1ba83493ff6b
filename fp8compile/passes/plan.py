"""plan: choose the tensors to quantize, each once for all its readers.

    q = linear(h, w_q); k = linear(h, w_k)    ->    h: one `Operand`, (w_q, "input", 0), read by both

An operand is a base tensor with a role. It is named by the weight of its first reader and the number of that
weight's earlier uses.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.fx import Node

from .. import compat
from ..config.recipe import Recipe, Scaling
from ..devices.formats import Format, pick
from ..ir.fx_utils import Matrix
from ..ir.matmul import Matmul, OperandKey, note_products
from ..ir.metadata import TensorKey

if TYPE_CHECKING:
    from .joint import Joint


@dataclass(eq=False)
class Operand:
    """A tensor to quantize: `format` and scaling are the same for all its readers and layouts. Readers whose
    recipes scale it in different ways have an operand each."""

    matrix: Matrix
    key: TensorKey
    format: Format
    scaling: Scaling
    recipe: Recipe  # of its first reader
    reader: Node  # the first matmul that reads it, whose metadata the casts inherit
    offs: Node | None = None  # the ends of the groups that its rows are divided into
    either: bool = False  # its row-major copy serves all its readers
    carried: bool = False  # a collective brings it in FP8

    @property
    def backward(self) -> bool:
        return self.key.role == "gradient"


@dataclass(eq=False)
class Plan:
    operands: dict[OperandKey, Operand] = field(default_factory=dict)

    def of(self, matrix: Matrix, role: str, matmul: Matmul) -> Operand:
        return self.operands[matmul.operand_key(matrix, role)]


def plan(joint: Joint) -> int:
    """Make the operands of all matmuls that become FP8; returns how many."""
    note_products(joint.matmuls)
    joint.plan = Plan(_operands(joint.matmuls, joint.fnuz))
    return len(joint.plan.operands)


def _operands(matmuls: list[Matmul], fnuz: bool) -> dict[OperandKey, Operand]:
    """The operands of all matmuls that become FP8. `fnuz`: the device uses the fnuz encodings."""
    made: dict[OperandKey, Operand] = {}
    uses: Counter[Node | None] = Counter()  # parameter -> its fprops so far
    use_of: dict[Matmul, int] = {}
    taken: set[TensorKey] = set()
    for matmul in matmuls:
        if matmul.gemm == "fprop":
            use_of[matmul] = uses[matmul.parameter]
            uses[matmul.parameter] += 1
    for matmul in (m for m in matmuls if m.fp8):
        use = use_of[matmul.fprop or matmul]
        index = compat.dynamo.input_index(matmul.parameter)  # type: ignore[arg-type]
        assert index is not None
        recipe = matmul.recipe
        for matrix, role in matmul.roles:
            operand_key = matmul.operand_key(matrix, role)
            if operand_key in made:
                continue
            scaling = operand_key.scaling
            form = pick(scaling.wide, fnuz if scaling.encoding == "auto" else scaling.encoding == "fnuz")
            key = TensorKey(index, role, 0 if role == "weight" else use, scaling.recipe)
            while key in taken:  # say, if a dgrad and a wgrad read different copies of their gradient
                key = TensorKey(index, role, key.use + 1, key.recipe)
            taken.add(key)
            operand = Operand(matrix, key, form, scaling, recipe, matmul.node, operand_key.offs)
            operand.either = matmul.decision.either and role == "weight"
            made[operand_key] = operand
    return made
