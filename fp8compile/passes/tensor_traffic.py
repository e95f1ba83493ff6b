"""The memory traffic that FP8 copies of a tensor cause, by the nodes that make and read it in a joint graph.

    g = mm(..); h = silu(g) * u  h: a kernel computes it from g and u, so a cast joins that kernel (`fused`),
    mm(h, w0); mm(h, w1)            and if all its readers take FP8, nobody writes it in bf16
    y = attention(..); mm(y, w)  y: in memory; a cast reads it

The graph is not changed. Sizes are the hints of the trace.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import Node

from .. import compat
from ..codegen.traffic import fusable
from ..devices.cost import CastInput
from ..ir import ops
from ..ir.fx_utils import ALIKE, CASTS, Matrix, aten, behind, call_function, hint, is_tensor, readers, value
from ..ir.matmul import form_of

_MOVES: tuple = (*ALIKE, operator.getitem, aten.expand.default, aten.slice.Tensor, aten.select.int)
_MOVES += (aten.clone.default,)
_REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default)
_JOINS = (aten.cat.default, aten.stack.default, aten.constant_pad_nd.default, aten.slice_scatter.default)
MOST_NODES = 64  # of a producer's kernel; a longer chain has a tensor in memory somewhere


@dataclass(frozen=True, kw_only=True)
class Source(CastInput):
    """A tensor that matmuls, its `readers`, read. `shared`: another reader needs the tensor in memory (a
    residual, an attention, the caller), whatever the matmuls read."""

    shared: bool
    readers: frozenset[Node]


def source(matrix: Matrix) -> Source:
    """The `Source` of an operand's base tensor."""
    base = matrix.base
    matmuls, shared = _readers(base)
    arrived = call_function(base, (ops.dequantize,))  # a weight that FSDP2 has gathered in FP8
    read = None if arrived else _producer_bytes(base)
    return Source(
        elements=hint(matrix.shape[0]) * hint(matrix.shape[1]),
        itemsize=1 if arrived else value(base).dtype.itemsize,
        fused=read is not None,
        producer_bytes=read or 0,
        scattered=call_function(_moved(base), _JOINS),
        shared=shared,
        readers=frozenset(matmuls),
    )


def _producer_bytes(base: Node) -> int | None:
    """Bytes that the kernel of `base` reads; None if `base` has no kernel that a cast could join.

    The walk back ends at tensors in memory: those that no pointwise kernel computes, and those that other
    nodes read as well (a residual stream). In backward it ends at the tensors of the forward.
    """
    made = _moved(base)
    if not _part(made) or call_function(made, _JOINS):  # a view of a matmul's or attention's output
        return None
    late = compat.dynamo.is_backward(base)
    members, inputs = {base}, dict[Node, None]()
    stack = [base]
    while stack:
        for node in stack.pop().all_input_nodes:
            if node not in members and is_tensor(node):
                inputs[node] = None
        if not stack and len(members) < MOST_NODES:
            # with an empty stack only: a node may be met before its other readers are known to be members
            parts = [x for x in inputs if _part(x) and compat.dynamo.is_backward(x) == late]
            stack = [x for x in parts if _internal(x, members, late)]
            members.update(stack)
            inputs = {node: None for node in inputs if node not in members}
    return sum(_bytes(node) for node in inputs)


def _internal(node: Node, members: set[Node], late: bool) -> bool:
    """True if a tensor is read only inside of the kernel or, unless `late`, also by the backward, which
    computes it again."""
    return all(user in members or (not late and compat.dynamo.is_backward(user)) for user in node.users)


def _part(node: Node) -> bool:
    return node.op == "call_function" and fusable(node, ())


def _moved(node: Node) -> Node:
    """The tensor that this one is a view, a cast or a copy of."""
    return behind(node, _MOVES)


def _readers(base: Node) -> tuple[set[Node], bool]:
    """(matmuls that read a tensor, whether any other reader needs it in memory).

    Sums, and pointwise operators of the backward, do not need a tensor of the forward in memory: the cast's
    kernel computes a sum (a bias gradient) on the way, and the backward recomputes the tensor where it can. A
    residual needs the tensor: its other side is another tensor of the same size.
    """
    matmuls: set[Node] = set()
    shared, late = False, compat.dynamo.is_backward(base)
    for user in readers(base, _MOVES):
        if user.op == "output":
            shared |= user in base.users
        elif form_of(user) is not None:
            matmuls.add(user)
        elif not call_function(user, _MOVES):
            alike = compat.dynamo.is_backward(user) == late
            shared |= not fusable(user, ()) or (alike and not call_function(user, _REDUCTIONS))
    return matmuls, shared


def _bytes(node: Node) -> int:
    """Bytes of a tensor in memory; for a cast, the bytes of its source."""
    node = behind(node, CASTS)
    return hint(value(node).numel()) * int(value(node).dtype.itemsize)
