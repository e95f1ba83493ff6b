"""collectives: those of a graph that carry FP8, see `all_gathers` and `all_to_alls`. The rank casts what it sends, by a scale
that its group agrees on:

* A current scale is computed from the maximum of the ranks' amaxes: an all-reduce of 4 bytes, for which the cast waits.
* A delayed scale is the minimum of the ranks' stored scales (`votes`), one all-reduce at the beginning of each direction, for
  which only the first collective waits. As a rule all ranks have the same state, because the amaxes enter the histories
  reduced. But one rank may have skipped a bad batch, or may be in a cold call alone. Only if the call is cold on all ranks do
  they take current amaxes (`ops.agreed_scale`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.fx import Node

from .. import compat
from ..config.recipe import WHOLE
from ..ir import ops
from ..ir.all_gathers import AllGather, wire_dtype
from ..ir.all_to_alls import AllToAll
from ..ir.fx_utils import CASTS, PERMUTES, SAME, VIEWS, Emitter, aten, call_function, hint, value
from ..ir.matmul import Matmul, factors
from ..ir.records import CollectiveRecord
from .amax_groups import AmaxGroups, reduced
from .plan import Operand, Plan
from .quantize import current, delayed
from .written import OPERAND, Written

LAYOUT = (*CASTS, *SAME, *VIEWS, *PERMUTES, aten.clone.default)
SIZES = (aten.sym_size.int, aten.sym_numel.default)
Collective = AllGather | AllToAll
Carry = Callable[[Written, Operand, Any, Node, Node], None]


@dataclass(frozen=True)
class Collectives:
    """`moved`: the operands that a collective carries in FP8. `records`: all collectives whose result an FP8 matmul reads."""

    moved: Mapping[Operand, Collective] = field(default_factory=dict)
    records: tuple[CollectiveRecord, ...] = ()

    def __or__(self, other: Collectives) -> Collectives:
        return Collectives({**self.moved, **other.moved}, self.records + other.records)

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the process groups whose ranks have to do the same."""
        return tuple(dict.fromkeys(found.group for found in self.moved.values()))

    def delayed(self, backward: bool, group: str) -> list[Operand]:
        """The operands of one direction whose stored scales a group has to agree on, by slot."""
        mine = [x for x, found in self.moved.items() if found.group == group and x.backward is backward and x.slot >= 0]
        return sorted(mine, key=lambda x: x.slot)


NO_COLLECTIVES = Collectives()


C = TypeVar("C", AllGather, AllToAll)


def moved_collectives(
    matmuls: Iterable[Matmul],
    plan: Plan,
    collective_of: Callable[[Node], C | None],
    reason_of: Callable[[C, Collection[Operand], Mapping[Node, Matmul]], str],
) -> Collectives:
    """The collectives of one kind that FP8 matmuls read. `collective_of`: the one that brings a tensor. `reason_of`: why it
    stays in high precision, "" if it can carry FP8."""
    readers: dict[Node, Matmul] = {matmul.node: matmul for matmul in matmuls}
    found: dict[Node, dict[Operand, C]] = defaultdict(dict)
    names: dict[Node, str] = {}
    for matmul in (x for x in readers.values() if x.fp8):
        for matrix, role in matmul.roles:
            collective = collective_of(matrix.base)
            if collective is not None:
                found[collective.node][plan.of(matrix, role, matmul)] = collective
                names.setdefault(collective.node, f"{matmul.fqn} ({role})")
    moved: dict[Operand, Collective] = {}
    records = []
    for node, operands in found.items():
        operand, collective = next(iter(operands.items()))
        reason = reason_of(collective, operands.keys(), readers)
        if not reason:
            moved[operand] = collective
        records.append(_record(collective, names[node], reason))
    return Collectives(moved, tuple(records))


def _record(collective: Collective, tensor: str, reason: str) -> CollectiveRecord:
    local = value(collective.local)
    kind: Any = "all-gather" if isinstance(collective, AllGather) else "all-to-all"
    before = hint(local.numel()) * local.itemsize
    return CollectiveRecord(tensor, before if reason else hint(local.numel()), before, reason, kind)


def reason_against(
    operands: Collection[Operand], wait: Node, through: Callable[[Node], bool], matmuls: Mapping[Node, Matmul]
) -> str:
    """Why the result of a collective, which these operands hold, cannot come in FP8: there is more than one scale, or something
    else reads its values, behind nodes that they pass `through`. "" if it can."""
    for operand in operands:
        if operand.scaling.block != WHOLE:
            return f"recipe {operand.recipe.name!r} has more than one scale a tensor"
    if len(operands) > 1:
        return "its matmuls cast it in different ways"
    for before, reader in _readers(wait, through):
        matmul = matmuls.get(reader)
        if matmul is None or before not in factors(reader):
            return f"also read by {reader.target}".removesuffix(".default")
        if not matmul.fp8:
            return f"also read by {matmul.fqn} {matmul.gemm} in high precision: {matmul.reason}"
    return ""


def _readers(node: Node, through: Callable[[Node], bool]) -> Iterator[tuple[Node, Node]]:
    """What reads the values of a tensor: (the tensor read, by)."""
    for user in node.users:
        if through(user):
            yield from _readers(user, through)
        elif not call_function(user, SIZES):
            yield node, user


def move(
    written: Written,
    collectives: Collectives,
    groups: AmaxGroups,
    carry: Mapping[type, Carry],
) -> int:
    """Let the chosen collectives carry FP8. `carry`: by the type of a collective, what rewrites it and the casts of the operand
    that it brings, given the scale that the ranks agree on and its inverse."""
    agreements: dict[tuple[bool, str], Node] = {}
    for operand, sent in collectives.moved.items():
        before = written.amaxes[operand]
        # all ranks have to call their collectives in one order, and not all ranks have the nodes before a gather in common: the
        # last ones pad their part
        emit = written.at(sent.node, operand, recompute=None, ac_graph_id=None)
        written.amaxes[operand] = amax = emit(ops.amax, _local_matrix(emit, sent))
        written.groups[operand] = sent.group
        if operand.scaling.delayed:
            key = (operand.backward, sent.group)
            if key not in agreements:
                agreements[key] = _agreed(written, collectives, *key)
            number = collectives.delayed(*key).index(operand)
            emit = written.at(sent.node, operand, recompute=compat.MUST_SAVE, ac_graph_id=None)
            scale = emit(ops.agreed_scale, agreements[key], amax, number, sent.group, *delayed(operand))
            inverse = emit(ops.inverse, scale)
        else:
            for group in dict.fromkeys(name for name in (sent.group, groups.of(operand)) if name is not None):
                amax = reduced(written.after(amax, operand, recompute=None, ac_graph_id=None), amax, group)
            scale, inverse = current(written.after(amax, operand, recompute=compat.MUST_SAVE, ac_graph_id=None), operand, amax)
        written.replace_scale(operand, scale, inverse)
        if not before.users:
            written.erase(before)
        carry[type(sent)](written, operand, sent, scale, inverse)
    _erase(written, collectives.moved.values())
    return len(collectives.moved)


def _agreed(written: Written, collectives: Collectives, backward: bool, group: str) -> Node:
    """What the ranks of a group agree on about the stored scales of one direction."""
    snapshot, operands = written.snapshots[backward], collectives.delayed(backward, group)
    tag = "backward" if backward else "forward"
    emit = Emitter(written.graph, snapshot.next, snapshot, partitioner_tag=f"must_be_in_{tag}", recompute=None)
    votes = emit(ops.votes, snapshot, [x.slot for x in operands])
    started = emit(torch.ops._c10d_functional.all_reduce.default, votes, "min", group)
    emit.anchor = min(collectives.moved[x].node for x in operands)
    return emit(torch.ops._c10d_functional.wait_tensor.default, started)


def _local_matrix(emit: Emitter, collective: Collective) -> Node:
    """What this rank sends, as a matrix, without the padding of an uneven shard: what its amax is taken of."""
    local = collective.local
    kept = None
    if isinstance(collective, AllGather) and collective.size is not None:
        kept = collective.kept(compat.rank_in(collective.group))
    if kept == 0:
        return emit(aten.full.default, [1, 1], 0.0, dtype=torch.float32, device=value(local).device)
    if kept is not None:
        assert isinstance(collective, AllGather)
        local = emit(aten.clone.default, emit(aten.slice.Tensor, local, collective.dim, 0, kept))
    return _matrix(emit, local)


def _matrix(emit: Emitter, node: Node) -> Node:
    if value(node).dim() == 2:
        return node
    dense = node if value(node).is_contiguous() else emit(aten.clone.default, node, memory_format=torch.contiguous_format)
    return emit(aten.view.default, dense, [-1, value(node).shape[-1]])


def cast_local(emit: Emitter, operand: Operand, collective: Collective, scale: Node) -> Node:
    """What this rank sends, in FP8, in its shape, as the collective takes it."""
    local = value(collective.local)
    part = emit(ops.quantize, _matrix(emit, collective.local), scale, operand.format.dtype, operand.format.max, False)
    part.meta[OPERAND] = operand.key
    if local.dim() != 2:
        part = emit(aten.view.default, part, _sizes(emit, collective.local))
    sent = wire_dtype(local, operand.format.dtype) if isinstance(collective, AllGather) else torch.uint8
    return part if sent == operand.format.dtype else emit(aten.view.dtype, part, sent)


def _sizes(emit: Emitter, node: Node) -> list[int | Node]:
    """The sizes of a tensor, as arguments of a node."""
    return [
        size if isinstance(size, int) else emit(aten.sym_size.int, node, dim) for dim, size in enumerate(value(node).shape)
    ]


def _erase(written: Written, moved: Iterable[Collective]) -> None:
    """Erase the collectives that nothing reads any more. Their waits have side effects for torch.fx: they are no dead code."""
    stale: dict[Node, None] = {}
    for collective in moved:
        stack = [collective.node]
        while stack:
            node = stack.pop()
            stale[node] = None
            stack += [user for user in node.users if user not in stale and user.op == "call_function"]
    for node in sorted(stale, reverse=True):
        if not node.users:
            written.erase(node)
