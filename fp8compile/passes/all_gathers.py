"""all_gathers: let the all-gathers of a graph carry FP8. The rank casts its part, and the gather moves one byte an element.

    whole = wait(all_gather(local)); w8 = quantize(whole, scale)
->
    local8 = quantize(local, scale); w8 = wait(all_gather(local8))

In graphs, activations are gathered in front of a column-parallel linear where a sequence is sharded (sequence parallel), their
gradients behind a row-parallel one, and weights where a model gathers its shards itself ("simple FSDP"). A tensor is moved if
all that read it are FP8 matmuls which cast it alike, with one scale. The scale is that of the whole tensor:

* A current scale is computed from the maximum of the ranks' amaxes: an all-reduce of 4 bytes, for which the cast waits.
* A delayed scale is the minimum of the ranks' stored scales (`votes`), one all-reduce at the beginning of each direction, for
  which only the first gather waits. As a rule all ranks have the same state, because the amaxes enter the histories reduced.
  But one rank may have skipped a bad batch, or may be in a cold call alone. Only if the call is cold on all ranks do they take
  current amaxes (`ops.agreed_scale`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from .. import compat
from ..config.recipe import WHOLE
from ..ir import ops
from ..ir.all_gathers import AllGather, all_gather_of, wire_dtype
from ..ir.fx_utils import CASTS, PERMUTES, SAME, VIEWS, Emitter, arg, aten, call_function, hint, value
from ..ir.matmul import Matmul, factors
from ..ir.records import AllGatherRecord
from .plan import Operand, Plan

LAYOUT = (*CASTS, *SAME, *VIEWS, *PERMUTES, aten.clone.default)
SIZES = (aten.sym_size.int, aten.sym_numel.default)


@dataclass(frozen=True)
class AllGathers:
    """`moved`: the operands that are gathered in FP8. `records`: all gathers whose result an FP8 matmul reads."""

    moved: Mapping[Operand, AllGather] = field(default_factory=dict)
    records: tuple[AllGatherRecord, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the process groups whose ranks have to do the same."""
        return tuple(dict.fromkeys(found.group for found in self.moved.values()))

    def delayed(self, backward: bool, group: str) -> list[Operand]:
        """The operands of one direction whose stored scales a group has to agree on, by slot."""
        mine = [x for x, found in self.moved.items() if found.group == group and x.backward is backward and x.slot >= 0]
        return sorted(mine, key=lambda x: x.slot)


NO_ALL_GATHERS = AllGathers()


def all_gathers(matmuls: Iterable[Matmul], plan: Plan) -> AllGathers:
    """Which gathers can carry FP8. Changes nothing."""
    readers: dict[Node, Matmul] = {matmul.node: matmul for matmul in matmuls}
    found: dict[Node, dict[Operand, AllGather]] = defaultdict(dict)
    names: dict[Node, str] = {}
    for matmul in (x for x in readers.values() if x.fp8):
        for matrix, role in matmul.roles:
            gather = all_gather_of(matrix.base)
            if gather is not None:
                found[gather.node][plan.of(matrix, role, matmul)] = gather
                names.setdefault(gather.node, f"{matmul.fqn} ({role})")
    moved, records = {}, []
    for node, operands in found.items():
        operand, gather = next(iter(operands.items()))
        reason = _reason(gather, operands, readers)
        if not reason:
            moved[operand] = gather
        local = value(gather.local)
        sent = hint(local.numel()) * (local.itemsize if reason else 1)
        records.append(AllGatherRecord(names[node], sent, hint(local.numel()) * local.itemsize, reason))
    return AllGathers(moved, tuple(records))


def _reason(gather: AllGather, operands: Mapping[Operand, AllGather], matmuls: Mapping[Node, Matmul]) -> str:
    """Why a gather stays in high precision; "" if it can carry FP8."""
    for operand in operands:
        if operand.offs is not None or operand.matrix.stack > 1:
            return "read by a grouped matmul"
        if operand.scaling.block != WHOLE:
            return f"recipe {operand.recipe.name!r} has more than one scale a tensor"
    if len(operands) > 1:
        return "its matmuls cast it in different ways"
    if value(gather.local).dim() < 2:
        return "its parts are no matrices"
    for before, reader in _readers(gather.wait, set(gather.steps)):
        matmul = matmuls.get(reader)
        if matmul is None or before not in factors(reader):
            return f"also read by {reader.target}".removesuffix(".default")
        if not matmul.fp8:
            return f"also read by {matmul.fqn} {matmul.gemm} in high precision: {matmul.reason}"
    return ""


def _readers(node: Node, steps: set[Node]) -> Iterator[tuple[Node, Node]]:
    """What reads the values of a gathered tensor, through its steps, views, permutations and casts: (the tensor read, by)."""
    for user in node.users:
        if user in steps or call_function(user, LAYOUT):
            yield from _readers(user, steps)
        elif not call_function(user, SIZES):
            yield node, user


def local_matrix(emit: Emitter, gather: AllGather) -> Node:
    """This rank's part as a matrix, without the padding of an uneven shard: what its amax is taken of."""
    local = gather.local
    kept = gather.kept(compat.rank_in(gather.group)) if gather.size is not None else None
    if kept == 0:
        return emit(aten.full.default, [1, 1], 0.0, dtype=torch.float32, device=value(local).device)
    if kept is not None:
        local = emit(aten.clone.default, emit(aten.slice.Tensor, local, gather.dim, 0, kept))
    return _matrix(emit, local)


def _matrix(emit: Emitter, node: Node) -> Node:
    if value(node).dim() == 2:
        return node
    dense = node if value(node).is_contiguous() else emit(aten.clone.default, node, memory_format=torch.contiguous_format)
    return emit(aten.view.default, dense, [-1, value(node).shape[-1]])


def gathered(graph: Graph, operand: Operand, gather: AllGather, scale: Node) -> Node:
    """Cast this rank's part, gather the bytes, and do with them what is done with the tensor: its FP8 values, in its shape."""
    node, form = gather.node, operand.format
    emit = Emitter(graph, node, node)
    local = value(gather.local)
    part = emit(ops.quantize, _matrix(emit, gather.local), scale, form.dtype, form.max, False)
    part.meta["fp8_operand"] = operand.key
    if local.dim() != 2:
        part = emit(aten.view.default, part, _sizes(emit, gather.local))
    sent = wire_dtype(local, form.dtype)
    if sent != form.dtype:
        part = emit(aten.view.dtype, part, sent)
    made: dict[Node, Node] = {node: emit(node.target, part, *node.args[1:])}
    for step in gather.steps:
        emit = Emitter(graph, step, step)
        if call_function(step, (aten.cat.default,)):
            made[step] = _cat(emit, step, made, form.dtype)
        else:
            made[step] = emit(step.target, made[arg(step, 0)], *step.args[1:], **step.kwargs)
            if step is gather.steps[-1] and value(made[step]).dtype != form.dtype:
                made[step] = emit(aten.view.dtype, made[step], form.dtype)
    _move_sizes(graph, made)
    last = gather.steps[-1]
    if value(made[last]).is_contiguous():
        return made[last]
    return Emitter(graph, last, last)(aten.clone.default, made[last], memory_format=torch.contiguous_format)


def _move_sizes(graph: Graph, made: dict[Node, Node]) -> None:
    """Let what reads the sizes of a gathered tensor, or of views of it, read those of the FP8 tensor."""
    stack = list(made)
    while stack:
        old = stack.pop()
        for user in list(old.users):
            if call_function(user, SIZES):
                user.replace_input_with(old, made[old])
            elif call_function(user, LAYOUT) and user not in made and not all(isinstance(x, int) for x in value(user).shape):
                same = call_function(user, (*CASTS, *SAME, aten.clone.default))
                made[user] = made[old] if same else Emitter(graph, user, user)(user.target, made[old], *user.args[1:])
                stack.append(user)


def _cat(emit: Emitter, step: Node, made: Mapping[Node, Node], dtype: torch.dtype) -> Node:
    """Put parts together as bytes, and take them as FP8 again at once: the order that torch's fusion of a gather with a matmul
    looks for."""
    old: list[Node] = arg(step, 0)
    parts = [made[part] for part in old]
    if value(parts[0]).dtype != torch.uint8:
        parts = [emit(aten.view.dtype, part, torch.uint8) for part in parts]
    return emit(aten.view.dtype, emit(aten.cat.default, parts, *step.args[1:]), dtype)


def _sizes(emit: Emitter, node: Node) -> list[int | Node]:
    """The sizes of a tensor, as arguments of a node."""
    return [
        size if isinstance(size, int) else emit(aten.sym_size.int, node, dim) for dim, size in enumerate(value(node).shape)
    ]


def erase(graph: Graph, moved: Iterable[AllGather]) -> None:
    """Erase the gathers that nothing reads any more. To torch.fx their waits have side effects, so they are not dead code."""
    stale: dict[Node, None] = {}
    for gather in moved:
        stack = [gather.node]
        while stack:
            node = stack.pop()
            stale[node] = None
            stack += [user for user in node.users if user not in stale and user.op == "call_function"]
    for node in sorted(stale, reverse=True):
        if not node.users:
            graph.erase_node(node)
