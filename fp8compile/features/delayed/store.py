"""slots, store, load_scales: the scale of a tensor with delayed scaling comes from the scaling state.

    scale_x = current_scale(amax_x, 448, 0); inv_x = inverse(scale_x)
->
    scale_x = delayed_scale(scales, amax_x, 0, 448, 0); inv_x = delayed_inverse(scales, scale_x, 0)
->  (after the partitioner: the warm graph, in which no cast waits for its tensor's amax)
    scale_x = scales[0, 0, 0:1]; inv_x = scales[0, 1, 0:1]

A tensor has one slot, named by its `TensorKey`. Slots of one direction are ordered so that amaxes over
equally many rows are neighbours: their last reduction is one kernel.

Tensors with one scale (merged matmuls) take the least of theirs. Where ranks gather a tensor from their parts
(`Written.groups`), its scale is the least of the ranks' stored scales (`votes`): one all-reduce at the
beginning of each direction, for which only the first collective waits. As a rule all ranks have the same
state, because the amaxes enter the histories reduced. But one rank may have skipped a bad batch, or may be in
a cold call alone. Only if the call is cold on all ranks do they take current amaxes (`agreed_scale`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from ... import compat
from ...codegen.inline import Inliner
from ...errors import OptionError
from ...ir import merged, ops
from ...ir.fx_utils import Emitter, aten, become, element, value
from ...passes.amax_groups import named_groups
from ...passes.joint import Joint
from ...passes.plan import Operand
from ...passes.written import Written, whole
from . import slot_ops, state_page
from .state_page import SlotKey, SlotSettings, floor_of, limit_of, new_amaxes, new_scales, rows_for


@dataclass
class StateInputs:
    """Of a joint graph with scaling state. `first`: the position of the input for scales, which that for
    amaxes follows. `rows`: the operands that have a slot, and which."""

    first: int
    rows: dict[Operand, int] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()

    def of(self, backward: bool) -> list[Operand]:
        """The operands of one direction, by row."""
        return [operand for operand in self.rows if operand.backward is backward]


@dataclass(frozen=True)
class Slots:
    """The result of the passes: plain data. `keys`: by row of the page; `cast`: the rows that the graph casts
    by; `inputs`: the names of those for scales and amaxes; `groups`: process groups over which amaxes are
    reduced before the state moves."""

    keys: tuple[SlotKey, ...] = ()
    cast: tuple[int, ...] = ()
    inputs: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


def slots(joint: Joint) -> int:
    """Give each operand with delayed scaling its slot, and the state inputs their sizes; returns how many."""
    inputs = joint.extras.get(StateInputs)
    if inputs is None:
        return 0
    for backward in (False, True):
        operands = [x for x in joint.plan.operands.values() if x.backward is backward and x.scaling.delayed]
        rows = [str(operand.matrix.shape[0]) for operand in operands]
        for operand in sorted(operands, key=lambda x: rows.index(str(x.matrix.shape[0]))):
            inputs.rows[operand] = len(inputs.rows)
    if not inputs.rows:
        return 0
    by_index = {compat.dynamo.input_index(x): x for x in joint.graph.find_nodes(op="placeholder")}
    inputs.nodes = by_index[inputs.first], by_index[inputs.first + 1]
    for node, made in zip(inputs.nodes, (new_scales, new_amaxes), strict=True):
        like = made(1, torch.device("cpu"))
        sizes = rows_for(len(inputs.rows)), *like.shape[1:]
        become(node, value(node).new_empty(sizes, dtype=like.dtype))
    names = tuple(node.name for node in inputs.nodes)
    joint.added += names
    keys = tuple(_slot(operand) for operand in inputs.rows)
    cast = tuple(row for operand, row in inputs.rows.items() if operand.cast)
    joint.results.put(Slots(keys, cast, names, _groups(joint, inputs)))
    return len(keys)


def _slot(operand: Operand) -> SlotKey:
    key, form, margin = operand.key, operand.format, operand.scaling.margin
    window, interval, answers = operand.scaling.history
    settings = SlotSettings(form.max / 2.0**margin, window, interval)
    if answers:
        info = torch.finfo(form.dtype)
        limit = limit_of(form.max, margin, key.role == "gradient")
        floor = floor_of(form.max, info.smallest_normal * info.eps, margin)
        settings = settings._replace(limit=limit, floor=floor)
    return SlotKey(key.input, key.role, key.use, settings)


FIX = ", e.g. options={'reduce_amax': mesh.get_group('dp')}"


def _groups(joint: Joint, inputs: StateInputs) -> tuple[str, ...]:
    """The process groups over which the amaxes of the state are reduced. OptionError for all ranks in a
    pipeline, because each stage runs other graphs and waits for the stage before."""
    groups, shards = compat.process_groups, joint.amax_groups
    recipes = [operand.recipe for operand in inputs.rows]
    every = named_groups("reduce_amax", {recipe.reduce_amax for recipe in recipes}, joint.inputs.groups)
    if any(map(groups.is_default_group, every.values())) and groups.in_pipeline():
        allowed = f"the process group of the ranks that share a pipeline stage{FIX}"
        raise OptionError.of("reduce_amax", True, allowed)
    names = *every.values(), *(shards[given] for given in {x.amax_group for x in recipes} & shards.keys())
    ranks = {groups.ranks_of(name): name for name in names}
    # max covers its parts
    needed = tuple(name for group, name in ranks.items() if not any(group < other for other in ranks))
    joint.groups |= dict.fromkeys((*needed, *shards.values()))
    return needed


def store(joint: Joint) -> int:
    """Take the scales of operands with a slot from the state; returns how many slots there are."""
    inputs = joint.extras.get(StateInputs)
    if inputs is None or not inputs.rows:
        return 0
    _Stored(joint.form, inputs).write()
    return len(inputs.rows)


class _Stored:
    def __init__(self, written: Written, inputs: StateInputs):
        self.written, self.inputs, self.scales = written, inputs, inputs.nodes[0]
        self.agreements: dict[tuple[bool, str], Node] = {}  # of ranks, by direction and group

    def write(self) -> None:
        sharing: dict[Node, list[Operand]] = defaultdict(list)
        for operand in (x for x in self.inputs.rows if x.cast):
            sharing[self.written.scales[whole(operand)][0]].append(operand)
        for operands in sharing.values():
            made = self.own(operands[0]) if len(operands) == 1 else self.shared(operands)
            self.written.replace_scale(operands[0], *made)
            self.written.scales.update({whole(operand): made for operand in operands})

    def emitter(self, operand: Operand, anchor: Node) -> Emitter:
        return self.written.at(anchor, operand, recompute=compat.inductor.MUST_SAVE, ac_graph_id=None)

    def own(self, operand: Operand) -> tuple[Node, Node]:
        """(scale, inverse) of an operand that shares neither with another one."""
        current, inverse = self.written.scales[whole(operand)]
        emit = self.emitter(operand, current)
        if operand in self.written.groups:
            agreed, number = self.agreed(operand)
            amax, group = self.written.amaxes[operand], self.written.groups[operand]
            how = operand.format.max, operand.scaling.margin
            scale = emit(slot_ops.agreed_scale, agreed, amax, number, group, *how)
            emit.anchor = inverse
            return scale, emit(ops.inverse, scale)
        scale = self.stored(emit, operand)
        if operand.offs is not None or operand.matrix.stack > 1:
            # Inductor's kernels read it, and expect an input of the backward at a multiple of 16 bytes. The
            # first of the stored scales is at one, a view of another is not: the backward takes it from them
            emit.meta["recompute"] = compat.inductor.MUST_RECOMPUTE
        emit.anchor = inverse
        return scale, emit(slot_ops.delayed_inverse, self.scales, scale, self.inputs.rows[operand])

    def stored(self, emit: Emitter, operand: Operand) -> Node:
        """The stored scale of an operand."""
        amax, row = self.written.amaxes[operand], self.inputs.rows[operand]
        how = operand.format.max, operand.scaling.margin
        return emit(slot_ops.delayed_scale, self.scales, amax, row, *how)

    def shared(self, operands: list[Operand]) -> tuple[Node, Node]:
        """The one scale of several operands, that of the largest of them."""
        amaxes = self.written.amaxes
        scales = [self.stored(self.emitter(operand, amaxes[operand].next), operand) for operand in operands]
        current, inverse = self.written.scales[whole(operands[0])]
        emit = self.emitter(operands[0], current)
        scale = emit(merged.least, scales)
        emit.anchor = inverse
        return scale, emit(ops.inverse, scale)

    def agreed(self, operand: Operand) -> tuple[Node, int]:
        """What a group agrees on about the stored scales of one direction; an operand's place in it."""
        group, backward = self.written.groups[operand], operand.backward
        operands = [x for x in self.inputs.of(backward) if self.written.groups.get(x) == group]
        if (key := (backward, group)) not in self.agreements:
            tag = f"must_be_in_{'backward' if backward else 'forward'}"
            start = self.written.start
            emit = Emitter(self.written.graph, start, self.scales, partitioner_tag=tag, recompute=None)
            votes = emit(slot_ops.votes, self.scales, [self.inputs.rows[x] for x in operands])
            started = emit(torch.ops._c10d_functional.all_reduce.default, votes, "min", group)
            emit.anchor = min(self.written.scales[whole(x)][0] for x in operands)
            self.agreements[key] = emit(torch.ops._c10d_functional.wait_tensor.default, started)
        return self.agreements[key], operands.index(operand)


# -- after the partitioner --


def load_scales(graph: Graph) -> int:
    """Lower the operators of this feature: in compiled code a stored scale is a load, so no cast waits for
    its tensor's amax. Returns how many nodes were replaced."""
    found = [x for x in graph.nodes if x.op == "call_function" and x.target in LOADED]
    for node in found:
        node.replace_all_uses_with(LOADED[node.target](node, *node.args))
        graph.erase_node(node)
    return len(found)


def _load(node: Node, scales: Node, slot: int, column: int) -> Node:
    """One number of the stored scales, as a view."""
    place = ops.APART * (state_page.READ * slot + column)
    return element(Emitter(node.graph, node, node), scales, place)


def _votes(node: Node, scales: Node, rows: list[int], *_: Any) -> Node:
    return Inliner()(node, slot_ops.votes_of, scales, tuple(rows), False)


def _agreed(node: Node, agreed: Node, amax: Node, index: int, *_: Any) -> Node:
    return Emitter(node.graph, node, node)(aten.as_strided.default, agreed, [1], [1], index)


LOADED: dict[Any, Callable[..., Node]] = {
    slot_ops.delayed_scale: lambda node, scales, amax, row, *_: _load(node, scales, row, state_page.SCALE),
    slot_ops.delayed_inverse: lambda node, scales, _, row: _load(node, scales, row, state_page.SCALE_INV),
    slot_ops.votes: _votes,
    slot_ops.agreed_scale: _agreed,
}
