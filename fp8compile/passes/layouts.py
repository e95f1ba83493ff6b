"""layouts: which FP8 copies are kept for backward, and which are cast again there.

    x8 = quantize(x, scale, False)  ->  x8, x8t = quantize_both(x, scale), in forward
    x8t = quantize(x, scale, True)  or  x8t tagged MUST_RECOMPUTE: made in backward

The transposed copy of a weight, which dgrad reads, is written in forward and kept (one byte an element),
unless the weight is cast again in backward (`recast_weights`, the user's checkpointing). The transposed copy
of an input, which wgrad reads, is written in forward too, and the partitioner decides whether it is kept. It
is made in backward where that costs no more bytes: where backward keeps the input anyway (the output of
attention), or reads what it is made of anyway (GELU, a norm). With `save="fp8"`, an input that would be made
again from two tensors in FP8 is kept.
"""

from __future__ import annotations

import operator

from torch.fx import Node

from .. import compat
from ..ir import ops
from ..ir.fx_utils import (
    CASTS,
    PERMUTES,
    SAME,
    VIEWS,
    aten,
    behind,
    hint,
    is_tensor,
    pointwise,
    reached,
    readers,
    value,
)
from ..ir.metadata import OPERAND
from ..ir.schemas import both_args, copies_at
from .joint import Joint
from .plan import Operand
from .written import Copy, Written

_RESHAPES = (*VIEWS, *PERMUTES, aten.expand.default, operator.getitem)


def layouts(joint: Joint) -> int:
    """Tag or join the casts; returns how many pairs were joined."""
    written, joined = joint.form, 0
    for plain, late in written.pairs():
        operand = plain.operand
        one, other = (copies_at(written.casts[copy])[0] for copy in (plain, late))
        kept = weight_kept(operand)
        if not kept and (operand.key.role != "input" or one.block != other.block):
            continue
        source, unasked = one.source, operand.reader.meta.get("recompute") is None
        again = unasked and read_again(source)
        # made again from two tensors that are kept in FP8, it would have their errors, too
        kept = kept or again and joint.saves and not read_again(source, most=1)
        if not kept and unasked and (again or kept_anyway(source)):
            written.casts[late].meta["recompute"] = compat.inductor.MUST_RECOMPUTE
        else:
            _join(written, plain, late, kept)
            joined += 1
    for copy, node in written.casts.items():
        operand = copy.operand
        if operand.either and operand in written.late and operand.reader.meta.get("recompute") is None:
            kept = weight_kept(operand)
            node.meta["recompute"] = compat.inductor.MUST_SAVE if kept else compat.inductor.MUST_RECOMPUTE
    return joined


def weight_kept(operand: Operand) -> bool:
    """Whether forward keeps the copy of a weight that backward reads."""
    recompute = operand.reader.meta.get("recompute")  # the tag of the user's checkpointing, if any
    return operand.key.role == "weight" and recompute is None and operand.recipe.recast_weights is not True


def _join(written: Written, plain: Copy, late: Copy, kept: bool) -> None:
    """One operator and one read for both layouts: forward writes its own copy and that of backward."""
    one, other = (written.casts[copy] for copy in (plain, late))
    operand = plain.operand
    recompute = compat.inductor.MUST_SAVE if kept else operand.reader.meta.get("recompute")
    emit = written.after(max(*one.all_input_nodes, *other.all_input_nodes), operand, recompute=recompute)
    both = emit(ops.quantize_both, *both_args(copies_at(one)[0], copies_at(other)[0]))
    both.meta[OPERAND] = operand.key
    emit.anchor = both.next
    parts = [emit(operator.getitem, both, int(copy.transposed)) for copy in (plain, late)]
    for copy, node, made in zip((plain, late), (one, other), parts, strict=True):
        node.replace_all_uses_with(made)
        written.casts[copy] = made
        written.erase(node)


def read_again(source: Node, most: int | None = None) -> bool:
    """True if a forward tensor is computed, element by element, from tensors that pointwise operators of the
    backward read, too. With `most`: from no more than so many that are as large."""

    def computed(node: Node) -> bool:
        return node.op == "call_function" and (_pointwise(node) or node.target in _RESHAPES)

    made = [*reached([source], lambda x: filter(is_tensor, x.all_input_nodes) if computed(x) else ())]
    large = [x for x in made if not computed(x) and hint(value(x).numel()) * 16 > hint(value(source).numel())]
    if not any(computed(x) and _pointwise(x) and x.target not in CASTS for x in made):
        return False
    return all(map(_read_in_backward, large)) and (most is None or len(large) <= most)


def kept_anyway(source: Node) -> bool:
    """True if attention's backward reads a forward tensor itself. It reads attention's output."""
    users = readers(behind(source, (*VIEWS, *PERMUTES, aten.clone.default)), SAME)
    return any(compat.dynamo.is_backward(user) and "attention" in str(user.target) for user in users)


def _read_in_backward(node: Node) -> bool:
    users = readers(node, (*_RESHAPES, *CASTS))
    return any(compat.dynamo.is_backward(user) and _pointwise(user) for user in users)


def _pointwise(node: Node) -> bool:
    return pointwise(node) or node.target in (*CASTS, aten.clone.default)
