"""specification: which of our operators may stand in a graph after each pass, and what is true of each.

The pipeline checks a graph where it lints one: after the last pass, and while debugging after each. Sizes are
compared by their hints, so that no check adds a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch.fx import Graph, Node

from ..compat.inductor import MUST_SAVE
from ..devices.formats import FORMATS
from ..errors import Fp8CompileError
from ..ir import grouped, merged, ops
from ..ir.fx_utils import FLOATS, VIEWS, aten, hint, value
from ..ir.schemas import copies_at, product_of
from . import lower


class Stage(NamedTuple):
    """The operators that a graph may have, and those that it may have on a CPU. In a joint graph, nodes have
    tags for the partitioner."""

    anywhere: frozenset
    on_a_cpu: frozenset = frozenset()
    joint: bool = False


ARRIVED = frozenset({ops.dequantize})  # a weight that is an input in FP8
CANONICAL = ARRIVED | {ops.amax, ops.amax_blocks, ops.quantize, ops.scaled_mm, ops.block_mm, *grouped.ALL}
CANONICAL |= {ops.current_scale, ops.served_inverse, ops.inverse}
CARRIED = CANONICAL | {ops.transposed}
BOTH = frozenset({ops.quantize_both, merged.both_sides})
KEPT = CARRIED | BOTH | {merged.largest, merged.least, merged.side_by_side}
EVERY = KEPT | {ops.gather, ops.raised}
STAGES = {  # by the pass that begins it; "joint", "partitioned" and so on: before the first pass
    "joint": Stage(ARRIVED, joint=True),
    "quantize": Stage(CANONICAL, joint=True),
    "substitute": Stage(CARRIED, joint=True),
    "layouts": Stage(KEPT, joint=True),
    "reduce_current": Stage(EVERY, joint=True),
    **dict.fromkeys(("partitioned", "early_post_grad", "post_grad", "lower_scales"), Stage(EVERY)),
    "split_casts": Stage(EVERY - BOTH, BOTH),
    "lower": Stage(frozenset(), frozenset(lower.CALLED)),
}
# scales, and what the partitioner may be told of each
SCALES = dict.fromkeys((ops.current_scale, ops.served_inverse, ops.inverse), (MUST_SAVE,))
Rules = Iterable[tuple[str, bool]]


def admit(rules: Mapping[Any, Callable[..., Rules]], since: str, until: str) -> None:
    """Operators of a feature, each with its rules: from the stage `since` to the one before `until`."""
    RULES.update(rules)
    names = list(STAGES)
    for name in names[names.index(since) : names.index(until)]:
        STAGES[name] = STAGES[name]._replace(anywhere=STAGES[name].anywhere | rules.keys())


def check(graph: Graph, stage: str, after: str) -> None:
    """Fp8CompileError for a node that the stage does not allow, or that breaks a rule. `after`: the pass."""
    allowed = STAGES[stage]
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in ops.OPERATORS:
            continue
        fits = node.target in allowed.anywhere or node.target in allowed.on_a_cpu and lower.stays(node)
        known = all("val" in x.meta for x in (node, *node.all_input_nodes))  # not of Inductor's own nodes
        rules = chain(
            [(f"a graph of stage {stage!r} has no {node.target}", fits)],
            RULES[node.target](node, *node.args) if known else (),
            _tags(node) if allowed.joint else (),
        )
        broken = next((says for says, holds in rules if not holds), None)
        if broken is not None:
            tensors = ", ".join(f"{x.name} = {x.meta.get('val')}" for x in (*node.all_input_nodes, node))
            found = f"{node.format_node()}, with {tensors}, read by {[x.name for x in node.users]}"
            raise Fp8CompileError(f"a fault of pass {after!r}: {broken}. Found {found}. Please report this")


# -- rules: of a node y, given its arguments --

FP8, WIDE, INT = [form.dtype for form in FORMATS.values()], [torch.float32], [torch.int32]
ONE, MATRIX = (1,), (None, None)


def typed(dtypes: Sequence[torch.dtype], *given: Any, sizes: Sequence[Any] | None = None) -> bool:
    """True if these tensors are of one of these dtypes and, if given, of these sizes (None: any)."""
    tensors = [value(x) if isinstance(x, Node) else x for x in given]
    pairs = [pair for x in tensors for pair in zip(x.shape, sizes or (), strict=False)]
    ranks = all(x.dtype in dtypes and (sizes is None or len(sizes) == x.dim()) for x in tensors)
    return ranks and all(size is None or hint(n) == hint(size) for n, size in pairs)


def _dense(x: torch.Tensor) -> bool:
    """True if the elements of a row lie side by side."""
    return hint(x.shape[-1]) <= 1 or hint(x.stride(-1)) == 1


def _each(x: Node, block: Sequence[int], sizes: Sequence[Any]) -> bool:
    """One float32 for a copy of these sizes, or one a block of it, or of each matrix of a stack."""
    *stack, rows, columns = sizes
    return typed(WIDE, x, sizes=ONE) or typed(
        WIDE, x, sizes=[*stack, *map(ops.blocks, (rows, columns), block)]
    )


def _casts(y: Node, *_: Any) -> Rules:
    for x in copies_at(y):
        yield "a float matrix is cast", typed(FLOATS, x.source, sizes=MATRIX)
        made, order = x.of(value(y)), None if x.rows is None else value(x.rows)
        sizes = ops._shape(value(x.source), x.transposed, order)
        yield "a cast has one float32 scale, or one a block", _each(x.scale, x.block, sizes)
        yield "a cast saturates to an FP8 format", x.dtype in FP8 and x.fp8_max <= torch.finfo(x.dtype).max
        yield "a copy is [R, C], or [C, R padded]", typed([x.dtype], made, sizes=sizes) and _dense(made)


def _product(y: Node, *_: Any) -> Rules:
    x = product_of(y)
    a, b = value(x.a), value(x.b)
    yield "operands are FP8", typed(FP8, a, b)
    yield "operands have one K", hint(a.shape[-1]) == hint(b.shape[-1])
    yield "a product is floats of its dtype", x.out_dtype in FLOATS and typed([x.out_dtype], y)
    if y.target is grouped.grouped_mm:
        yield "ends of groups are int32", typed(INT, x.offs, sizes=(None,))
        return
    yield "operands are K-major", _dense(a) and _dense(b)
    yield "a product is [M, N]", typed(FLOATS, y, sizes=(a.shape[0], b.shape[0]))
    yield "a bias is [N]", x.bias is None or typed(FLOATS, x.bias, sizes=(b.shape[0],))
    each = _each(x.a_inv, x.a_block, a.shape) and _each(x.b_inv, x.b_block, b.shape)
    yield "inverses are float32, one in all or one a block", each


def _raised(y: Node, amaxes: Node, found: Sequence[Node], rows: Sequence[int]) -> Rules:
    page = amaxes.op == "placeholder" and typed(INT, amaxes, y, sizes=(None, ops.APART))
    yield "amaxes are raised in the input for them", page and typed(WIDE, *found, sizes=(None,))
    yield "each amax has its row, in order", len(found) == len(rows) and [*rows] == sorted({*rows})
    writes = [(x.target, *x.args) for x in y.users]
    yield "a copy onto the input reads what is raised", writes == [(aten.copy_.default, amaxes, y)]
    # forward hands them on, and a launch raises a view
    readers = ("output", ops.raised, aten.copy_.default, *VIEWS)
    yield "nothing reads amaxes", all(x.target in readers and amaxes not in x.args[1:] for x in amaxes.users)


def _tags(y: Node) -> Rules:
    """In a joint graph."""
    if y.target in SCALES:
        yield "backward reads the scales of forward", y.meta.get("recompute") in SCALES[y.target]
    tags = {x.meta.get("partitioner_tag") for x in y.users if y.target is ops.raised}
    yield "each half raises its own amaxes", tags <= {"must_be_in_forward", "must_be_in_backward"}


def rule(says: str, holds: Callable[..., bool]) -> Callable[..., Rules]:
    return lambda *given: [(says, holds(*given))]


def _formats(y: Node) -> set[torch.dtype]:
    """Of a node and its inputs."""
    return {x.dtype for x in pytree.tree_leaves([*map(value, (y, *y.all_input_nodes))])}


def _turned(y: Node, x: Node) -> bool:
    rows, columns = value(x).shape
    return _formats(y) <= {*FP8} and typed(FP8, y, sizes=(columns, ops.padded_rows(rows)))


def _values(y: Node, x: Node, inverse: Node, dtype: Any, block: Sequence[int] = (0, 0)) -> bool:
    return typed(FP8, x) and typed(FLOATS, y) and _each(inverse, block, value(x).shape)


_AMAXES = rule("amaxes are float32, of floats", lambda y, x, *_: typed(WIDE, y) and typed(FLOATS, x))
_COMPUTED = rule("scales are float32, one each", lambda y, x, *_: typed(WIDE, x, y, sizes=value(x).shape))
_JOINED = rule("float32 vectors are joined", lambda y, x: typed(WIDE, y, *x, sizes=(None,)))
_PARTS = rule("parts are of one FP8 format", lambda y, *_: _formats(y) in [{form} for form in FP8])
RULES: dict[Any, Callable[..., Rules]] = {
    **dict.fromkeys((ops.amax, ops.amax_blocks, grouped.group_amax), _AMAXES),
    **dict.fromkeys((ops.current_scale, ops.served_inverse, ops.inverse), _COMPUTED),
    **dict.fromkeys((ops.quantize, ops.quantize_both), _casts),
    **dict.fromkeys((ops.scaled_mm, ops.block_mm, grouped.grouped_mm), _product),
    ops.transposed: rule("a copy in FP8 is turned and padded", _turned),
    ops.dequantize: rule("FP8 becomes floats, with one inverse, or one a block", _values),
    grouped.group_order: rule("ends of groups are int32", lambda y, x, *_: typed(INT, x, *value(y))),
    grouped.of_groups: rule("scales of groups are float32", lambda y, x, *_: typed(WIDE, x, y)),
    **dict.fromkeys((merged.side_by_side, merged.both_sides), _PARTS),
    **dict.fromkeys((merged.largest, merged.least, ops.gather), _JOINED),
    ops.raised: _raised,
}
