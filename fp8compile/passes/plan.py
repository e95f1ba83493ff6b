"""plan: choose the tensors to quantize, each once for all its readers.

    q = linear(h, w_q); k = linear(h, w_k)    ->    h: one `Operand`, (w_q, "input", 0), read by both

Where several graphs are made of this one, as rules hold at other steps, all of them plan the operands with
delayed scaling of all policies, in the same order: so each has the same slots, and no switch is cold.

An operand is a base tensor with a role. It is named by the weight of its first reader and the number of that
weight's earlier uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.fx import Node

from .. import compat
from ..config.recipe import Recipe, Scaling
from ..devices.formats import Format, pick
from ..ir.fx_utils import Matrix
from ..ir.matmul import Decision, Matmul, OperandKey, note_products
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
    cast: bool = True  # False: other graphs cast it; here its amax goes into its history

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
    decisions = {x: [joint.decided[policy, x][0] for policy in joint.policies] for x in joint.matmuls}
    fp8 = {matmul for matmul, several in decisions.items() if any(one.reason is None for one in several)}
    note_products(joint.matmuls, fp8)
    own = [(compat.dynamo.input_index(x.parameter), x.gemm) for x in joint.matmuls if x.fp8 and x.parameter]
    joint.gemms = frozenset((i, gemm) for i, gemm in own if i is not None)
    joint.plan = Plan(_operands(decisions, joint.fnuz))
    for matmul, several in decisions.items():
        distinct = {_made(one): one for one in reversed(several)}
        matmul.others = tuple(one for made, one in distinct.items() if made != _made(matmul.decision))
    every = [
        (policy.save, *(_made(several[i]) for several in decisions.values()))
        for i, policy in enumerate(joint.policies)
    ]
    joint.alike = tuple(map(every.index, every))
    return len(joint.plan.operands)


def _made(decision: Decision) -> tuple[Recipe, bool] | None:
    """What a decision makes of the graph."""
    return (decision.recipe, decision.either) if decision.reason is None else None


def _operands(decisions: Mapping[Matmul, Sequence[Decision]], fnuz: bool) -> dict[OperandKey, Operand]:
    """The operands of all matmuls that become FP8, here or in another graph. `fnuz`: the device uses the fnuz
    encodings."""
    made: dict[OperandKey, Operand] = {}
    uses: Counter[Node | None] = Counter()  # parameter -> its fprops so far
    use_of: dict[Matmul, int] = {}
    taken: set[TensorKey] = set()
    for matmul in decisions:
        if matmul.gemm == "fprop":
            use_of[matmul] = uses[matmul.parameter]
            uses[matmul.parameter] += 1
    reading = [
        (matmul, decision, *operand, matmul.operand_key(*operand, decision.recipe))
        for matmul, several in decisions.items()
        for decision in dict.fromkeys(several)
        if decision.reason is None
        for operand in matmul.roles
    ]
    # those with a slot first, so that no other operand of one graph has the name that it has in another
    reading.sort(key=lambda x: not x[-1].scaling.delayed)
    for matmul, decision, matrix, role, operand_key in reading:
        cast = matmul.fp8 and decision == matmul.decision
        scaling, recipe, either = operand_key.scaling, decision.recipe, decision.either and role == "weight"
        if operand_key in made:
            known = made[operand_key]
            if cast and not known.cast:
                known.cast, known.recipe, known.reader, known.either = True, recipe, matmul.node, either
            continue
        if not cast and not scaling.delayed:
            continue
        index = compat.dynamo.input_index(matmul.parameter)  # type: ignore[arg-type]
        assert index is not None
        form = pick(scaling.wide, fnuz if scaling.encoding == "auto" else scaling.encoding == "fnuz")
        use = 0 if role == "weight" else use_of[matmul.fprop or matmul]
        key = TensorKey(index, role, use, scaling.recipe)
        while key in taken:  # say, if a dgrad and a wgrad read different copies of their gradient
            key = TensorKey(index, role, key.use + 1, key.recipe)
        taken.add(key)
        made[operand_key] = Operand(
            matrix, key, form, scaling, recipe, matmul.node, operand_key.offs, either, cast=cast
        )
    return made
