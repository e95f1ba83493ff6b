"""Which matmuls become FP8: the default rules, in order; the first that objects gives the reason.

A rule looks at one matmul and what surrounds it in the graph, and returns why it stays in high precision, or None.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .graph import CASTS, FLOATS, SAME, VIEWS, arg, aten, call_function, same_size, value
from .matmul import GEMMS, Matmul
from .recipe import Recipe

SMALLEST = 128  # narrower weights: a LoRA's rank, a gate's handful of experts; the casts cost more than the gemm saves
HEADS = "lm_head head heads embed_out unembed unembedding output_projection score classifier logits".split()
ROUTERS = "router routing gating".split()
EMBEDDINGS = (aten.embedding.default, aten._embedding_bag.default, aten.index.Tensor)
LOSSES = (aten._log_softmax.default, aten.logsumexp.default, aten.cross_entropy_loss.default, aten.nll_loss_forward.default)
CHOICES: tuple = (aten._softmax.default, aten.topk.default, aten.sort.default)
CHOICES += (aten._safe_softmax.default,)
# what may stand between a head and its loss, or a router and its choice
BETWEEN: tuple = (*CASTS, *SAME, *VIEWS, aten.slice.Tensor, aten.select.int, aten.clone.default, aten.permute.default)
BETWEEN += (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.sigmoid.default, aten.tanh.default)
BETWEEN += (aten.constant_pad_nd.default,)


def decide(matmul: Matmul, recipe: Recipe) -> str | None:
    """Why `matmul` stays in high precision, None if it becomes FP8. dgrad and wgrad follow what holds for their weight."""
    if matmul.weight is None:
        return "not a weight: neither operand is a parameter"
    for rule in (_override, _dtype, _overload, _batched, _rows, _head, _router, _width, _alignment):
        reason = rule(matmul, recipe)
        if reason is not None:
            return reason
    return None


def _override(matmul: Matmul, recipe: Recipe) -> str | None:
    if recipe.override_linear_precision[GEMMS.index(matmul.gemm)]:  # type: ignore[arg-type]
        return f"override_linear_precision keeps {matmul.gemm}"
    return None


def _dtype(matmul: Matmul, recipe: Recipe) -> str | None:
    for x in (matmul.node, matmul.a.base, matmul.b.base):
        dtype = value(x).dtype
        if dtype not in FLOATS:
            return f"dtype {str(dtype).removeprefix('torch.')}"
        if value(x).layout is not torch.strided:
            return f"dtype: {value(x).layout} tensor"
    return None


def _overload(matmul: Matmul, recipe: Recipe) -> str | None:
    return f"the overload {matmul.op} is not rewritten" if "." in matmul.op else None


def _batched(matmul: Matmul, recipe: Recipe) -> str | None:
    return None if isinstance(matmul.batch, int) and matmul.batch == 1 else "batched: one weight matrix a batch entry"


def _rows(matmul: Matmul, recipe: Recipe) -> str | None:
    if any(isinstance(size, torch.SymInt) and free_unbacked_symbols(size) for size in (matmul.m, matmul.n, matmul.k)):
        return "rows that are counted from data"
    return "no rows" if any(isinstance(size, int) and size == 0 for size in (matmul.m, matmul.n, matmul.k)) else None


def _features(matmul: Matmul) -> tuple:
    """The two sizes of the weight."""
    operand = matmul.weight_operand
    return operand.shape if operand is not None else (matmul.m, matmul.n)


def _width(matmul: Matmul, recipe: Recipe) -> str | None:
    sizes = _features(matmul)
    small = [size for size in sizes if isinstance(size, int) and size < SMALLEST]
    return f"under {SMALLEST} wide: {' x '.join(map(str, sizes))}" if small else None


def _alignment(matmul: Matmul, recipe: Recipe) -> str | None:
    sizes = _features(matmul)
    if any(not isinstance(size, int) or size % 16 for size in sizes):
        return f"not a multiple of 16: {' x '.join(map(str, sizes))}"
    if not isinstance(matmul.n, int) or matmul.n % 16:
        return f"not a multiple of 16: {matmul.n} columns of output"
    # rows that are contracted are padded, on both sides; anything else has to fit as it is
    if not (matmul.a.transposed and not matmul.b.transposed) and (not isinstance(matmul.k, int) or matmul.k % 16):
        return f"not a multiple of 16: contracts over {matmul.k}"
    return None


def _head(matmul: Matmul, recipe: Recipe) -> str | None:
    if matmul.fqn.rsplit(".", 1)[-1].lower() in HEADS:
        return "output head: by its name"
    if matmul.parameter is not None and any(call_function(user, EMBEDDINGS) for user in _readers(matmul.parameter)):
        return "output head: the weight is tied to an embedding"
    if any(call_function(node, LOSSES) or _softmax(node) == "log" for node in _downstream(_fprop(matmul).node)):
        return "output head: its output is the loss's logits"
    return None


def _router(matmul: Matmul, recipe: Recipe) -> str | None:
    if matmul.fqn.rsplit(".", 1)[-1].lower() in ROUTERS:
        return "router gate: by its name"
    if any(call_function(node, CHOICES) or _softmax(node) == "plain" for node in _downstream(_fprop(matmul).node)):
        return "router gate: its output goes into a softmax or topk"
    return None


def _fprop(matmul: Matmul) -> Matmul:
    return matmul.fprop or matmul


def _readers(node: Node) -> Iterator[Node]:
    """The users of a tensor, through casts and aliases."""
    for user in node.users:
        yield user
        if call_function(user, (*CASTS, *SAME)):
            yield from _readers(user)


def _downstream(node: Node) -> Iterator[Node]:
    """The nodes that the output of a matmul reaches with its tokens and features intact, in forward."""
    seen, stack, rows = {node}, [node], value(node).numel()
    while stack:
        for user in stack.pop().users:
            if user in seen or user.op != "call_function" or user.meta.get("partitioner_tag") == "is_backward":
                continue
            seen.add(user)
            yield user
            kept = isinstance(user.meta.get("val"), torch.Tensor) and not call_function(user, (aten.mm.default,))
            if (
                kept
                and call_function(user, BETWEEN)
                and _no_mix(user)
                and (same_size(value(user).numel(), rows) or _is_slice(user))
            ):
                stack.append(user)


def _softmax(node: Node) -> str | None:
    """Is this the first node of a decomposed softmax ("plain") or log-softmax ("log")?

    m = amax(x, -1, keepdim); e = exp(x - m); s = sum(e)      then e / s, or log(s)
    """
    if not call_function(node, (aten.amax.default,)):
        return None
    shifted = [user for user in arg(node, 0).users if call_function(user, (aten.sub.Tensor,)) and arg(user, 1) is node]
    exponentials = [user for x in shifted for user in x.users if call_function(user, (aten.exp.default,))]
    sums = [user for x in exponentials for user in x.users if call_function(user, (aten.sum.dim_IntList,))]
    after = [user for x in sums for user in x.users]
    if any(call_function(user, (aten.log.default,)) for user in after):
        return "log"
    return "plain" if any(call_function(user, (aten.div.Tensor,)) for user in after) else None


def _is_slice(node: Node) -> bool:
    return call_function(node, (aten.slice.Tensor, aten.constant_pad_nd.default, aten.select.int))


def _no_mix(node: Node) -> bool:
    """A sum or product is passed through only if its other side is small (a bias, a temperature), not another activation."""
    if not call_function(node, (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor)):
        return True
    sides = [value(x).dim() for x in node.args[:2] if isinstance(x, Node) and isinstance(x.meta.get("val"), torch.Tensor)]
    return len(sides) == 1 or min(sides) <= 1
