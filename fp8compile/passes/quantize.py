"""quantize: cast each operand once, in the layouts that matmuls read, and replace the decided matmuls by FP8 matmuls.

    mm = mm(view(x), permute(w))

becomes (delayed; `tensorwise` has `current_scale(amax)` in the place of `delayed_scale`)

    amax_x = amax(x2d); scale_x = delayed_scale(scales, amax_x, 0); inv_x = delayed_inverse(scales, scale_x, 0)
    amax_w = ...
    x8 = quantize(x2d, scale_x, transposed=False); w8 = quantize(w, scale_w, transposed=False)
    mm = scaled_mm(x8, w8, inv_x, inv_w)

A weight that FSDP2 has gathered in FP8 is not cast: the matmul reads what was gathered,

    w = dequantize(data, inv)  ->  w8 = data; w8t = clone(permute(data)); inv_w = inv; inv_wt = inv, or permute(inv) of blocks

A tensor that a collective brings from other ranks may be cast before it is sent (see `collectives`).

With one scale a row or a block, the two layouts of a tensor have scales of their own, from one read:

    amax_x = amax_blocks(x2d, False, block); scale_x = current_scale(amax_x); inv_x = inverse(scale_x)
    amax_xt = amax_blocks(x2d, True, block); scale_xt = ..; inv_xt = ..
    x8, x8t = quantize_both(x2d, scale_x, scale_xt, block)
    mm = block_mm(x8, w8, inv_x, inv_w, x_block, w_block)

The backward needs the scales of the forward unchanged, so scales are tagged MUST_SAVE. So is the transposed copy of a weight,
which dgrad reads: one byte an element, written while the tensor is at hand. The forward writes the transposed copy of an input,
which wgrad reads, in the same way; whether to keep it is left to the partitioner. With `recast_weights`, and where the user
checkpoints, a weight is cast again in backward. So is an activation whose producer reads tensors that the backward reads anyway
(GELU, a norm): there, the transposed copy costs no more bytes than in forward, and none is kept. And so is a tensor that the
backward keeps anyway (the output of attention). With `save="fp8"`, what would be made again from two tensors in FP8 is kept.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from .. import compat
from ..config.recipe import ROW_OF_GROUP, WHOLE
from ..ir import merged, ops
from ..ir.all_gathers import AllGather
from ..ir.all_to_alls import AllToAll
from ..ir.fx_utils import Emitter, Matrix, arg, aten, call_function, same_shape, value
from ..ir.matmul import GEMMS, PRODUCT, RESULT, Matmul
from .addends import add, split_addend
from .all_gathers import gathered
from .all_to_alls import exchanged
from .amax_groups import NO_GROUPS, AmaxGroups, reduced
from .collectives import NO_COLLECTIVES, Collective, Collectives, erase, local_matrix
from .gathered import gathered_as
from .grouped import Groups, block_of
from .merge import Merged
from .merged import Products
from .plan import Operand, Plan
from .reread import kept_anyway, read_again


@dataclass(frozen=True)
class Written:
    """What `update_state` needs: the amax of each operand, and the snapshot of each direction (backward: True). `groups`: for
    operands whose amax is that of this rank's part, the ranks that have the other parts."""

    amaxes: dict[Operand, Node]
    snapshots: dict[bool, Node]
    groups: dict[Operand, str] = field(default_factory=dict)


def observe(graph: Graph, plan: Plan, pages: tuple[Node, Node]) -> Written:
    """Take the amax of each operand that has a slot, and leave the matmuls as they are: a high-precision phase that keeps
    histories."""
    writer = _Writer(graph, plan, pages)
    for backward in (False, True):
        for operand in plan.direction(backward):
            writer.snapshot(backward)  # first: the update goes behind the last amax, and reads the snapshot
            writer.amax(operand)
    return Written(writer.amaxes, writer.snapshots)


def quantize(
    graph: Graph,
    matmuls: list[Matmul],
    plan: Plan,
    pages: tuple[Node, Node] | None,
    groups: AmaxGroups = NO_GROUPS,
    collectives: Collectives = NO_COLLECTIVES,
    together: Sequence[Merged] = (),
    save: bool = False,
) -> Written:
    """Rewrite the decided matmuls; `pages` are the state inputs of forward and backward (None: no state). With `save` the
    backward gets large tensors in FP8."""
    writer = _Writer(graph, plan, pages, groups, collectives, save)
    products = Products(writer, together)
    for backward in (False, True):
        if plan.direction(backward):
            writer.snapshot(backward)  # first: its readers are inserted right behind inputs, and behind views of inputs
    decided = [matmul for matmul in matmuls if matmul.fp8]
    for matmul in decided:
        for operand, matrix, transposed in writer.operands(matmul):
            writer.demand.add((operand, str(matrix.shape), transposed))
            if matmul.gemm != "fprop":
                writer.late.add(operand)
    for operand, collective in collectives.moved.items():
        if isinstance(collective, AllToAll):
            writer.exchange(operand, collective)
    for matmul in decided:
        if not products.replace(matmul):
            writer.replace(matmul)
    erase(graph, collectives.moved.values())
    if together:
        compat.stable_sort(graph)
    return Written(writer.amaxes, writer.snapshots, {x: found.group for x, found in collectives.moved.items()})


class _Writer:
    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        pages: tuple[Node, Node] | None,
        groups: AmaxGroups = NO_GROUPS,
        collectives: Collectives = NO_COLLECTIVES,
        save: bool = False,
    ):
        self.save = save
        self.graph, self.plan, self.pages, self.groups, self.collectives = graph, plan, pages, groups, collectives
        self.start = next(node for node in graph.nodes if node.op != "placeholder")  # readers of inputs go before it
        self.replaced: dict[Node, Node] = {}  # matmul -> its FP8 result, which may be an operand of the next matmul
        self.amaxes: dict[Operand, Node] = {}
        self.scales: dict[tuple[Operand, str, bool], tuple[Node, Node]] = {}  # (scale, inverse), of one layout or of both
        self.demand: set[tuple[Operand, str, bool]] = set()  # operand, shape as a matrix, transposed
        self.late: set[Operand] = set()  # read in backward
        self.copies: dict[tuple[Operand, str, bool], Node] = {}
        self.snapshots: dict[bool, Node] = {}
        self.agreements: dict[tuple[bool, str], Node] = {}  # by direction and process group
        self.matrices: dict[tuple[Node, str], Node] = {}
        self.groups_of = Groups(self.after)
        self.partners: dict[Operand, tuple[Operand, ...]] = {}  # operands that have one scale, where matmuls are merged

    def operands(self, matmul: Matmul) -> list[tuple[Operand, Matrix, bool]]:
        """For a and b: the operand, its matrix, and whether the FP8 copy is transposed. Both copies are K-major, [m, k] and
        [n, k]."""
        found = []
        for (matrix, role), transposed in zip(matmul.roles, (matmul.a.transposed, not matmul.b.transposed), strict=True):
            operand = self.plan.of(matrix, role, matmul)
            found.append((operand, matrix, transposed and not operand.either))
        return found

    def replace(self, matmul: Matmul) -> None:
        operands = self.operands(matmul)
        a8, b8 = (self.copy(*operand) for operand in operands)
        node = matmul.node
        emit = Emitter(self.graph, node, node)
        bias, rest = split_addend(matmul)
        fast = matmul.recipe.use_fast_accum[GEMMS.index(matmul.gemm)]
        inverses = [self.scale_of(*operand)[1] for operand in operands]
        blocks = [operand.scaling.block for operand, _, _ in operands]
        how = (*inverses, bias, value(node).dtype, fast)
        if matmul.offs is not None:
            source = self.matrix(operands[0][1], operands[0][0])
            out = self.groups_of.product(emit, matmul, operands, (a8, b8), inverses, source, fast)
        elif blocks == [WHOLE, WHOLE]:
            out = emit(ops.scaled_mm, a8, b8, *how)
        else:
            out = emit(ops.block_mm, a8, b8, *how, *map(list, blocks))
        out.meta[PRODUCT] = node.meta.get(RESULT)
        if matmul.flipped:
            out = emit(aten.permute.default, out, [1, 0])
        if value(node).dim() == 3 and matmul.offs is None:
            out = emit(aten.unsqueeze.default, out, 0)
        if rest is not None:
            out = add(emit, rest, out, node)
        out.meta[RESULT] = node.meta.get(RESULT)
        node.replace_all_uses_with(out)
        self.replaced[node] = out
        if node is self.start:
            self.start = node.next
        self.graph.erase_node(node)

    def copy(self, operand: Operand, matrix: Matrix, transposed: bool) -> Node:
        """The FP8 copy of an operand in one layout; written once."""
        shape = str(matrix.shape)
        if (operand, shape, transposed) in self.copies:
            return self.copies[operand, shape, transposed]
        if (weight := gathered_as(matrix, operand)) is not None:
            self.copies[operand, shape, transposed] = made = self.gathered(weight, operand, transposed)
            return made
        if isinstance(gather := self.collectives.moved.get(operand), AllGather):
            self.copies[operand, shape, transposed] = made = self.all_gathered(operand, gather, matrix, transposed)
            return made
        form, block = operand.format, list(block_of(operand, transposed))
        scale = self.scale_of(operand, matrix, transposed)[0]
        source = self.matrix(matrix, operand)
        rows = self.groups_of.rows(operand, source)
        recompute = operand.reader.meta.get("recompute")  # the tag of the user's checkpointing, if any
        kept = operand.key.role == "weight" and recompute is None and operand.recipe.recast_weights is not True
        both = {(operand, shape, False), (operand, shape, True)} <= self.demand
        blocks = [list(block_of(operand, layout)) for layout in (False, True)]
        if both and (kept or operand.key.role == "input" and blocks[0] == blocks[1]):
            scales = {layout: self.scale_of(operand, matrix, layout)[0] for layout in (False, True)}
            behind = max([*scales.values(), source, *rows])  # the last one in the graph
            again = recompute is None and read_again(source)
            # made again from two tensors that are kept in FP8, it would have their errors, too
            kept = kept or again and self.save and not read_again(source, most=1)
            if not kept and recompute is None and (again or kept_anyway(source)):
                for layout, how in ((False, None), (True, compat.MUST_RECOMPUTE)):
                    emit = self.after(max([scales[layout], source, *rows]), operand, recompute=how)
                    made = emit(ops.quantize, source, scales[layout], form.dtype, form.max, layout, block, *rows)
                    self.copies[operand, shape, layout] = _of(operand, made)
            else:
                # one operator, one read: the forward writes its own copy and the one that the backward reads
                alone = kept and operand not in self.partners  # else the buffer of all of them is saved
                emit = self.after(behind, operand, recompute=compat.MUST_SAVE if alone else recompute)
                other = None if scales[True] is scales[False] else scales[True]
                more = (other, blocks[0], rows[0] if rows else None, None if blocks[0] == blocks[1] else blocks[1])
                made = _of(operand, emit(ops.quantize_both, source, scales[False], form.dtype, form.max, *more))
                emit.anchor = made.next
                for layout in (False, True):
                    self.copies[operand, shape, layout] = emit(operator.getitem, made, int(layout))
        else:
            if operand.either and recompute is None and operand in self.late:
                recompute = compat.MUST_SAVE if kept else compat.MUST_RECOMPUTE
            emit = self.after(max([scale, source, *rows]), operand, recompute=recompute)
            made = emit(ops.quantize, source, scale, form.dtype, form.max, transposed, block, *rows)
            self.copies[operand, shape, transposed] = _of(operand, made)
        return self.copies[operand, shape, transposed]

    def gathered(self, weight: Node, operand: Operand, transposed: bool) -> Node:
        """The FP8 values of a weight that FSDP2 has gathered; transposed, where dgrad reads them."""
        data = arg(weight, 0)
        if not transposed:
            return data
        recompute = operand.reader.meta.get("recompute")
        kept = recompute is None and operand.recipe.recast_weights is not True
        emit = self.after(data, operand, recompute=compat.MUST_SAVE if kept else compat.MUST_RECOMPUTE)
        return emit(aten.clone.default, emit(aten.permute.default, data, [1, 0]), memory_format=torch.contiguous_format)

    def gathered_inverse(self, weight: Node, operand: Operand, transposed: bool) -> tuple[Node, Node]:
        """Twice the inverse of its scales in a layout: nothing casts it, so nothing asks for the scale."""
        inverse = arg(weight, 1)
        if transposed and operand.scaling.block != WHOLE:
            key = (operand, "gathered", True)
            if key not in self.scales:  # a view, which backward takes of what it has saved
                emit = self.after(inverse, operand, recompute=compat.MUST_RECOMPUTE)
                self.scales[key] = (emit(aten.permute.default, inverse, [1, 0]),) * 2
            return self.scales[key]
        return inverse, inverse

    def exchange(self, operand: Operand, exchange: AllToAll) -> None:
        """Let an all-to-all carry the FP8 values of an operand; its readers get them in the dtype that they had."""
        scale, inverse = self.scale_of(operand, operand.matrix, False)
        came = exchanged(self.graph, operand, exchange, scale, inverse)
        exchange.wait.replace_all_uses_with(came)
        self.replaced[exchange.wait] = came

    def all_gathered(self, operand: Operand, gather: AllGather, matrix: Matrix, transposed: bool) -> Node:
        """The FP8 values of a tensor whose parts each rank casts before they are gathered."""
        if transposed:
            made = self.copy(operand, matrix, False)
            return self.after(made, operand)(ops.transposed, made)
        scale = self.scale_of(operand, matrix, False)[0]
        made = gathered(self.graph, operand, gather, scale)
        rows, columns = matrix.shape
        if same_shape(value(made).shape, matrix.shape):
            return made
        shape = [-1, columns] if isinstance(columns, int) and columns else [rows, -1]
        return self.after(made, operand)(aten.view.default, made, shape)

    def agreed(self, backward: bool, group: str) -> Node:
        """What the ranks of a group agree on about the stored scales of one direction."""
        if (backward, group) not in self.agreements:
            snapshot = self.snapshot(backward)
            operands = self.collectives.delayed(backward, group)
            tag = "backward" if backward else "forward"
            emit = Emitter(self.graph, snapshot.next, snapshot, partitioner_tag=f"must_be_in_{tag}", recompute=None)
            votes = emit(ops.votes, snapshot, [x.slot for x in operands])
            started = emit(torch.ops._c10d_functional.all_reduce.default, votes, "min", group)
            emit.anchor = min(self.collectives.moved[x].node for x in operands)
            self.agreements[backward, group] = emit(torch.ops._c10d_functional.wait_tensor.default, started)
        return self.agreements[backward, group]

    def scale_of(self, operand: Operand, matrix: Matrix, transposed: bool) -> tuple[Node, Node]:
        """(scale, inverse) of an operand: one pair for both layouts, or the pair of one layout."""
        if (weight := gathered_as(matrix, operand)) is not None:
            return self.gathered_inverse(weight, operand, transposed)
        block = operand.scaling.block
        key = (operand, "", False) if block == WHOLE else (operand, str(matrix.shape), transposed)
        if key not in self.scales:
            made = self.whole_scale(operand) if block == WHOLE else self.scales_of(operand, matrix, transposed)
            shared = [(x, *key[1:]) for x in self.partners.get(operand, ())]
            self.scales.update(dict.fromkeys([key, *shared], made))
        return self.scales[key]

    def whole_scale(self, operand: Operand) -> tuple[Node, Node]:
        partners = self.partners.get(operand, (operand,))
        amaxes, margin = [self.amax(x) for x in partners], operand.scaling.margin
        snapshot = self.snapshot(operand.backward) if operand.scaling.delayed else None
        amax = max(amaxes)  # the last one in the graph
        emit = self.after(amax, operand, recompute=compat.MUST_SAVE, ac_graph_id=None)
        sent = self.collectives.moved.get(operand)
        if snapshot is not None:
            how = (operand.format.max, margin, operand.key.settings.limit < float("inf"))
            if sent is not None:
                agreed = self.agreed(operand.backward, sent.group)
                number = self.collectives.delayed(operand.backward, sent.group).index(operand)
                emit = self.before(sent, operand, recompute=compat.MUST_SAVE, ac_graph_id=None)
                scale = emit(ops.agreed_scale, agreed, amax, number, sent.group, *how)
                return scale, emit(ops.inverse, scale)
            scales = [emit(ops.delayed_scale, snapshot, a, x.slot, *how) for x, a in zip(partners, amaxes, strict=True)]
            if len(scales) > 1:
                scale = emit(merged.least, scales)
                return scale, emit(ops.inverse, scale)
            if operand.offs is not None or operand.matrix.stack > 1:
                # Inductor's kernels read it, and expect an input of the backward at a multiple of 16 bytes. A stored inverse is
                # not at one: the backward takes it from the snapshot, which is
                emit.meta["recompute"] = compat.MUST_RECOMPUTE
            return scales[0], emit(ops.delayed_inverse, snapshot, scales[0], operand.slot)
        if len(amaxes) > 1:
            amax = self.after(amax, operand, recompute=None, ac_graph_id=None)(merged.largest, amaxes)
        over = (None if sent is None else sent.group, self.groups.of(operand))
        for group in dict.fromkeys(name for name in over if name is not None):
            amax = reduced(self.after(amax, operand, recompute=None, ac_graph_id=None), amax, group)
        emit = self.after(amax, operand, recompute=compat.MUST_SAVE, ac_graph_id=None)
        scale = emit(ops.current_scale, amax, operand.format.max, margin, operand.scaling.power_of_2)
        return scale, emit(ops.inverse, scale)

    def scales_of(self, operand: Operand, matrix: Matrix, transposed: bool) -> tuple[Node, Node]:
        """The scales of the blocks of one layout."""
        block = block_of(operand, transposed)
        if transposed and block.rows == block.columns:  # square blocks: the scales of the other layout, transposed
            known = self.scale_of(operand, matrix, False)
            emit = self.after(known[1], operand, recompute=compat.MUST_SAVE, ac_graph_id=None)
            scale, inverse = (emit(aten.permute.default, x, [1, 0]) for x in known)
            return scale, inverse
        source = self.matrix(matrix, operand)
        emit = self.after(source, operand, recompute=None, ac_graph_id=None)
        rows = self.groups_of.rows(operand, source)
        if rows:
            behind = max([source, *self.groups_of.order(operand, source)])
            emit = self.after(behind, operand, recompute=None, ac_graph_id=None)
        if rows and block == ROW_OF_GROUP:
            return self.groups_of.scales_of_columns(emit, operand, source)
        stack = transposed and operand.matrix.stack > 1 and block.rows == 1
        if stack:  # rows of a transposed matrix are columns here; kernels of columns write [matrices, columns]
            amax = emit(ops.amax_blocks, source, False, [block.columns, 1])
        else:
            amax = emit(ops.amax_blocks, source, transposed, list(block), *rows)
        emit.meta["recompute"] = compat.MUST_SAVE
        scale = emit(ops.current_scale, amax, operand.format.max, operand.scaling.margin, operand.scaling.power_of_2)
        inverse = emit(ops.inverse, scale)
        if stack:
            scale, inverse = (emit(aten.permute.default, x, [1, 0]) for x in (scale, inverse))
        return scale, inverse

    def amax(self, operand: Operand) -> Node:
        if operand not in self.amaxes:
            rows: tuple[Node, ...] = ()
            if (sent := self.collectives.moved.get(operand)) is not None:
                emit = self.before(sent, operand, recompute=None, ac_graph_id=None)
                source = local_matrix(emit, sent)
            else:
                source = self.matrix(operand.matrix, operand)
                rows = self.groups_of.rows(operand, source)
                emit = self.after(max([source, *rows]), operand, recompute=None, ac_graph_id=None)
            self.amaxes[operand] = emit(ops.amax, source, *rows)
        return self.amaxes[operand]

    def snapshot(self, backward: bool) -> Node:
        if backward not in self.snapshots:
            assert self.pages is not None
            page = self.pages[backward]
            tag = "is_backward" if backward else "is_forward"
            emit = Emitter(self.graph, self.start, page, partitioner_tag=tag, recompute=compat.MUST_SAVE)
            self.snapshots[backward] = emit(ops.snapshot, page)
        return self.snapshots[backward]

    def matrix(self, matrix: Matrix, operand: Operand) -> Node:
        """The base as a 2-D node: a view, or a copy if its strides allow no view. (Inductor fuses the copy into the casts.)"""
        base = self.replaced.get(matrix.base, matrix.base)
        rows, columns = matrix.shape
        key = (base, f"{rows} {columns}")
        if value(base).dim() == 2 and same_shape(value(base).shape, matrix.shape):
            return base
        if key not in self.matrices:
            emit = self.after(base, operand)
            shape = [-1, columns] if isinstance(columns, int) and columns else [rows, -1]
            # Inductor's patterns of attention end in a view of a bmm, and take its sizes for those of the heads
            view = aten._unsafe_view.default if call_function(base, (aten.bmm.default,)) else aten.view.default
            try:
                self.matrices[key] = emit(view, base, shape)
            except (RuntimeError, ValueError):
                dense = emit(aten.clone.default, base, memory_format=torch.contiguous_format)
                self.matrices[key] = emit(aten.view.default, dense, shape)
        return self.matrices[key]

    def before(self, collective: Collective, operand: Operand, **meta) -> Emitter:
        """An emitter for nodes of `operand` right before its collective. All ranks have to call their collectives in one order,
        and not all ranks have the nodes before a gather in common: the last ones pad their part."""
        return self.at(collective.node, operand, **meta)

    def after(self, node: Node, operand: Operand, **meta) -> Emitter:
        """An emitter for nodes of `operand` right behind `node`, or behind all inputs if `node` is an input."""
        return self.at(self.start if node.op == "placeholder" else node.next, operand, **meta)

    def at(self, anchor: Node, operand: Operand, **meta) -> Emitter:
        tag = "is_backward" if operand.backward else "is_forward"
        return Emitter(self.graph, anchor, operand.reader, **{"partitioner_tag": tag, **meta})


def _of(operand: Operand, cast: Node) -> Node:
    """Note on a cast which operand it copies, for telemetry; returns the cast."""
    cast.meta["fp8_operand"] = operand.key
    return cast
