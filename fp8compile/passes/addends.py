"""What a matmul adds to its product: a bias, which the FP8 matmul adds itself, or anything else, which is added afterwards."""

from __future__ import annotations

from torch.fx import Node

from ..ir.fx_utils import Emitter, aten, value
from ..ir.matmul import Matmul


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
