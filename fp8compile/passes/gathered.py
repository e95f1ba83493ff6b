"""gathered: weights that arrive in FP8: those that FSDP2 has gathered so (`ir.gathered_weight`), and frozen
ones that are kept in FP8 only (`ir.frozen`).

    w = dequantize(data, inv); mm(x, permute(w))          fprop
    w_1 = dequantize(data, inv); mm(dy, w_1)              dgrad     ->  `unite`: w_1 is w

    w8 = quantize(w, ..); w8t = quantize(w, .., True)  ->  `substitute`: w8 = data; w8t = clone(permute(data))

`gather` says of each parameter of a training graph whether it could arrive so: only FP8 matmuls read it, and
they cast it alike, each scale from its own amax. It says so of weights that are gathered in high precision,
too: that is how the runtime learns which ones need not be. A scale is one of the whole weight or, with
blocks, of a square block: both layouts share it then.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from .. import compat
from ..config.recipe import WHOLE, Block, Scaling
from ..ir import ops
from ..ir.fx_utils import ALIKE, VIEWS, arg, aten, behind, call_function, readers, same_shape, value
from ..ir.matmul import Matmul
from ..ir.records import Gatherable
from .joint import Joint
from .layouts import weight_kept
from .legality import NO_ROWS
from .plan import Operand
from .written import Written


def unite(joint: Joint) -> int:
    """Let all that read a gathered weight read one node; returns how many nodes that spares."""
    graph = joint.graph
    first: dict[tuple, Node] = {}
    spared = 0
    for node in graph.find_nodes(op="call_function", target=ops.dequantize):
        kept = first.setdefault((*node.args[:2], *map(str, node.args[2:])), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
            spared += 1
    return spared


def gather(joint: Joint) -> int:
    """Note which parameters of a training graph may arrive in FP8; not those that only empty matmuls read."""
    if joint.inference or not joint.inputs.training:
        return 0
    policy = joint.policies.index(joint.policy)
    known, seen = {matmul.node: matmul for matmul in joint.matmuls}, set[int | None]()
    for node in joint.graph.find_nodes(op="placeholder"):
        index = compat.dynamo.input_index(node)
        if index not in joint.inputs.parameters or index in seen:  # the second of FP8 values is their scale
            continue
        seen.add(index)
        weight = next((user for user in node.users if call_function(user, (ops.dequantize,))), node)
        made = _gatherable(weight, node, known, joint.fnuz)
        joint.gatherable.pop(index, None)
        if made is not None:
            joint.gatherable[index] = joint.verdicts[policy, index] = made
            if made.reason and weight is not node:
                joint.unfit |= {policy}
    return sum(not found.reason for found in joint.gatherable.values())


def substitute(joint: Joint) -> int:
    """Let matmuls read the FP8 values that are there, instead of casting them again; returns how many weights
    that are. Forward makes and keeps the copy that dgrad reads, or backward makes it, as for any weight."""
    written = joint.form
    found: dict[Operand, Node] = {}
    for copy, cast in written.casts.items():
        source = behind(arg(cast, 0), VIEWS)  # a stack is cast as one matrix
        if arrives(source, copy.operand.scaling) and value(arg(cast, 0)).shape[0] % 16 == 0:
            if value(arg(source, 0)).dtype == copy.operand.format.dtype:
                found[copy.operand] = source
    for operand, weight in found.items():
        _substitute(written, operand, *weight.args[:2])  # type: ignore[arg-type]
    return len(found)


def _substitute(written: Written, operand: Operand, data: Node, inverse: Node) -> None:
    if value(data).dim() == 3:
        emit = written.after(data, operand)
        data, inverse = (emit(aten.view.default, x, [-1, value(x).shape[-1]]) for x in (data, inverse))
    for copy in written.copies(operand):
        cast = written.casts.pop(copy)
        made = data
        if copy.transposed:
            kept = compat.inductor.MUST_SAVE if weight_kept(operand) else compat.inductor.MUST_RECOMPUTE
            emit = written.after(data, operand, recompute=kept)
            turned = emit(aten.permute.default, data, [1, 0])
            made = emit(aten.clone.default, turned, memory_format=torch.contiguous_format)
        cast.replace_all_uses_with(made)
        written.erase(cast)
    for copy in [copy for copy in written.scales if copy.operand is operand]:
        made = inverse
        if copy.transposed:  # a view, which backward takes of what it has saved
            emit = written.after(inverse, operand, recompute=compat.inductor.MUST_RECOMPUTE)
            made = emit(aten.permute.default, inverse, [1, 0])
        written.scales.pop(copy)[1].replace_all_uses_with(made)
    written.amaxes.pop(operand, None)


def arrived(base: Node | None) -> bool:
    """True if this is a weight that is an input of the graph in FP8."""
    return base is not None and call_function(base, (ops.dequantize,))


def block_held(base: Node | None) -> Block | None:
    """The elements that share a scale of a weight that is an input of the graph in FP8; None for others."""
    if base is None or not arrived(base):
        return None
    return Block(*arg(base, 3)) if len(base.args) > 3 else WHOLE


def not_as_held(matmul: Matmul) -> str | None:
    """Why the bytes of a weight that arrives in FP8 cannot be multiplied: the matmul reads a part of it, or
    what is computed from it."""
    if matmul.parameter is None or arrived(matmul.weight) or not any(map(arrived, matmul.parameter.users)):
        return None
    return "a part of a weight that is held in FP8, or computed from one"


def arrives(base: Node, scaling: Scaling) -> bool:
    """True if this is a weight that arrives in FP8, with scales of the blocks that this scaling has."""
    return not scaling.delayed and scaling.block == block_held(base)


def _gatherable(weight: Node, parameter: Node, known: dict[Node, Matmul], fnuz: bool) -> Gatherable | None:
    scalings: dict[Scaling, str] = {}
    reading = [x for x in readers(weight, ALIKE) if not call_function(x, ALIKE)]
    for reader in reading:
        matmul = known.get(reader)
        if matmul is None:
            what = f"read by {reader.target}".removesuffix(".default")
            if reader.op == "output":
                what = "returned by the graph"
            return Gatherable(what, shared=any(other in known and known[other].fp8 for other in reading))
        operand = matmul.weight_operand
        if matmul.reason == NO_ROWS:
            continue
        if matmul.reason is not None:
            return Gatherable(matmul.reason)
        if operand is None or matmul.parameter is not parameter or operand.base is not weight:
            return Gatherable(f"read by {matmul.fqn}, which has another weight")
        if operand.stack > 1:
            return Gatherable("a stack of matrices")
        if not same_shape(operand.shape, value(weight).shape):
            return Gatherable("multiplied in another shape than it has")
        scalings[matmul.recipe.scaling("weight", matmul.gemm)] = matmul.recipe.name
    for scaling, recipe in scalings.items():
        if scaling.delayed:
            return Gatherable(f"recipe {recipe!r} scales weights by their history")
        if scaling.block.rows != scaling.block.columns:
            return Gatherable(f"recipe {recipe!r} needs other scales in dgrad than in fprop")
    if len(scalings) > 1:
        return Gatherable("its matmuls cast it in different ways")
    for scaling in scalings:
        theirs = fnuz if scaling.encoding == "auto" else scaling.encoding == "fnuz"
        return Gatherable(
            margin=scaling.margin, power_of_2=scaling.power_of_2, fnuz=theirs, block=scaling.block
        )
    return None
