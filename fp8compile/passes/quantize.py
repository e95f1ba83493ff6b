"""quantize: cast each operand in each layout that matmuls read, and replace the decided matmuls by FP8 ones.

    mm = mm(view(x), permute(w))

becomes

    amax_x = amax(x2d); scale_x = current_scale(amax_x); inv_x = inverse(scale_x)
    amax_w = ...
    x8 = quantize(x2d, scale_x, transposed=False); w8 = quantize(w, scale_w, transposed=False)
    mm = scaled_mm(x8, w8, inv_x, inv_w)

With one scale a row or a block, the two layouts of a tensor have scales of their own:

    amax_x = amax_blocks(x2d, False, block); scale_x = current_scale(amax_x); inv_x = inverse(scale_x)
    mm = block_mm(x8, w8, inv_x, inv_w, x_block, w_block)

Of a tensor that another graph casts (`Operand.cast`) there is the amax alone.

This is the canonical form, which all later passes rewrite. The backward needs the scales of the forward
unchanged, so scales are tagged MUST_SAVE.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from .. import compat
from ..config.recipe import ROW_OF_GROUP, WHOLE
from ..ir import ops
from ..ir.fx_utils import CASTS, Emitter, Matrix, as_matrix, aten, value
from ..ir.matmul import GEMMS, Matmul
from ..ir.metadata import OPERAND, PRODUCT, RESULT
from ..ir.schemas import FP8Copy
from .expert_rows import Groups, block_of
from .joint import Joint
from .plan import Operand, Plan
from .written import Copy, Written, whole


def quantize(joint: Joint) -> int:
    """Rewrite the decided matmuls; returns how many tensors have a scale from one amax."""
    writer = Quantizer(joint.graph, joint.plan)
    for matmul in joint.matmuls:
        if matmul.fp8:
            writer.replace(matmul)
    for operand in joint.plan.operands.values():
        if not operand.cast:
            writer.amax(operand)
    joint.written = writer.written
    return len(writer.written.amaxes)


class Quantizer:
    """Writes the canonical form. What it has written is in `written`."""

    def __init__(self, graph: Graph, plan: Plan):
        self.graph, self.plan = graph, plan
        self.written = Written(graph, next(node for node in graph.nodes if node.op != "placeholder"))
        self.after = self.written.after
        self.replaced: dict[Node, Node] = {}  # matmul -> its FP8 result, which the next matmul may read
        self.matrices: dict[tuple[Node, str], Node] = {}
        self.narrowed: dict[tuple[Node, Any], Node] = {}
        self.groups = Groups(self.after)

    def operands(self, matmul: Matmul) -> list[tuple[Operand, Matrix, bool]]:
        """For a and b: operand, matrix, whether its copy is transposed. It is K-major: [m, k] or [n, k]."""
        found = []
        turned = (matmul.a.transposed, not matmul.b.transposed)
        for (matrix, role), transposed in zip(matmul.roles, turned, strict=True):
            operand = self.plan.of(matrix, role, matmul)
            found.append((operand, matrix, transposed and not operand.either))
        return found

    def replace(self, matmul: Matmul) -> None:
        operands = self.operands(matmul)
        a8, b8 = (self.cast(*operand) for operand in operands)
        node = matmul.node
        before, emit = node.prev, Emitter(self.graph, node, node)
        bias, rest = split_addend(matmul)
        fast = matmul.recipe.use_fast_accum[GEMMS.index(matmul.gemm)]
        inverses = [self.scale_of(*operand)[1] for operand in operands]
        blocks = [operand.scaling.block for operand, _, _ in operands]
        how = (*inverses, bias, value(node).dtype, fast)
        if matmul.offs is not None:
            source = self.matrix(operands[0][1], operands[0][0])
            out = self.groups.product(emit, matmul, operands, (a8, b8), inverses, source, fast)
        elif blocks == [WHOLE, WHOLE]:
            out = emit(ops.scaled_mm, a8, b8, *how)
        else:
            out = emit(ops.block_mm, a8, b8, *how, *map(list, blocks))
        out.meta[PRODUCT] = node.meta.get(RESULT)
        self.written.products[matmul] = out
        if matmul.gemm != "fprop":
            self.written.late.update(operand for operand, _, _ in operands)
        if matmul.flipped:
            out = emit(aten.permute.default, out, [1, 0])
        if value(node).dim() == 3 and matmul.offs is None:
            out = emit(aten.unsqueeze.default, out, 0)
        if rest is not None:
            out = add(emit, rest, out, node)
        out.meta[RESULT] = node.meta.get(RESULT)
        node.replace_all_uses_with(out)
        self.replaced[node] = out
        if node is self.written.start:
            self.written.start = before.next  # casts that are written later go before the product, too
        self.written.erase(node)

    def cast(self, operand: Operand, matrix: Matrix, transposed: bool) -> Node:
        """The FP8 copy of an operand in one layout; written once."""
        copy = Copy(operand, str(matrix.shape), transposed)
        if copy not in self.written.casts:
            scale = self.scale_of(operand, matrix, transposed)[0]
            source = self.matrix(matrix, operand)
            rows = self.groups.order(operand, source)[:1]
            emit = self.after(max([scale, source, *rows]), operand)
            block = block_of(operand, transposed)
            given = source, scale, operand.format.dtype, operand.format.max, transposed, block
            how = FP8Copy(*given, rows=next(iter(rows), None), divide=operand.scaling.divides)
            self.written.casts[copy] = made = emit(ops.quantize, *how.args)
            made.meta[OPERAND] = operand.key
        return self.written.casts[copy]

    def scale_of(self, operand: Operand, matrix: Matrix, transposed: bool) -> tuple[Node, Node]:
        """(scale, inverse) of an operand: one pair for both layouts, or the pair of one layout."""
        one = operand.scaling.block == WHOLE
        key = whole(operand) if one else Copy(operand, str(matrix.shape), transposed)
        if key not in self.written.scales:
            made = self.whole_scale(operand) if one else self.scales_of(operand, matrix, transposed)
            self.written.scales[key] = made
        return self.written.scales[key]

    def whole_scale(self, operand: Operand) -> tuple[Node, Node]:
        amax = self.amax(operand)
        emit = self.after(amax, operand, recompute=compat.inductor.MUST_SAVE, ac_graph_id=None)
        return current(emit, operand, amax)

    def scales_of(self, operand: Operand, matrix: Matrix, transposed: bool) -> tuple[Node, Node]:
        """The scales of the blocks of one layout."""
        block = block_of(operand, transposed)
        # square blocks: the scales of the other layout, transposed
        if transposed and block.rows == block.columns:
            known = self.scale_of(operand, matrix, False)
            emit = self.after(known[1], operand, recompute=compat.inductor.MUST_SAVE, ac_graph_id=None)
            scale, inverse = (emit(aten.permute.default, x, [1, 0]) for x in known)
            return scale, inverse
        source = self.matrix(matrix, operand)
        order = self.groups.order(operand, source)
        emit = self.after(max([source, *order]), operand, recompute=None, ac_graph_id=None)
        if order and block == ROW_OF_GROUP:
            return self.groups.scales_of_columns(emit, operand, source)
        stack = transposed and operand.matrix.stack > 1 and block.rows == 1
        # rows of a transposed matrix are columns here; kernels of columns write [matrices, columns]
        if stack:
            amax = emit(ops.amax_blocks, source, False, [block.columns, 1])
        else:
            amax = emit(ops.amax_blocks, source, transposed, list(block), *order[:1])
        emit.meta["recompute"] = compat.inductor.MUST_SAVE
        scale, inverse = current(emit, operand, amax)
        if stack:
            scale, inverse = (emit(aten.permute.default, x, [1, 0]) for x in (scale, inverse))
        return scale, inverse

    def amax(self, operand: Operand) -> Node:
        """The amax of an operand; written once."""
        if operand not in self.written.amaxes:
            source = self.matrix(operand.matrix, operand)
            rows = self.groups.order(operand, source)[:1]
            emit = self.after(max([source, *rows]), operand, recompute=None, ac_graph_id=None)
            self.written.amaxes[operand] = emit(ops.amax, source, *rows)
        return self.written.amaxes[operand]

    def rounded(self, base: Node, operand: Operand) -> Node:
        """The base, in the dtype that its matmuls read if a server rounds it to that before its cast."""
        dtype = value(operand.reader).dtype
        if not operand.scaling.least or value(base).dtype.itemsize <= dtype.itemsize:
            return base
        if (base, dtype) not in self.narrowed:
            emit = self.after(base, operand)
            self.narrowed[base, dtype] = emit(CASTS[1], base, dtype)
        return self.narrowed[base, dtype]

    def matrix(self, matrix: Matrix, operand: Operand) -> Node:
        """The base in 2-D: a view, or if strides allow none, a copy, which Inductor fuses into the casts."""
        base = self.rounded(self.replaced.get(matrix.base, matrix.base), operand)
        rows, columns = matrix.shape
        key = (base, f"{rows} {columns}")
        if key not in self.matrices:
            self.matrices[key] = as_matrix(self.after(base, operand), base, matrix.shape)
        return self.matrices[key]


def current(emit: Emitter, operand: Operand, amax: Node) -> tuple[Node, Node]:
    """(scale, inverse) from the amax of the tensor itself, or of each block. The inverse twice if values are
    divided by it, as servers do."""
    scaling = operand.scaling
    if scaling.least:
        inverse = emit(ops.served_inverse, amax, operand.format.max, scaling.least, scaling.power_of_2)
        return inverse if scaling.divides else emit(ops.inverse, inverse), inverse
    scale = emit(ops.current_scale, amax, operand.format.max, scaling.margin, scaling.power_of_2)
    return scale, emit(ops.inverse, scale)


def split_addend(matmul: Matmul) -> tuple[Node | None, Node | None]:
    """(bias that the FP8 matmul adds, any other addend, which is added afterwards): at least one is None."""
    node, addend = matmul.node, matmul.addend
    if addend is None:
        return None, None
    plain = node.kwargs.get("beta", 1) == 1 and node.kwargs.get("alpha", 1) == 1
    shape = value(addend).shape
    is_row = len(shape) == 1 and isinstance(shape[0], int) and shape[0] == matmul.n
    return (addend, None) if plain and is_row and value(node).dim() == 2 else (None, addend)


def add(emit: Emitter, addend: Node, product: Node, node: Node) -> Node:
    """`beta * addend + alpha * product`, with the factors of the matmul `node`."""
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    if alpha != 1:
        product = emit(aten.mul.Tensor, product, alpha)
    if beta == 0:
        return product
    if beta != 1:
        addend = emit(aten.mul.Tensor, addend, beta)
    return emit(aten.add.Tensor, product, addend)
