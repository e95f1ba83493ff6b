"""Which tensors backward may read in FP8, judged by what makes them and what reads them (see `save`)."""

from __future__ import annotations

import operator

from torch.fx import Node

from .. import compat
from ..codegen.traffic import fusable
from ..config.recipe import Block
from ..ir import ops
from ..ir.fx_utils import CASTS, PERMUTES, SAME, SLICES, VIEWS, arg, aten, call_function, reached, readers

BLOCK = Block(1, 128)  # a scale for so many elements
CAST = (ops.quantize, ops.quantize_both, ops.amax, ops.amax_blocks)
THROUGH = (*VIEWS, *PERMUTES, *CASTS, *SAME, aten.expand.default, aten.clone.default)
PARTS = (*THROUGH, *SLICES, operator.getitem)
COMPARED = tuple(
    getattr(getattr(aten, name), of) for name in "eq ne lt le gt ge".split() for of in ("Tensor", "Scalar")
)
# what turns a small relative error into a large one
STEEP = tuple(
    getattr(aten, name).default
    for name in "sin cos tan floor ceil round trunc frac sign exp expm1 exp2".split()
)
SHIFTS: tuple = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar)
SHIFTS += (aten.mul.Scalar, aten.div.Scalar)
SCALED = (aten.mul.Tensor, aten.div.Tensor)


def delicate(x: Node) -> str:
    """What a tensor is, if it is too delicate: the probabilities of a softmax (a router's, say), or a
    rotation of positions, which is no activation."""
    while call_function(x, THROUGH) or call_function(x, SCALED) and not isinstance(arg(x, 1), Node):
        x = arg(x, 0)
    if call_function(x, (aten.sin.default, aten.cos.default)):
        return "it is a sine or cosine"
    softmax = call_function(x, (aten.div.Tensor,)) and call_function(arg(x, 0), (aten.exp.default,))
    return "it is a softmax" if softmax else ""


def unreadable(x: Node, joint: bool = False) -> str:
    """Why backward has to read a tensor in high precision; "" if it may read a copy in FP8. The tensor is an
    input of a backward graph, or with `joint` one of the forward in a joint graph."""
    for user in readers(x, PARTS):
        through = call_function(user, PARTS)
        if joint and not through and not compat.dynamo.is_backward(user):
            continue  # forward reads the tensor itself
        if user.op == "output":
            return "it is a result of the backward"
        if compat.inductor.is_checkpointed(user):
            return "the user's checkpointing starts from it"
        if not through and not call_function(user, CAST) and not fusable(user, ()):
            return f"{user.target} reads it"
        if user.target in COMPARED:
            other = arg(user, 1)
            if isinstance(other, Node) or other != 0 or "eq" in str(user.target):
                return f"{user.target} compares it"
    return _steep(x, joint)


def _steep(x: Node, joint: bool) -> str:
    """The operator, if any, that takes an exp or the like of a tensor, as it is or shifted: what a softmax
    does. (A sigmoid, or the exp of a square, is flat where its argument is large.)"""

    def shifted(user: Node) -> bool:
        scaled = call_function(user, SCALED) and not isinstance(arg(user, 1), Node)
        late = not joint or compat.dynamo.is_backward(user)
        return call_function(user, PARTS) or (late and (scaled or call_function(user, SHIFTS)))

    for user in reached([x], lambda node: node.users if node is x or shifted(node) else ()):
        if call_function(user, STEEP) and (not joint or compat.dynamo.is_backward(user)):
            return f"{user.target} reads it"
    return ""
