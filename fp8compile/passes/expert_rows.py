"""What `quantize` does for groups of rows: the padded order, and the FP8 matmul of groups (`ir.grouped`)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch.fx import Node

from .. import compat
from ..config.recipe import ROW, ROW_OF_GROUP, WHOLE, Block
from ..ir import grouped, ops
from ..ir.fx_utils import Emitter, Matrix, aten, is_tensor, same_size, value
from ..ir.matmul import Matmul
from .plan import Operand


def block_of(operand: Operand, transposed: bool) -> Block:
    """The elements that share a scale in a copy. In the transposed copy of a stack, or of groups, a row has a
    scale for each matrix or group. That of a group is repeated for each `align` columns."""
    block = operand.scaling.block
    if not transposed or block != ROW:
        return block
    if operand.offs is not None:
        return ROW_OF_GROUP
    return Block(1, operand.matrix.rows) if operand.matrix.stack > 1 else ROW


class Groups:
    """Writes each node that depends on the ends of groups once, by emitters after nodes (`Written.after`)."""

    def __init__(self, after: Callable[..., Emitter]):
        self.after = after
        self.orders: dict[tuple[Node, str, int], tuple[Node, ...]] = {}

    def order(self, operand: Operand, source: Node) -> tuple[Node, ...]:
        """The results of `group_order` for an operand (the matrix `source`) that is divided into groups: the
        padded order, the ends of the groups there, and the group of each `align` rows; () for any other."""
        if operand.offs is None:
            return ()
        size = value(source).shape[0]
        key = (operand.offs, str(size), _align(operand))
        if key not in self.orders:
            emit = self.after(max(operand.offs, source), operand, recompute=None, ac_graph_id=None)
            known = size if isinstance(size, int) else emit(aten.sym_size.int, _first_of_rows(source), 0)
            made = emit(grouped.group_order, operand.offs, known, _align(operand))
            self.orders[key] = tuple(emit(operator.getitem, made, i) for i in range(3))
        return self.orders[key]

    def scales_of_columns(self, emit: Emitter, operand: Operand, source: Node) -> tuple[Node, Node]:
        """(scale, inverse) of the transposed copy, with a scale for each column of each group: the scale for
        each `align` rows of the padded order, and the inverse [E, C]."""
        rows, _, groups = self.order(operand, source)
        amax = emit(grouped.group_amax, source, operand.offs, rows, groups)
        emit.meta["recompute"] = compat.inductor.MUST_SAVE
        scaling = operand.scaling
        scale = emit(ops.current_scale, amax, operand.format.max, scaling.margin, scaling.power_of_2)
        inverse = emit(ops.inverse, scale)
        emit.meta.pop("recompute")
        return emit(grouped.of_groups, scale, groups), inverse

    def product(
        self,
        emit: Emitter,
        matmul: Matmul,
        operands: Sequence[tuple[Operand, Matrix, bool]],
        copies: Sequence[Node],
        inverses: Sequence[Node],
        source: Node,
        fast: bool,
    ) -> Node:
        """The FP8 matmul that replaces a grouped one; `source` is the matrix of its first operand."""
        (a, _, _), (b, stack, transposed) = operands
        # the copy that is there serves the other layout, too
        turned = not matmul.b.transposed and not transposed
        offs, (b8, b_inv) = matmul.offs, (copies[1], inverses[1])
        if stack.stack > 1 or b.offs is None:
            b8 = _stacked(emit, b8, stack.stack, transposed, turned)
            if b.scaling.block != WHOLE:
                b_inv = _stacked(emit, b_inv, stack.stack, transposed, turned)
        else:
            offs = self.order(a, source)[1]
        dtype, blocks = value(matmul.node).dtype, [list(x.scaling.block) for x in (a, b)]
        return emit(grouped.grouped_mm, copies[0], b8, inverses[0], b_inv, offs, dtype, fast, *blocks)


def _first_of_rows(node: Node) -> Node:
    """An early tensor with as many rows: the kernel of this one reads the order, which needs their number."""
    rows = value(node).shape[0]
    while True:
        inputs = (x for x in node.all_input_nodes if is_tensor(x) and value(x).dim() > 0)
        earlier = next((x for x in inputs if same_size(value(x).shape[0], rows)), None)
        if earlier is None:
            return node
        node = earlier


def _align(operand: Operand) -> int:
    return max(grouped.ALIGN, operand.scaling.block.columns)


def _stacked(emit: Emitter, copy: Node, count: int, transposed: bool, turned: bool) -> Node:
    """[E * R, C] or, transposed, [C, E * R], as E matrices: [E, R, C] or [E, C, R]. `turned`: [E * R, C] as
    [E, C, R]."""
    rows, columns = value(copy).shape
    if not transposed:
        matrices = emit(aten.view.default, copy, [count, rows // count, columns])
        return emit(aten.permute.default, matrices, [0, 2, 1]) if turned else matrices
    parts = emit(aten.view.default, copy, [rows, count, columns // count])
    return emit(aten.permute.default, parts, [1, 0, 2])
