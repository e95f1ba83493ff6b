"""origins: which inputs a tensor is computed from, and whose gradient it becomes.

    w = g * v / norm(v)        computed from the parameters g and v alone, element by element: a weight
    y = x * scale              x is an activation, so is y
    q = matrix_exp(a - a.t())  computed from a alone, by a matrix function: no weight
    gw = mm(permute(dy), x); output: permute(gw)

gw becomes w's gradient: no other matmul is in between.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from torch.fx import Graph, Node

from .. import compat
from ..ir import ops
from ..ir.fx_utils import (
    CASTS,
    PERMUTES,
    SAME,
    SLICES,
    VIEWS,
    arg,
    aten,
    behind,
    is_tensor,
    pointwise,
    reached,
    root,
    value,
)
from ..ir.matmul import addend_of
from .all_gather_nodes import all_gather_of

# The result of a pointwise operator, or of one of these, on a weight is still a weight. An index is not among
# them: it may look up tokens.
_LAYOUT: tuple = (*CASTS, *VIEWS, *PERMUTES, *SLICES, *SAME, operator.getitem, aten.copy.default)
_LAYOUT += (aten.expand.default, aten.repeat.default, aten.cat.default, aten.stack.default, aten.flip.default)
_LAYOUT += (aten.constant_pad_nd.default, aten.slice_scatter.default, aten.select_scatter.default)
_LAYOUT += (aten.tril.default, aten.triu.default)
# a model may gather its shards itself
_LAYOUT += (*compat.process_groups.ALL_GATHER, *compat.process_groups.WAIT)
_LAYOUT += (aten._conj.default, aten._conj_physical.default, aten.resolve_conj.default)
_REDUCTIONS: tuple = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
_REDUCTIONS += (aten.amax.default, aten.amin.default, aten.prod.default, aten.prod.dim_int)
_REDUCTIONS += (aten.var.correction, aten.var_mean.correction, aten.std.correction)
_REDUCTIONS += (aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.norm.Scalar)
_REDUCTIONS += (aten._weight_norm_interface.default, aten.native_layer_norm.default, aten._softmax.default)
_REDUCTIONS += (aten.mv.default, aten.dot.default, aten.vdot.default)  # spectral norms
_FILLS: tuple = (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default)
_FILLS += (aten.new_full.default, aten.new_zeros.default, aten.new_ones.default)
_FILLS += (aten.rand_like.default, aten.bernoulli.p)
_KEEPS = frozenset((*_LAYOUT, *_REDUCTIONS, *_FILLS))


class Origin(NamedTuple):
    """What a tensor is computed from: parameters and buffers (`sources`), or an `activation`, or constants
    alone. `by`: the operator because of which a tensor without activations is no weight."""

    sources: frozenset[Node] = frozenset()
    activation: bool = False
    by: str = ""


_CONSTANT, _ACTIVATION = Origin(), Origin(activation=True)


class Origins:
    """The `Origin` of every tensor of a joint graph. `weights`: placeholders of parameters and buffers, in
    the order of the graph's inputs; `parameters`: the parameters among them."""

    def __init__(self, graph: Graph, weights: Iterable[Node], parameters: Iterable[Node]):
        self.weights = dict.fromkeys(weights)
        self.parameters = frozenset(parameters)
        self.known: dict[Node, Origin] = {}
        self.gradients: set[Node] = set()  # all that is computed from a tangent
        for node in graph.nodes:
            if node.op != "output":
                self.known[node] = self._of(node)
                if compat.dynamo.is_tangent(node) or not self.gradients.isdisjoint(node.all_input_nodes):
                    self.gradients.add(node)

    def _of(self, node: Node) -> Origin:
        if node in self.weights:
            return Origin(frozenset([node]))
        if node.op == "placeholder":
            return _ACTIVATION if is_tensor(node) else _CONSTANT
        if node.target == ops.dequantize:
            return self.known[arg(node, 0)]
        given = [self.known[x] for x in node.all_input_nodes]
        if any(x.activation for x in given):
            return _ACTIVATION
        sources = frozenset().union(*(x.sources for x in given))
        by = next((x.by for x in given if x.by), "")
        keeps = node.target in _KEEPS or pointwise(node)
        return Origin(sources, False, by or _name(node) if sources and not keeps else by)

    def __getitem__(self, node: Node) -> Origin:
        return self.known[node]

    def bare(self, base: Node) -> Node | None:
        """The parameter or buffer that a tensor is, or is a slice of, or that is gathered from shards, which
        may be cast."""
        gather = all_gather_of(base)
        if gather is not None:
            through = (*CASTS, *SAME, *VIEWS, *PERMUTES, aten.clone.default, aten.constant_pad_nd.default)
            base = behind(gather.local, through)
        found = behind(base, (operator.getitem, *SLICES, *VIEWS, *SAME, ops.dequantize))
        return found if found in self.weights else None

    def computed(self, base: Node) -> Node | None:
        """The parameter that a computed weight counts as: its largest source, the first among equals."""
        origin = self.known[base]
        if origin.activation or origin.by or compat.dynamo.is_backward(base):
            return None
        owners = [x for x in self.weights if x in origin.sources and x in self.parameters]
        sizes = {x: value(x).numel() for x in owners}
        return max(owners, key=lambda x: sizes[x] if isinstance(sizes[x], int) else 0, default=None)


def _name(node: Node) -> str:
    name = str(getattr(node.target, "overloadpacket", node.target))
    return name.removeprefix("aten.").removeprefix("prims.")


class Gradients:
    """Tells which weights' gradients the tensors of a joint graph become."""

    def __init__(self, graph: Graph, barriers: frozenset[Node]):
        """`barriers`: operators that multiply matrices. After one, a gradient counts as another tensor."""
        outputs = compat.dynamo.gradient_outputs(graph)
        self.known = outputs is not None
        self.inputs = {index for _, index in outputs or ()}
        # a bit for each input whose gradient a tensor becomes: with no barrier in between; with any number
        self.near, self.far = defaultdict[Node | None, int](int), defaultdict[Node, int](int)
        for node, index in outputs or ():
            self.near[node] |= 1 << index
            self.far[node] |= 1 << index
        for node in reversed(graph.nodes):
            for x in node.all_input_nodes:
                self.far[x] |= self.far[node]
            # a product passes its addend alone
            for x in [addend_of(node)] if node in barriers else node.all_input_nodes:
                self.near[x] |= self.near[node]

    def wanted(self, sources: Iterable[Node]) -> bool:
        """True if one of these is an input whose gradient the graph computes."""
        return any(compat.dynamo.input_index(x) in self.inputs for x in sources if x.op == "placeholder")

    def reach(self, node: Node, sources: Iterable[Node], far: bool = False) -> bool:
        """True if a tensor becomes the gradient of one of these weights, with no barrier in between (`far`:
        or with some). True where the graph does not tell, too."""
        if not self.known:
            return True
        bits = self.far[node] if far else self.near[node]
        indices = map(compat.dynamo.input_index, sources)
        return bool(bits) and any(index is not None and bits >> index & 1 for index in indices)


def ingredients(node: Node, origins: Origins, barriers: frozenset[Node]) -> set[Node]:
    """The activations that a tensor is computed from with no matmul in between: itself and inputs, too."""

    def activations(x: Node) -> list[Node]:
        if x in barriers:
            return []
        return [y for y in x.all_input_nodes if is_tensor(y) and origins[y].activation]

    return set(reached([root(node)], activations))
