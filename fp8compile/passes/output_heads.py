"""Find the last matmuls of the model, its output heads, by the nodes before and after them in the graph.

    hidden -> norm -> mm -> softcap, view, loss -> output  a head: nothing with a weight follows
    hidden -> norm -> mm, gelu, mm -> + hidden -> output   no head: its output goes back into what it read
    x -> mm -> gelu -> mm -> output                        no head if x is features of a block

A block that is compiled by itself looks like the end of a model, but the last projection of a block is no
head. So if an input of the graph is features (not tokens, not pixels), a head must look like the end of a
model: it reads a sum of residuals, or it reads a norm or a pool and its output has another width than the
input features. And if the model has matrices that this graph does not read, a head must come after all of
them in the order of the model's modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import permutations

from torch.fx import Graph, Node

from .. import compat
from ..frontend.inputs import Inputs
from ..ir.fx_utils import (
    CASTS,
    SAME,
    VIEWS,
    aten,
    call_function,
    is_tensor,
    reached,
    same_shape,
    same_size,
    value,
)
from ..ir.matmul import Matmul

# names of operators that multiply features by data or weights and sum them up, rewritten or not
CONTRACTS = re.compile(
    r"(^|_)(add|badd)?b?mm(_|$)|matmul|convolution|attention|dot|lstm|gru|rnn|mv$|einsum|mkldnn|weight_int"
)
POOLS = re.compile(r"sum|mean|^var|amax|pool|norm|select|index|gather")
TRANSPARENT = "aten prims prim _c10d_functional c10d inductor inductor_prims profiler rngprims".split()
TABLES = (aten.embedding.default, aten._embedding_bag.default)
# operators that add to a stream of features, or write into one
ADDS: tuple = (aten.add.Tensor, aten.addcmul.default, aten.index_add.default, aten.scatter_add.default)
ADDS += (aten.index_put.default, aten.slice_scatter.default, aten.select_scatter.default)
JOINS = (*ADDS, aten.mul.Tensor)
THROUGH = (*CASTS, *SAME, *VIEWS, aten.add.Tensor, aten.clone.default)


def last_matmuls(matmuls: Sequence[Matmul], inputs: Inputs) -> frozenset[Matmul]:
    """The forward matmuls with a weight that are output heads by their place in the model."""
    fprops = [matmul for matmul in matmuls if matmul.gemm == "fprop"]
    if not fprops:
        return frozenset()
    known = {matmul.node: matmul for matmul in fprops}
    ends = [known[node] for node in _ends(fprops[0].node.graph, known)]
    ends = [matmul for matmul in ends if matmul.weight_among(inputs.last)]
    if not ends:
        return frozenset()
    flow = _Flow(fprops[0].node.graph, known, inputs)
    return frozenset(matmul for matmul in ends if flow.is_head(matmul))


def _ends(graph: Graph, known: dict[Node, Matmul]) -> list[Node]:
    """The matmuls whose output reaches an output of the forward and, on every path, no other weight. One
    product of two activations may be on a path: similarities are logits. Two may not: they are attention."""
    products: dict[Node, int] = {}  # the most products on a path after a node; 2 also stands for a weight
    reaches: set[Node] = set()
    for node in reversed(graph.nodes):
        most = 0
        for user in node.users:
            if user.op == "output":
                reaches.add(node)
            elif not compat.dynamo.is_backward(user):
                similarity = call_function(user, (aten.mm.default,)) and user not in known
                most = max(most, products[user] + similarity if similarity or not contracts(user) else 2)
                if user in reaches:
                    reaches.add(node)
        products[node] = min(most, 2)
    return [node for node in known if node in reaches and products[node] < 2]


def contracts(node: Node) -> bool:
    """True if this node is a product, or may hide one, so that its features are not those of its input."""
    if node.op != "call_function" or not hasattr(node.target, "namespace"):
        return False
    if not isinstance(node.target, compat.OpOverload) or node.target.namespace not in TRANSPARENT:
        return True  # a nested graph, or a third party's operator
    return CONTRACTS.search(_name(node)) is not None


def _name(node: Node) -> str:
    return node.target._schema.name.partition("::")[2] if isinstance(node.target, compat.OpOverload) else ""


class _Flow:
    """Where the tensors of a forward come from. Sources are the results of products, rows looked up in
    tables, and inputs of the graph. A set of sources is an int with one bit for each source."""

    def __init__(self, graph: Graph, known: dict[Node, Matmul], inputs: Inputs):
        self.inputs = inputs
        self.sources: list[Node] = []
        self.bits: dict[Node, int] = {}
        self.made = 0  # the sources that are computed in this graph
        self.before: dict[Node, int] = {}  # all sources that a node depends on; for a source, without itself
        self.near: dict[Node, int] = {}  # those with no other source in between; for a source, itself
        self.widths: list = []  # of the features among the graph's inputs
        for node in graph.nodes:
            if node.op == "output" or compat.dynamo.is_backward(node):
                continue
            before = near = 0
            for x in node.all_input_nodes:
                before |= self.before.get(x, 0) | self.near.get(x, 0)
                near |= self.near.get(x, 0)
            made = contracts(node) or call_function(node, TABLES)
            if made or self._is_handed(node):
                if node in known:
                    self.widths += self._features(known[node], near)
                near = self.bits[node] = 1 << len(self.sources)
                self.made |= near if made else 0
                self.sources.append(node)
            self.before[node], self.near[node] = before, near

    def is_head(self, matmul: Matmul) -> bool:
        """True if this last matmul ends a model, and its output is not added to a residual stream."""
        node, (_, n, k) = matmul.node, matmul.features
        if not (self.before[node] & self.made or self.inputs.rest) or self._is_added(matmul):
            return False
        if same_size(n, k) and _is_squashed(node):
            return False
        if not self.widths:  # tokens or pixels: the graph begins where the model does
            return True
        pooled, summed = self._reads(matmul.other_operand.base)
        other_width = not any(same_size(n, width) for width in self.widths)
        return summed or ((pooled or self.inputs.rest) and other_width)

    def _is_handed(self, node: Node) -> bool:
        """True for a floating-point input of the graph that is no weight. It may be a stream of features."""
        if node.op != "placeholder" or not is_tensor(node) or not value(node).is_floating_point():
            return False
        index = compat.dynamo.input_index(node)
        return index is not None and index < len(self.inputs.names) and index not in self.inputs.weights

    def _features(self, matmul: Matmul, near: int) -> list:
        """The widths of the graph's inputs among the sources `near` whose features this matmul contracts."""
        k = matmul.features[2]
        handed = (value(x) for x in self._nodes(near & ~self.made))
        return [k for x in handed if x.dim() >= 2 and same_size(x.shape[-1], k)]

    def _nodes(self, sources: int) -> Iterable[Node]:
        while sources:
            lowest = sources & -sources
            yield self.sources[lowest.bit_length() - 1]
            sources ^= lowest

    def _is_added(self, matmul: Matmul) -> bool:
        """True if the output of this matmul, or a tensor computed from it, is added to a stream that the
        matmul was computed from, or multiplied with such a stream as a gate."""
        node = matmul.node
        behind_it = set(reached([node], lambda x: (user for user in x.users if user in self.before)))
        sums = [(x, side) for x in behind_it if call_function(x, JOINS) for side in x.all_input_nodes]
        sums = [(x, side) for x, side in sums if side not in behind_it]
        if matmul.addend is not None:
            sums.append((node, matmul.addend))
        return any(self.near.get(side, 0) & self.before[node] and _as_large(side, x) for x, side in sums)

    def _reads(self, node: Node) -> tuple[bool, bool]:
        """(whether a norm, a pool or a selection of tokens makes this operand, whether a sum of residuals
        does)"""

        def between(x: Node) -> bool:
            return x not in self.bits and x.op == "call_function"

        made = [*filter(between, reached([node], lambda x: x.all_input_nodes if between(x) else ()))]
        summed = any(call_function(x, ADDS) and self._is_residual(x) for x in made)
        return any(POOLS.search(_name(x)) is not None for x in made), summed

    def _is_residual(self, node: Node) -> bool:
        """True if this node is a sum of which one side is computed from the other through a product."""
        sides = [x for x in node.all_input_nodes if self.near.get(x, 0) and _as_large(x, node)]
        for one, other in permutations(sides, 2):
            products = self._nodes(self.near[one] & self.made)
            if any(self.before[x] & self.near[other] for x in products):
                return True
        return False


def _as_large(side: Node, total: Node) -> bool:
    if not is_tensor(side) or not is_tensor(total) or value(total).dim() < 2:
        return False
    one, whole = value(side), value(total)
    return same_shape(one.shape, whole.shape) or same_size(one.numel(), whole.numel())


def _is_squashed(node: Node) -> bool:
    """True if a tanh follows this node with no scale in between (a softcap has one). Then the matmul is a
    pooler, whose output is features for modules outside of this graph."""
    users = [user for user in node.users if not compat.dynamo.is_backward(user)]
    while len(users) == 1 and (call_function(users[0], THROUGH)):
        users = [user for user in users[0].users if not compat.dynamo.is_backward(user)]
    squashed = [user for user in users if call_function(user, (aten.tanh.default,))]
    return bool(squashed) and len(squashed) == len(users)
