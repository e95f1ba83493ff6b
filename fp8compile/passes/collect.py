"""collect: find every matmul of the joint graph, with its name, its role and its operands.

    view_1 = view(x)                                  Matmul(mm, "up", fprop, a=x [M, K], b=w [N, K] transposed)
    mm_1 = mm(view_1, permute(w))             ->      Matmul(mm_2, "up", dgrad, a=dy [M, N], b=w [N, K])
    mm_2 = mm(dy, w); mm_3 = mm(permute(dy), view_1)  Matmul(mm_3, "up", wgrad, a=dy [M, N] transposed, b=x [M, K])

A forward matmul with a weight as operand is an fprop. Its dgrad and wgrad carry its `seq_nr` (autograd's number of the
forward operator): dgrad reads the weight, wgrad does not. What is left is activation x activation, with its gradients. Nothing
is changed.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, Node

from .. import compat
from ..capture import Inputs, readable_module
from ..graph import SAME, SLICES, VIEWS, Matrix, arg, aten, behind, peel, root, same_shape, value
from ..matmul import Matmul
from ..reports import OpaqueRecord

MATMULS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}  # operator: index of a among its arguments

# operators that hide matmuls, by what their name contains
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
OWN_NAMESPACES = "aten prims prim _c10d_functional c10d inductor inductor_prims profiler higher_order rngprims".split()


def collect(graph: Graph, inputs: Inputs) -> tuple[list[Matmul], list[OpaqueRecord]]:
    """The matmuls in the order of the graph, and the operators that hide some."""
    weights = {}
    for node in graph.find_nodes(op="placeholder"):
        index = compat.input_index(node)
        if index in inputs.weights:
            weights[node] = inputs.names[index]
    matmuls: list[Matmul] = []
    opaque: list[OpaqueRecord] = []
    forward: dict[int | None, list[Matmul]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if getattr(node.target, "overloadpacket", None) in MATMULS:
            matmuls.append(_matmul(node, weights, forward))
        elif (hidden := _hidden(node)) is not None:
            opaque.append(OpaqueRecord(_module_of(node), str(node.target), hidden))
    return matmuls, opaque


def edges(graph: Graph, matmuls: list[Matmul]) -> tuple[tuple[int, int], ...]:
    """(i, j) where the output of matmul i reaches matmul j in forward with no other matmul between them."""
    number = {matmul.node: i for i, matmul in enumerate(matmuls)}
    behind: dict[Node, int] = {}  # the matmuls whose outputs a node computes with, as a set of bits
    found = []
    for node in graph.nodes:
        bits = 0
        for source in node.all_input_nodes:
            bits |= behind[source]
        if node in number and not compat.is_backward(node):
            found += [(i, number[node]) for i in range(bits.bit_length()) if bits >> i & 1]
            bits = 1 << number[node]
        behind[node] = bits
    return tuple(found)


def _matmul(node: Node, weights: dict[Node, str], forward: dict[int | None, list[Matmul]]) -> Matmul:
    target: Any = node.target
    first = MATMULS[target.overloadpacket]
    left, right = arg(node, first), arg(node, first + 1)
    a, b = peel(left), peel(right)
    *batch, m, k = value(left).shape
    found = Matmul(
        node=node,
        op=str(node.target).removeprefix("aten.").removesuffix(".default"),
        gemm="matmul",
        a=a,
        b=b,
        batch=batch[0] if batch else 1,
        m=m,
        n=value(right).shape[-1],
        k=k,
        fqn=_module_of(node),
        addend=arg(node, 0) if first else None,
    )
    if not compat.is_backward(node):
        forward.setdefault(node.meta.get("seq_nr"), []).append(found)
        weight = next((x.base for x in (b, a) if _parameter(x.base) in weights), None)
        if weight is not None:
            parameter = _parameter(weight)
            found.gemm, found.weight, found.parameter = "fprop", weight, parameter
            found.name = weights[parameter]
            found.fqn = _weight_name(found.name, found.fqn)
    elif (fprop := _fprop_of(found, forward)) is not None and fprop.weight is not None:
        found.gemm = "dgrad" if _reads(node, fprop.weight) else "wgrad"
        found.weight, found.parameter, found.fprop = fprop.weight, fprop.parameter, fprop
        found.fqn, found.name = fprop.fqn, fprop.name
    return found


def _parameter(base: Node) -> Node:
    """What a tensor is a slice of: itself, if of nothing."""
    return behind(base, (operator.getitem, *SLICES, *VIEWS, *SAME))


def _reads(node: Node, weight: Node) -> bool:
    return any(isinstance(x, Node) and root(x) is root(weight) for x in node.args)


def _fprop_of(matmul: Matmul, forward: dict[int | None, list[Matmul]]) -> Matmul | None:
    """The forward gemm of a backward one; None where that has no weight. `forward`: the forward matmuls by `seq_nr`.

    Those with its own number come first: one made the autograd node, but a gemm that made none (frozen, detached) carries the
    number of the node before. Then, for the inside of a custom autograd function, whichever shares its tensors.
    """
    same = forward.get(matmul.node.meta.get("seq_nr"), [])
    found = _related(matmul, same) or _related(matmul, [x for made in forward.values() for x in made], by_input=not same)
    if found is not None:
        return found
    products = [made for made in same if made.weight is None]
    if not products:
        return same[0] if same else None
    if any(_share(matmul, made.a) or _share(matmul, made.b) for made in products):
        return None
    return next((made for made in same if made.weight is not None and _of_its_shape(matmul, made)), None)


def _related(matmul: Matmul, forward: list[Matmul], by_input: bool = True) -> Matmul | None:
    """The fprop whose weight a backward gemm reads, as a dgrad does, or else (`by_input`) whose input, as a wgrad does."""
    for made in forward:
        if made.weight is not None and _reads(matmul.node, made.weight):
            return made
    shaped = (made for made in forward if by_input and made.weight is not None and _of_its_shape(matmul, made))
    return next((made for made in shaped if _share(matmul, made.other_operand)), None)


def _share(matmul: Matmul, operand: Matrix) -> bool:
    return operand.base in (matmul.a.base, matmul.b.base)


def _of_its_shape(matmul: Matmul, fprop: Matmul) -> bool:
    """Has it as many rows and columns as the weight of `fprop`, as a wgrad has?"""
    _, n, k = fprop.features
    return any(same_shape((matmul.m, matmul.n), sides) for sides in ((n, k), (k, n)))


def _weight_name(weight: str, module: str) -> str:
    """What to call a matmul: `weight` is the parameter's name, `module` where it is called from ('' for the root).

    `up` for `up.weight`; `attn.out_proj` and `attn.in_proj_weight` for what `attn` does with the parameters of its own;
    `lm_head` for a module that borrows `tokens.weight`.
    """
    owner, _, last = weight.rpartition(".")
    name = owner if last == "weight" and owner else weight
    return name if not module or f"{name}.".startswith(f"{module}.") else module


def _module_of(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return readable_module(list(stack.values())[-1][0]) if stack else ""


def _hidden(node: Node) -> str | None:
    """What kind of matmuls hide in an operator, None if there are none that we know of."""
    name = str(node.target)
    namespace = getattr(node.target, "namespace", "")
    for part, what in HIDDEN.items():
        if part in name:
            return what
    if isinstance(namespace, str) and namespace and namespace not in OWN_NAMESPACES and not name.startswith("<"):
        return "a third party's operator: what it computes is not visible"
    if namespace == "higher_order" or type(node.target).__name__.endswith("HigherOrderOperator"):
        return "a nested graph: not rewritten"
    return None
