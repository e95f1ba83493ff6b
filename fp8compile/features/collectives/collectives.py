"""collectives: those of a graph that carry FP8, see `all_gathers` and `all_to_alls`. The rank casts what it
sends, by a scale that its group agrees on:

* A current scale is computed from the maximum of the ranks' amaxes: an all-reduce of 4 bytes, for which the
  cast waits.
* A delayed scale is written as the current one of this rank's part (`Written.groups`), which the feature that
  stores scales replaces by one that the ranks agree on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch.fx import Node

from ... import compat
from ...config.recipe import WHOLE
from ...ir import fx_utils, ops
from ...ir.fx_utils import CASTS, PERMUTES, SAME, VIEWS, Emitter, arg, aten, call_function, hint, value
from ...ir.matmul import Matmul, factors
from ...ir.metadata import OPERAND
from ...ir.records import TableRecord
from ...passes.all_gather_nodes import AllGather, wire_dtype
from ...passes.amax_groups import group_of, reduced
from ...passes.joint import Joint
from ...passes.plan import Operand
from ...passes.quantize import current
from ...passes.written import Written
from ...reporting.record_tables import WHY, sizes

LAYOUT = (*CASTS, *SAME, *VIEWS, *PERMUTES, aten.clone.default)
SIZES = (aten.sym_size.int, aten.sym_numel.default)


@dataclass(frozen=True)
class AllToAll:
    """`node` is the collective, `wait` its result."""

    node: Node
    wait: Node

    @property
    def local(self) -> Node:
        """This rank's rows, those for the first rank first."""
        return arg(self.node, 0)

    @property
    def group(self) -> str:
        return arg(self.node, 3)


Collective = AllGather | AllToAll
C = TypeVar("C", AllGather, AllToAll)


@dataclass
class Carried:
    """`by`: what brings an operand in FP8."""

    by: dict[Operand, Collective] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectiveRecord(TableRecord):
    """A collective of a graph (`kind`) whose result an FP8 matmul reads. `tensor`: the matmul and the role,
    "mlp.up (input)". The bytes are those that a rank sends, `before` without our passes. `reason`: why they
    are not FP8, "" if they are."""

    key, sides = "collectives", "<<>><"
    titles = "read from other ranks", "by", "bytes a rank", "with FP8", WHY

    tensor: str
    bytes: int
    before: int
    reason: str = ""
    kind: Literal["all-gather", "all-to-all"] = "all-gather"

    @classmethod
    def cells(cls, alike: Sequence[CollectiveRecord]) -> tuple[str, ...]:
        return (alike[0].kind, *sizes(alike), alike[0].reason)


@dataclass
class Collectives:
    """Those of a graph whose result an FP8 matmul reads."""

    records: list[CollectiveRecord] = field(default_factory=list)


def choose(
    joint: Joint,
    collective_of: Callable[[Node], C | None],
    reason_of: Callable[[C, Collection[Operand], Mapping[Node, Matmul]], str],
) -> int:
    """Note the collectives of one kind that FP8 matmuls read, and which can carry FP8; returns how many can.
    `collective_of`: the one that brings a tensor. `reason_of`: why it stays in high precision, or ""."""
    readers: dict[Node, Matmul] = {matmul.node: matmul for matmul in joint.matmuls}
    found: dict[Node, dict[Operand, C]] = defaultdict(dict)
    names: dict[Node, str] = {}
    for matmul in (x for x in readers.values() if x.fp8):
        for matrix, role in matmul.roles:
            collective = collective_of(matrix.base)
            if collective is not None:
                found[collective.node][joint.plan.of(matrix, role, matmul)] = collective
                names.setdefault(collective.node, f"{matmul.fqn} ({role})")
    can = 0
    for node, operands in found.items():
        operand, collective = next(iter(operands.items()))
        reason = reason_of(collective, operands.keys(), readers)
        if not reason:
            joint.extras.of(Carried).by[operand] = collective
            joint.groups[collective.group] = None
            operand.carried = True
            can += 1
        joint.results.of(Collectives).records.append(_record(collective, names[node], reason))
    return can


def _record(collective: Collective, tensor: str, reason: str) -> CollectiveRecord:
    local = value(collective.local)
    kind: Any = "all-gather" if isinstance(collective, AllGather) else "all-to-all"
    before = hint(local.numel()) * local.itemsize
    return CollectiveRecord(tensor, before if reason else hint(local.numel()), before, reason, kind)


def reason_against(
    operands: Collection[Operand], wait: Node, through: Callable[[Node], bool], matmuls: Mapping[Node, Matmul]
) -> str:
    """Why the result of a collective, which these operands hold, cannot come in FP8: there is more than one
    scale, or something else reads its values, after nodes that they pass `through`. "" if it can."""
    for operand in operands:
        if operand.scaling.block != WHOLE:
            return f"recipe {operand.recipe.name!r} has more than one scale per tensor"
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


def move(joint: Joint, kind: type[C], carry: Callable[[Written, Operand, C, Node, Node], None]) -> int:
    """Let the chosen collectives of one kind carry FP8. `carry` rewrites a collective, and the casts of the
    operand that it brings, given the scale that the ranks agree on, and its inverse."""
    written, carried = joint.form, joint.extras.of(Carried)
    mine = {operand: sent for operand, sent in carried.by.items() if isinstance(sent, kind)}
    if not mine:
        return 0
    for operand, sent in mine.items():
        before = written.amaxes[operand]
        # ranks have to call collectives in one order; the nodes before a gather differ (the last ones pad)
        emit = written.at(sent.node, operand, recompute=None, ac_graph_id=None)
        written.amaxes[operand] = amax = emit(ops.amax, _local_matrix(emit, sent))
        written.groups[operand] = sent.group
        groups = () if operand.scaling.delayed else (sent.group, group_of(joint, operand))
        for group in dict.fromkeys(name for name in groups if name is not None):
            amax = reduced(written.after(amax, operand, recompute=None, ac_graph_id=None), amax, group)
        emit = written.after(amax, operand, recompute=compat.inductor.MUST_SAVE, ac_graph_id=None)
        scale, inverse = current(emit, operand, amax)
        written.replace_scale(operand, scale, inverse)
        if not before.users:
            written.erase(before)
        carry(written, operand, sent, scale, inverse)
    _erase(written, mine.values())
    return len(mine)


def _local_matrix(emit: Emitter, collective: Collective) -> Node:
    """What this rank sends, as a matrix without the padding of an uneven shard: what its amax is taken of."""
    local = collective.local
    if isinstance(collective, AllGather) and collective.size is not None:
        kept = collective.kept(compat.process_groups.rank_in(collective.group))
        if kept == 0:
            return emit(aten.full.default, [1, 1], 0.0, dtype=torch.float32, device=value(local).device)
        if kept is not None:
            local = emit(aten.clone.default, emit(aten.slice.Tensor, local, collective.dim, 0, kept))
    return _matrix(emit, local)


def _matrix(emit: Emitter, node: Node) -> Node:
    if value(node).dim() == 2:
        return node
    if not value(node).is_contiguous():
        node = emit(aten.clone.default, node, memory_format=torch.contiguous_format)
    return emit(aten.view.default, node, [-1, value(node).shape[-1]])


def cast_local(emit: Emitter, operand: Operand, collective: Collective, scale: Node) -> Node:
    """What this rank sends, in FP8, in its shape, as the collective takes it."""
    local = value(collective.local)
    matrix, form = _matrix(emit, collective.local), operand.format
    part = emit(ops.quantize, matrix, scale, form.dtype, form.max, False)
    part.meta[OPERAND] = operand.key
    if local.dim() != 2:
        part = emit(aten.view.default, part, _sizes(emit, collective.local))
    sent = wire_dtype(local, operand.format.dtype) if isinstance(collective, AllGather) else torch.uint8
    return part if sent == operand.format.dtype else emit(aten.view.dtype, part, sent)


def _sizes(emit: Emitter, node: Node) -> list[int | Node]:
    """The sizes of a tensor, as arguments of a node."""
    sizes = enumerate(value(node).shape)
    return [n if isinstance(n, int) else emit(aten.sym_size.int, node, dim) for dim, n in sizes]


def _erase(written: Written, moved: Iterable[Collective]) -> None:
    """Erase collectives that nothing reads any more: to torch.fx, waits have effects, and are not dead."""
    starts = [collective.node for collective in moved]
    stale = fx_utils.reached(starts, lambda x: [user for user in x.users if user.op == "call_function"])
    for node in sorted(stale, reverse=True):
        if not node.users:
            written.erase(node)
