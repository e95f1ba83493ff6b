"""Which activations cost nothing to compute again in backward: those whose producers read what the backward reads anyway."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from .. import compat
from ..ir.fx_utils import CASTS, PERMUTES, VIEWS, aten, hint, is_tensor, value


def read_again(source: Node) -> bool:
    """Is a forward tensor computed, element by element, from tensors that pointwise operators of the backward read, too?"""
    big, computed = value(source).numel(), False
    seen, stack = {source}, [source]
    while stack:
        node = stack.pop()
        if node.op == "call_function" and (_pointwise(node) or node.target in _RESHAPES):
            computed = computed or _pointwise(node) and node.target not in CASTS
            stack += [x for x in node.all_input_nodes if x not in seen and is_tensor(x)]
            seen.update(node.all_input_nodes)
        elif hint(value(node).numel()) * 16 > hint(big) and not _read_in_backward(node):
            return False
    return computed


def _read_in_backward(node: Node) -> bool:
    for user in node.users:
        if user.target in (*_RESHAPES, *CASTS) and _read_in_backward(user):
            return True
        if compat.is_backward(user) and _pointwise(user):
            return True
    return False


def _pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in (*CASTS, aten.clone.default)


_RESHAPES = (*VIEWS, *PERMUTES, aten.expand.default, operator.getitem)
