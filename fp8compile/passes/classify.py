"""Recognise output heads, router gates and down projections by their names and by the nodes around them in
the graph. (`output_heads` finds the heads that only their place in the model reveals.)

The default policy keeps heads and gates in high precision: logits, and choices between experts, are sensitive
to small errors. A down projection after a gated activation reads a product of two projections, whose outliers
grow suddenly.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence

from torch.fx import Node

from .. import compat
from ..frontend.inputs import Inputs
from ..ir.fx_utils import (
    CASTS,
    SAME,
    SLICES,
    VIEWS,
    arg,
    aten,
    behind,
    call_function,
    is_tensor,
    pointwise,
    readers,
    same_shape,
    same_size,
    value,
)
from ..ir.matmul import Matmul
from .output_heads import TABLES, last_matmuls

HEADS = "lm_head head heads embed_out unembed unembedding output_projection score classifier logits".split()
ROUTERS = "router routing gating".split()
LOSSES: tuple = (aten._log_softmax.default, aten.logsumexp.default, aten.cross_entropy_loss.default)
LOSSES += (aten.nll_loss_forward.default,)
CHOICES: tuple = (aten._softmax.default, aten.topk.default, aten.sort.default)
CHOICES += (aten._safe_softmax.default,)
MAXIMA = (aten.amax.default, aten.max.dim)
# What these return is (or has) the place of an element: other places, once the rounding is another
PLACES: tuple = (aten.argmax.default, aten.argmin.default, aten.topk.default, aten.kthvalue.default)
PLACES += (aten.sort.default, aten.sort.stable)
EXTREMA = (aten.max.dim, aten.min.dim)
# operators that may stand between a head and its loss, or between a router and its choice
PARTS = (aten.slice.Tensor, aten.select.int, aten.constant_pad_nd.default)
BETWEEN: tuple = (*CASTS, *SAME, *VIEWS, *PARTS, aten.clone.default, aten.permute.default)
BETWEEN += (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.sigmoid.default, aten.tanh.default)
CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
LAST = "output head: the last matmul of the model, nothing follows it"
GATED = "down projection: its input is a product of two projections"
MOST = 64  # nodes to visit between a product and the projections that it is computed from


def kinds(matmuls: Sequence[Matmul], inputs: Inputs) -> dict[Matmul, str]:
    """The kind of every forward matmul with a weight, and how it was recognised: "output head: ...", "router
    gate: ..." or "down projection: ..."; "" for any other matmul."""
    last = last_matmuls(matmuls, inputs)
    return {
        matmul: _head(matmul) or _router(matmul) or (LAST if matmul in last else "") or _down(matmul) or ""
        for matmul in matmuls
        if matmul.gemm == "fprop"
    }


def _head(matmul: Matmul) -> str | None:
    if matmul.fqn.rsplit(".", 1)[-1].lower() in HEADS:
        return "output head: by its name"
    tied = readers(matmul.parameter, (*CASTS, *SAME)) if matmul.parameter is not None else ()
    if any(map(_looks_up, tied)):
        return "output head: the weight is tied to an embedding"
    if any(call_function(node, LOSSES) or _softmax(node) == "log" for node in _downstream(matmul.node)):
        return "output head: its output is the loss's logits"
    return None


def _looks_up(user: Node) -> bool:
    """True if this node reads rows of a table. (An index into stacked weights reads whole matrices.)"""
    indexed = call_function(user, (aten.index.Tensor,)) and value(arg(user, 0)).dim() == 2
    return indexed or call_function(user, TABLES)


def _router(matmul: Matmul) -> str | None:
    if matmul.fqn.rsplit(".", 1)[-1].lower() in ROUTERS:
        return "router gate: by its name"
    if any(call_function(node, CHOICES) or _softmax(node) == "plain" for node in _downstream(matmul.node)):
        return "router gate: its output goes into a softmax or topk"
    if any(map(_chooses_tokens, _downstream(matmul.node))):
        return "router gate: a maximum chooses between its tokens"
    if any(map(_chooses, _scores(matmul.node))):
        return "router gate: its output decides which entries are chosen"
    return None


def _chooses_tokens(node: Node) -> bool:
    """True if this node is a maximum over a dimension other than features. With other rounding another token
    wins, and the winner gets all the gradient."""
    if not call_function(node, MAXIMA) or len(node.args) < 2:
        return False
    rank, dims = value(arg(node, 0)).dim(), arg(node, 1)
    return any(dim % rank != rank - 1 for dim in (dims if isinstance(dims, (list, tuple)) else [dims]))


def _chooses(node: Node) -> bool:
    """True if forward uses the place that this node finds (of a codebook's distances, of nearest keys)."""
    if call_function(node, EXTREMA):
        places = [x for x in node.users if call_function(x, (operator.getitem,)) and arg(x, 1) == 1]
        return any(not compat.dynamo.is_backward(user) for place in places for user in place.users)
    return call_function(node, PLACES)


def _down(matmul: Matmul) -> str | None:
    """GATED if this matmul's input is an elementwise product of two projections, act(gate) * up; or None."""
    node = matmul.other_operand.base
    for _ in range(8):  # a dropout mask, a scale or a cast may follow the product
        if call_function(node, (*CASTS, *SAME, *VIEWS, *CLAMPS, aten.clone.default)):
            node = arg(node, 0)
            continue
        if call_function(node, (aten.glu.default,)) and _projections(arg(node, 0)):
            return GATED
        if not call_function(node, (aten.mul.Tensor, aten.div.Tensor)):
            return None
        sides = [(x, _projections(x)) for x in node.args[:2] if isinstance(x, Node) and _as_large(x, node)]
        made = [(x, found) for x, found in sides if found]
        if len(made) == 2 and not made[0][1] & made[1][1]:
            return GATED
        if len(made) != 1:  # no side, or both from one projection: x * sigmoid(x)
            return None
        node = made[0][0]
    return None


def _as_large(x: Node, product: Node) -> bool:
    """True if this factor has the product's shape. adaLN's does not: it has one scale for a sequence."""
    return is_tensor(x) and same_shape(value(x).shape, value(product).shape)


def _projections(node: Node) -> frozenset[Node]:
    """The matmul outputs, or parts of such outputs, from which a tensor is computed element by element."""
    found, seen, stack = set(), {node}, [node]
    while stack:
        x = stack.pop()
        part = behind(x, (*CASTS, *SAME, *VIEWS, aten.permute.default, aten.clone.default))
        whole = behind(part, (operator.getitem, *SLICES, *CASTS, *SAME, *VIEWS))
        if call_function(whole, (aten.mm.default, aten.addmm.default, aten._grouped_mm.default)):
            found.add(part)
            continue
        for source in part.all_input_nodes if pointwise(part) else ():
            if is_tensor(source) and source not in seen and len(seen) < MOST:
                seen.add(source)
                stack.append(source)
    return frozenset(found)


def _downstream(node: Node) -> Iterator[Node]:
    """The nodes that the output of a matmul reaches with its tokens and features intact, in forward."""

    def intact(user: Node) -> bool:
        kept = not call_function(user, (aten.mm.default,)) and call_function(user, BETWEEN) and _no_mix(user)
        return kept and (same_size(value(user).numel(), value(node).numel()) or call_function(user, PARTS))

    return _reached(node, intact)


def _scores(node: Node) -> Iterator[Node]:
    """The nodes of forward that read what is computed element by element from the output of a matmul, and
    whatever is added to it: `x2 + e2 - 2 * x @ e.T`, or logits with noise."""

    def by_element(user: Node) -> bool:
        kept = pointwise(user) or call_function(user, BETWEEN)
        return kept and same_size(value(user).numel(), value(node).numel())

    return _reached(node, by_element, MOST)


def _reached(node: Node, through: Callable[[Node], bool], most: float = math.inf) -> Iterator[Node]:
    """The nodes of forward that read a tensor, or what it becomes `through` others (`most` nodes at most)."""
    seen, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user in seen or user.op != "call_function" or compat.dynamo.is_backward(user):
                continue
            seen.add(user)
            yield user
            if is_tensor(user) and len(seen) < most and through(user):
                stack.append(user)


def _softmax(node: Node) -> str | None:
    """Returns "plain" for the first node of a decomposed softmax, "log" for a log-softmax's; else None.

    m = amax(x, -1, keepdim); e = exp(x - m); s = sum(e)      then e / s, or log(s)
    """
    if not call_function(node, (aten.amax.default,)):
        return None
    shifted = [x for x in arg(node, 0).users if call_function(x, (aten.sub.Tensor,)) and arg(x, 1) is node]
    exponentials = [user for x in shifted for user in x.users if call_function(user, (aten.exp.default,))]
    sums = [user for x in exponentials for user in x.users if call_function(user, (aten.sum.dim_IntList,))]
    after = [user for x in sums for user in x.users]
    if any(call_function(user, (aten.log.default,)) for user in after):
        return "log"
    return "plain" if any(call_function(user, (aten.div.Tensor,)) for user in after) else None


def _no_mix(node: Node) -> bool:
    """False for a sum or product of two activations. (A bias or a temperature is small, and is none.)"""
    if not call_function(node, (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor)):
        return True
    sides = [value(x).dim() for x in node.args[:2] if isinstance(x, Node) and is_tensor(x)]
    return len(sides) == 1 or min(sides) <= 1
