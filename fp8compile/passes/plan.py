"""plan: choose the tensors to quantize, each once for all its readers, and the slots that keep their scales.

    q = linear(h, w_q); k = linear(h, w_k)    ->    h: one `Operand`, slot (w_q, "input", 0), read by both

An operand is a base tensor with a role. Its slot is named by the weight of its first reader and the number of
that weight's earlier uses. Slots of one direction are ordered so that amaxes over equally many rows are
neighbours: their last reduction is one kernel.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from .. import compat
from ..config.recipe import Recipe, Scaling
from ..devices.formats import Format, pick
from ..ir.fx_utils import Matrix, become, value
from ..ir.matmul import Matmul, OperandKey, note_products
from ..ir.state_page import SlotKey, SlotSettings, floor_of, limit_of, rows_for

if TYPE_CHECKING:
    from .joint import Joint


@dataclass(eq=False)
class Operand:
    """A tensor to quantize: `format` and scaling are the same for all its readers and layouts. Readers whose
    recipes scale it in different ways have an operand each."""

    matrix: Matrix
    key: SlotKey
    format: Format
    scaling: Scaling
    recipe: Recipe  # of its first reader
    reader: Node  # the first matmul that reads it, whose metadata the casts inherit
    offs: Node | None = None  # the ends of the groups that its rows are divided into
    either: bool = False  # its row-major copy serves all its readers
    carried: bool = False  # a collective brings it in FP8
    slot: int = -1  # its row in the page of the graph; -1 with a recipe that keeps no state

    @property
    def backward(self) -> bool:
        return self.key.role == "gradient"


@dataclass(eq=False)
class Plan:
    operands: dict[OperandKey, Operand] = field(default_factory=dict)

    def of(self, matrix: Matrix, role: str, matmul: Matmul) -> Operand:
        return self.operands[matmul.operand_key(matrix, role)]

    def direction(self, backward: bool) -> list[Operand]:
        """The operands of the forward or of the backward that have a slot, by slot."""
        found = [x for x in self.operands.values() if x.backward is backward and x.slot >= 0]
        return sorted(found, key=lambda x: x.slot)


def plan(joint: Joint) -> int:
    """Give each operand its slot, and the state inputs as many rows as the slots need."""
    note_products(joint.matmuls)
    joint.plan = Plan(_operands(joint.matmuls, joint.fnuz))
    _number(joint.plan)
    slots = tuple(x.key for backward in (False, True) for x in joint.plan.direction(backward))
    if slots and joint.stateful:
        joint.slots = slots
        placeholders = joint.graph.find_nodes(op="placeholder")
        by_index = {compat.dynamo.input_index(node): node for node in placeholders}
        first = len(joint.inputs.names)
        joint.state = by_index[first], by_index[first + 1]
        joint.state_inputs = tuple(node.name for node in joint.state)
        joint.added += joint.state_inputs
        for node in joint.state:
            become(node, value(node).new_empty(rows_for(len(slots)), *value(node).shape[1:]))
    return len(joint.plan.operands)


def _operands(matmuls: list[Matmul], fnuz: bool) -> dict[OperandKey, Operand]:
    """The operands of all matmuls that become FP8. `fnuz`: the device uses the fnuz encodings."""
    made: dict[OperandKey, Operand] = {}
    uses: Counter[Node | None] = Counter()  # parameter -> its fprops so far
    use_of: dict[Matmul, int] = {}
    taken: set[SlotKey] = set()
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
            key = SlotKey(index, role, 0 if role == "weight" else use, _settings(scaling, form, role))
            while key in taken:  # say, if a dgrad and a wgrad read different copies of their gradient
                key = SlotKey(index, role, key.use + 1, key.settings)
            taken.add(key)
            operand = Operand(matrix, key, form, scaling, recipe, matmul.node, operand_key.offs)
            operand.either = matmul.decision.either and role == "weight"
            made[operand_key] = operand
    return made


def _number(plan: Plan) -> None:
    """Give each operand with a history its slot: those of forward first."""
    slots = count()
    for backward in (False, True):
        operands = [x for x in plan.operands.values() if x.backward is backward and x.scaling.delayed]
        rows = [str(operand.matrix.shape[0]) for operand in operands]
        for operand in sorted(operands, key=lambda x: rows.index(str(x.matrix.shape[0]))):
            operand.slot = next(slots)


def _settings(scaling: Scaling, form: Format, role: str) -> SlotSettings:
    window, interval, answers = scaling.history
    reach, info = form.max / 2.0**scaling.margin, torch.finfo(form.dtype)
    if not answers:
        return SlotSettings(reach, window, interval)
    limit = limit_of(form.max, scaling.margin, role == "gradient")
    floor = floor_of(form.max, info.smallest_normal * info.eps, scaling.margin)
    return SlotSettings(reach, window, interval, limit, floor)
