"""Which tensors backward may read in FP8, judged by what makes them and what reads them (see `save`)."""

from __future__ import annotations

from torch.fx import Node

from .. import compat
from ..codegen.traffic import fusable
from ..config.recipe import Block
from ..ir import ops
from ..ir.fx_utils import arg, aten, call_function, readers
from .magnified import PARTS, THROUGH, Backward, magnified

BLOCK = Block(1, 128)  # a scale for so many elements
CAST = (ops.quantize, ops.quantize_both, ops.amax, ops.amax_blocks)
SCALED = (aten.mul.Tensor, aten.div.Tensor)
SUMMED = ("sum", "mean", "var", "var_mean", "std", "std_mean")


def inexact(x: Node, reader: Node, backward: Backward) -> str:
    """Why a copy in FP8 is too inexact for what backward does with a tensor; "" if it is not. `reader`: what
    stands for it in the graph of the backward, which is the tensor itself in a joint graph."""
    return _delicate(x) or magnified(reader, backward)


def _delicate(x: Node) -> str:
    """What a tensor is, if it is too delicate: the probabilities of a softmax (a router's, say), a rotation
    of positions, which is no activation, or one of which forward takes the mean: where that is large, what is
    left of the tensor, or of its gradient, without the mean is not what is left of a copy."""
    for user in readers(x, THROUGH):
        if getattr(user.target, "_opname", "") in SUMMED and not compat.dynamo.is_backward(user):
            return "forward takes its mean or sum"
    while call_function(x, THROUGH) or call_function(x, SCALED) and not isinstance(arg(x, 1), Node):
        x = arg(x, 0)
    if call_function(x, (aten.sin.default, aten.cos.default)):
        return "it is a sine or cosine"
    x = arg(x, 0) if call_function(x, (aten.div.Tensor,)) else x
    return "it is a softmax" if call_function(x, (aten.exp.default,)) else ""


def unreadable(x: Node, joint: bool = False) -> str:
    """Why backward has to read a tensor as it is, whatever becomes of errors; "" if it may read a copy. The
    tensor is an input of a backward graph, or with `joint` one of the forward in a joint graph."""
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
    return ""
