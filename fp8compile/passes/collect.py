"""collect: find every matmul of the joint graph, with its name, its role and its operands.

    view_1 = view(x)
    mm_1 = mm(view_1, permute(w))   ->  Matmul(mm_1, "up", fprop, a=x [M, K], b=w [N, K] transposed)
    mm_2 = mm(dy, w)                ->  Matmul(mm_2, "up", dgrad, a=dy [M, N], b=w [N, K])
    mm_3 = mm(permute(dy), view_1)  ->  Matmul(mm_3, "up", wgrad, a=dy [M, N] transposed, b=x [M, K])

A forward matmul with a weight as operand is an fprop; `attribute` finds its dgrad and wgrad. All others are
activation x activation, the gradients of these products, and hooks' products. The graph is not changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from torch.fx import Graph, GraphModule, Node

from .. import compat
from ..config.operators import MATMULS
from ..frontend.inputs import Inputs, readable_module
from ..ir import ops
from ..ir.fx_utils import arg, known, value
from ..ir.matmul import Matmul, factors, form_of, offs_of, operands
from ..ir.records import MatmulRecord, OpaqueRecord
from .attribute import attribute, uncopied
from .joint import Joint
from .origins import Origins
from .output_heads import TRANSPARENT

# operators that hide matmuls: a part of the operator's name, and what it hides
HIDDEN = {
    "scaled_dot_product": "attention",
    "flash_attention": "attention",
    "flex_attention": "attention",
    "attention_forward": "attention",
    "convolution": "convolution",
    "grouped_mm": "grouped matmul",
    "_scaled_mm": "already scaled by the model",
    "lstm": "recurrent layer",
    "gru": "recurrent layer",
    "mkldnn": "oneDNN operator",
    "_int_mm": "integer matmul",
    "_sparse": "sparse matmul",
    "weight_int4pack": "integer matmul",
    "aten.addbmm": "matmul",
    "addmv": "matrix-vector product",
    "aten.mv.default": "matrix-vector product",
    "aten.dot.default": "vector product",
}
# names that torch.nn.utils gives to the parameters from which it computes a weight
PARTS = re.compile(r"(?:parametrizations\.(\w+)\.original\d*|(?<![^.])(weight)_(?:orig|v))$")
OWN_NAMESPACES = (*TRANSPARENT, "higher_order", ops.NAMESPACE)


def collect(joint: Joint) -> int:
    joint.matmuls, opaque = find(joint.graph, joint.inputs)
    if joint.device is not None:  # the operator that PyTorch takes on a GPU, also where a CPU traces for one
        opaque = [replace(record, op=record.op.replace("_for_cpu", "")) for record in opaque]
    joint.opaque, joint.edges = opaque, edges(joint.graph, joint.matmuls)
    return len(joint.matmuls)


def find(graph: Graph, inputs: Inputs) -> tuple[list[Matmul], list[OpaqueRecord]]:
    """The matmuls in the order of the graph, and the operators that hide matmuls."""
    weights, parameters = {}, []
    for node in graph.find_nodes(op="placeholder"):
        index = compat.dynamo.input_index(node)
        if index in inputs.weights:
            weights[node] = inputs.names[index]
            parameters += [node] if index in inputs.parameters or index in inputs.leaves else []
    for node in graph.find_nodes(op="call_function", target=ops.dequantize):
        weights.pop(arg(node, 1), None)  # the scale belongs to the weight
    parameters = [node for node in parameters if node in weights]
    origins = Origins(graph, sorted(weights, key=lambda x: compat.dynamo.input_index(x) or 0), parameters)
    matmuls: list[Matmul] = []
    opaque: list[OpaqueRecord] = []
    barriers = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if form_of(node) is not None:
            matmuls.append(_matmul(node, inputs.named(module_of(node))))
            barriers.add(node)
            if not compat.dynamo.is_backward(node):
                _forward(matmuls[-1], origins, weights)
        elif (hidden := _hidden(node)) is not None:
            fqn = inputs.named(module_of(node))
            nested = tuple(_nested(node, graph.owning_module, fqn))
            opaque.append(OpaqueRecord(fqn, str(node.target), hidden, nested))
            barriers.update([node] if hidden in HIDDEN.values() else [])
    attribute(graph, matmuls, origins, frozenset(barriers))
    return matmuls, opaque


def edges(graph: Graph, matmuls: list[Matmul]) -> tuple[tuple[int, int], ...]:
    """(i, j) where the output of matmul i reaches matmul j in forward with no other matmul between them."""
    number = {matmul.node: i for i, matmul in enumerate(matmuls)}
    behind: dict[Node, int] = {}  # the matmuls whose outputs a node is computed from, one bit each
    found = []
    for node in graph.nodes:
        bits = 0
        for source in node.all_input_nodes:
            bits |= behind[source]
        if node in number and not compat.dynamo.is_backward(node):
            found += [(i, number[node]) for i in range(bits.bit_length()) if bits >> i & 1]
            bits = 1 << number[node]
        behind[node] = bits
    return tuple(found)


def _matmul(node: Node, fqn: str) -> Matmul:
    left, right = factors(node)
    *batch, m, k = map(known, value(left).shape)
    a, b = operands(node)
    offs = offs_of(node)
    return Matmul(
        node=node,
        op=str(node.target).removeprefix("aten.").removesuffix(".default"),
        gemm="matmul",
        a=a,
        b=b,
        batch=batch[0] if batch else 1,
        m=m,
        n=known(value(right).shape[-1]),
        k=k,
        fqn=fqn,
        offs=offs,
        groups=0 if offs is None else int(value(offs).shape[0]),
    )


def _forward(found: Matmul, origins: Origins, weights: dict[Node, str]) -> None:
    """Make a forward matmul an fprop if one of its operands is a weight. Parameters have precedence over
    computed weights, and b over a."""
    uncopied(found, origins)
    for operand in (found.b, found.a):
        made = origins[operand.base]
        if made.by:
            first = next(name for x, name in weights.items() if x in made.sources)
            found.not_a_weight = f"not a weight: computed from {first} by {made.by}"
            found.wanted = made.by not in MATMULS
            if made.by.startswith("linalg_") and not origins[found.other(operand).base].activation:
                # no activation: the matmul is a step in computing a weight (an orthogonal one, say)
                return
    for of in (origins.bare, origins.computed):
        for operand in (found.b, found.a):
            parameter = of(operand.base)
            if parameter is not None:
                found.gemm, found.weight, found.parameter = "fprop", operand.base, parameter
                found.weight_operand, found.computed = operand, of == origins.computed
                found.name = weights[parameter]
                found.fqn = _weight_name(PARTS.sub(lambda x: x[1] or x[2], found.name), found.fqn)
                return


def _weight_name(weight: str, module: str) -> str:
    """The name of a matmul, by its parameter's name and the module that calls it ('' for the root).

    `up` for `up.weight`; `attn.out_proj` and `attn.in_proj_weight` for matmuls of `attn` with the parameters
    of its own; `lm_head` for a module that borrows `tokens.weight`.
    """
    owner, _, last = weight.rpartition(".")
    name = owner if last == "weight" and owner else weight
    return name if not module or f"{name}.".startswith(f"{module}.") else module


def module_of(node: Node) -> str:
    """The module whose forward or backward contains a node; "" if unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return readable_module(list(stack.values())[-1][0]) if stack else ""


def _nested(node: Node, owner: GraphModule | None, fqn: str) -> Iterator[MatmulRecord]:
    """The matmuls of the graphs that an operator of higher order calls: each branch, and one iteration."""
    for source in node.all_input_nodes if owner is not None else ():
        inner = attrgetter(str(source.target))(owner) if source.op == "get_attr" else None
        for part in inner.graph.nodes if isinstance(inner, GraphModule) else ():
            if form_of(part) is not None and all("val" in x.meta for x in factors(part)):
                matmul = _matmul(part, fqn)
                matmul.keep(f"in a nested graph: {node.target}")
                yield matmul.record()
            elif part.op == "call_function" and _hidden(part) is not None:
                yield from _nested(part, inner, fqn)


def _hidden(node: Node) -> str | None:
    """The kind of matmuls that hide in an operator; None if none are known to."""
    name = str(node.target)
    namespace = getattr(node.target, "namespace", "")
    for part, what in HIDDEN.items():
        if part in name:
            return what
    named = isinstance(namespace, str) and namespace and namespace not in OWN_NAMESPACES
    if named and not name.startswith("<"):
        return "a third party's operator: what it computes is not visible"
    if namespace == "higher_order" or type(node.target).__name__.endswith("HigherOrderOperator"):
        return "a nested graph: not rewritten"
    return None
