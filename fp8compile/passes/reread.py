"""Which activations need no copy that is kept for backward: those that it keeps anyway, and those whose producers read what it
reads anyway."""

from __future__ import annotations

import operator

from torch.fx import Node

from .. import compat
from ..ir.fx_utils import CASTS, PERMUTES, SAME, VIEWS, arg, aten, hint, is_tensor, pointwise, value


def read_again(source: Node, most: int | None = None) -> bool:
    """Is a forward tensor computed, element by element, from tensors that pointwise operators of the backward read, too? With
    `most`: from no more than so many that are as large."""
    big, computed, large = value(source).numel(), False, 0
    seen, stack = {source}, [source]
    while stack:
        node = stack.pop()
        if node.op == "call_function" and (_pointwise(node) or node.target in _RESHAPES):
            computed = computed or _pointwise(node) and node.target not in CASTS
            stack += [x for x in node.all_input_nodes if x not in seen and is_tensor(x)]
            seen.update(node.all_input_nodes)
        elif hint(value(node).numel()) * 16 > hint(big):
            large += 1
            if not _read_in_backward(node):
                return False
    return computed and (most is None or large <= most)


def kept_anyway(source: Node) -> bool:
    """Does attention's backward read a forward tensor itself? It reads attention's output."""
    base = source
    while base.op == "call_function" and base.target in (*VIEWS, *PERMUTES, aten.clone.default):
        base = arg(base, 0)
    stack = list(base.users)
    while stack:
        reader = stack.pop()
        if compat.dynamo.is_backward(reader) and "attention" in str(reader.target):
            return True
        stack += reader.users if reader.target in SAME else ()
    return False


def _read_in_backward(node: Node) -> bool:
    for user in node.users:
        if user.target in (*_RESHAPES, *CASTS) and _read_in_backward(user):
            return True
        if compat.dynamo.is_backward(user) and _pointwise(user):
            return True
    return False


def _pointwise(node: Node) -> bool:
    return pointwise(node) or node.target in (*CASTS, aten.clone.default)


_RESHAPES = (*VIEWS, *PERMUTES, aten.expand.default, operator.getitem)
