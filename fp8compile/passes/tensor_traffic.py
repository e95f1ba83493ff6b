"""What FP8 copies of a tensor would cost in memory traffic: who makes it and who reads it, as the joint graph has it.

    g = mm(..); h = silu(g) * u          h: a kernel computes it from g and u, so a cast joins that kernel (`fused`), and if
    mm(h, w0); mm(h, w1)                    all its readers take FP8, nobody writes it in bf16
    y = attention(..); mm(y, w)          y: in memory; a cast reads it

Changes nothing. Sizes are the hints of the trace.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import Node

from .. import compat
from ..codegen.traffic import fusable
from ..ir.fx_utils import CASTS, PERMUTES, SAME, VIEWS, Matrix, aten, behind, call_function, hint, is_tensor, value
from ..ir.matmul import form_of

_VIEWS = (*VIEWS, *PERMUTES, *SAME, aten.expand.default, aten.slice.Tensor, aten.select.int, operator.getitem)
_JOINS = (aten.cat.default, aten.stack.default, aten.constant_pad_nd.default, aten.slice_scatter.default)
MOST_NODES = 64  # of a producer; what is longer has something in memory on its way


@dataclass(frozen=True)
class Source:
    """A tensor that matmuls read.

    `elements`, `itemsize` (bytes, in memory), `fused`, `producer_bytes`, `scattered` are those of `cost.CastInput`. `shared`:
    one who is no matmul reads it in memory (a residual, an attention, the caller), whatever matmuls do. `readers`: the matmuls.
    """

    elements: int
    itemsize: int
    fused: bool
    producer_bytes: int
    scattered: bool
    shared: bool
    readers: frozenset[Node]


def source(matrix: Matrix) -> Source:
    """What there is to know about the tensor behind an operand."""
    base = matrix.base
    elements = hint(matrix.shape[0]) * hint(matrix.shape[1])
    read = _producer_bytes(base)
    readers, shared = _readers(base)
    itemsize = int(value(base).dtype.itemsize)
    scattered = call_function(_moved(base), _JOINS)
    return Source(elements, itemsize, read is not None, read or 0, scattered, shared, frozenset(readers))


def _producer_bytes(base: Node) -> int | None:
    """Bytes that the kernel which computes `base` reads; None if no kernel computes it that a cast could join.

    The walk back ends at what is in memory: what no pointwise kernel computes, and what others read, too (a residual stream).
    In backward it ends at the tensors of the forward.
    """
    if not _computes(base):
        return None
    late = compat.is_backward(base)
    members, inputs = {base}, dict[Node, None]()
    stack = [base]
    while stack:
        for node in stack.pop().all_input_nodes:
            if node not in members and is_tensor(node):
                inputs[node] = None
        if not stack and len(members) < MOST_NODES:
            # in the end: a node may be met before its other readers are known to be inside
            stack = [x for x in inputs if _part(x) and compat.is_backward(x) == late and _internal(x, members, late)]
            members.update(stack)
            inputs = {node: None for node in inputs if node not in members}
    return sum(_bytes(node) for node in inputs)


def _internal(node: Node, members: set[Node], late: bool) -> bool:
    """Is a tensor only read inside of the kernel? (Backward computes such a tensor again.)"""
    return all(user in members or (not late and compat.is_backward(user)) for user in node.users)


def _part(node: Node) -> bool:
    return node.op == "call_function" and fusable(node, ())


def _computes(node: Node) -> bool:
    """Is there arithmetic in what makes this tensor (and not only views of what a matmul or an attention has written)?"""
    node = _moved(node)
    return _part(node) and not call_function(node, _JOINS)


def _moved(node: Node) -> Node:
    """What a tensor is a view or a copy of."""
    return behind(node, (*_VIEWS, *CASTS, aten.clone.default))


def _readers(base: Node) -> tuple[set[Node], bool]:
    """(matmuls that read a tensor, does anybody else need it in memory?).

    Sums and pointwise operators of the same kernel do not need it: a bias gradient is a sum that the cast's kernel makes on the
    way, and backward computes again what it can. A residual does: its other side is another tensor of the same size.
    """
    matmuls: set[Node] = set()
    shared, seen, stack = False, {base}, [base]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user in seen:
                continue
            seen.add(user)
            if user.op == "output":
                shared = shared or node is base
            elif form_of(user) is not None:
                matmuls.add(user)
            elif call_function(user, (*_VIEWS, *CASTS, aten.clone.default)):
                stack.append(user)
            elif not fusable(user, ()):
                shared = True
            elif compat.is_backward(user) == compat.is_backward(base) and not _reduces(user):
                shared = True
    return matmuls, shared


def _reduces(node: Node) -> bool:
    return call_function(node, (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default))


def _bytes(node: Node) -> int:
    """Of a tensor in memory; of a conversion, those of what is converted."""
    node = behind(node, CASTS)
    return hint(value(node).numel()) * int(value(node).dtype.itemsize)
