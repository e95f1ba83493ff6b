"""Small, total helpers on FX graphs: insert nodes that know their value, and look through views."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import Graph, Node, map_arg
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from .. import compat

aten = torch.ops.aten

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
VIEWS: tuple = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.flatten.using_ints)
VIEWS += (aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
PERMUTES = (aten.permute.default, aten.t.default, aten.transpose.int)
SLICES: tuple = (aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.narrow.default)
SLICES += (aten.select.int, aten.unbind.int, aten.chunk.default)
SAME = (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
ALIKE = (*CASTS, *SAME, *VIEWS, *PERMUTES)  # the same values, in another dtype or layout
# no storage of their own
ALIASES = (*VIEWS, *PERMUTES, *SAME, *SLICES, aten.expand.default, operator.getitem)
STACKS = ("nn_module_stack", "fwd_nn_module_stack")  # metadata: the modules that a node belongs to


def value(node: Node) -> torch.Tensor:
    """The fake tensor that a node stands for."""
    return node.meta["val"]


def become(placeholder: Node, like: torch.Tensor) -> None:
    """Give a graph's input, which nothing reads yet, the dtype, sizes and strides of another fake tensor."""
    placeholder.meta["val"] = like.new_empty_strided(like.shape, like.stride())
    placeholder.meta.pop("tensor_meta", None)


def is_tensor(node: Node) -> bool:
    """Whether a node stands for a tensor: not for a number, a tuple or nothing."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def arg(node: Node, index: int) -> Any:
    """A positional argument, typed as Any: the operator's schema says more about it than fx's types."""
    return node.args[index]


def call_function(node: Any, targets: tuple) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def pointwise(node: Node) -> bool:
    """True if torch calls the operator of this node pointwise. (A cast and a clone it does not.)"""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def modules_of(node: Node) -> dict[str, Any]:
    """The metadata that tell which modules a node belongs to, as far as it has them."""
    return {name: node.meta[name] for name in STACKS if name in node.meta}


def same_size(a, b) -> bool:
    """True if two sizes (int or SymInt) are known to be equal, without adding a guard."""
    a, b = known(a), known(b)
    return a == b if isinstance(a, int) and isinstance(b, int) else str(a) == str(b)


def same_shape(a, b) -> bool:
    return len(a) == len(b) and all(map(same_size, a, b))


def view_sizes(rows, columns) -> list:
    """The sizes to view a tensor as a matrix. One is left to torch: then no symbol has to name it."""
    return [-1, columns] if isinstance(columns, int) and columns else [rows, -1]


def known(size):
    """An int for a symbolic size that can have one value only, by what was asked when the graph was traced:
    FSDP2 and `dynamic=True` make the number of heads a symbol, and the features `heads * (128 // heads)`."""
    if isinstance(size, int) or is_data(size):
        return size
    likely = hint(size)
    return likely if likely and statically_known_true(size == likely) else size


def is_data(size) -> bool:
    """True if a size is known on the device alone, so that nobody can ask for it when a graph is compiled."""
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def hint(size) -> int:
    """An int for a size: itself, or the value that a SymInt had when the graph was traced. For one that is
    data, symbols count as `DATA` (what Inductor takes, too)."""
    if isinstance(size, int):
        return size
    if is_data(size):
        return int(size.node.expr.subs({symbol: DATA for symbol in size.node.expr.free_symbols}))
    found = getattr(size.node, "hint", None)
    return int(found) if isinstance(found, int) else 0


DATA = 8192

fakes: dict[Any, Callable[..., Any]] = {}  # of our operators: returns an empty result of the right shape


class Emitter:
    """Inserts `call_function` nodes before `anchor`, each with its fake value and the metadata of `like`.

    `meta` overrides single entries (None drops one). An operator that refuses its arguments leaves no node.
    """

    KEEP = "stack_trace nn_module_stack fwd_nn_module_stack seq_nr partitioner_tag recompute".split()
    KEEP += ["ac_graph_id", "custom"]

    def __init__(self, graph: Graph, anchor: Node, like: Node, **meta: Any):
        self.graph, self.anchor, self.value = graph, anchor, like.meta.get("val")
        self.meta = {k: like.meta[k] for k in self.KEEP if k in like.meta} | meta
        self.meta = {k: v for k, v in self.meta.items() if v is not None}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        real_args, real_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        is_fake = isinstance(self.value, compat.FakeTensor)
        mode = fake_mode_of(self.value if is_fake else (real_args, real_kwargs, self.value))
        # without the dispatcher where it can be, because a deep model has thousands of these nodes
        with mode:
            result = fakes.get(target, target)(*real_args, **real_kwargs)
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self.meta, val=result)
        return node


def as_matrix(emit: Emitter, base: Node, shape: tuple) -> Node:
    """A tensor in 2-D: a view, or if strides allow none, a copy, which Inductor fuses into the casts."""
    if value(base).dim() == 2 and same_shape(value(base).shape, shape):
        return base
    sizes = view_sizes(*shape)
    # Inductor's patterns of attention end in a view of a bmm, and take its sizes for the heads'
    of_bmm = call_function(base, (aten.bmm.default,))
    try:
        return emit(aten._unsafe_view.default if of_bmm else aten.view.default, base, sizes)
    except (RuntimeError, ValueError):
        dense = emit(aten.clone.default, base, memory_format=torch.contiguous_format)
        return emit(aten.view.default, dense, sizes)


def fake_mode_of(values: Any) -> contextlib.AbstractContextManager:
    """The fake mode of the first fake tensor in a nest of values; a null context if there is none."""
    if isinstance(values, compat.FakeTensor):
        return values.fake_mode
    leaves = pytree.tree_leaves(values)
    return next((x.fake_mode for x in leaves if isinstance(x, compat.FakeTensor)), contextlib.nullcontext())


def evaluated(node: Node) -> Any:
    """What a node's operator makes of the values that its inputs have now."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    with fake_mode_of((args, kwargs)):
        return node.target(*args, **kwargs)  # type: ignore[operator]


def restride(graph: Graph, node: Node) -> None:
    """Let the views of a tensor know its strides. A view that they do not allow gets a copy."""
    for user in list(node.users):
        if not call_function(user, ALIASES):
            continue
        try:
            made = evaluated(user)
        except (RuntimeError, ValueError):
            emit = Emitter(graph, user, user)
            dense = emit(aten.clone.default, node, memory_format=torch.contiguous_format)
            user.replace_input_with(node, dense)
            made = evaluated(user)
        user.meta["val"] = made
        restride(graph, user)


class Ranks:
    """A number for each node of a graph, at least the numbers of its inputs: a search for what a node depends
    on can stop at smaller numbers than those of what it looks for. Otherwise each search would walk to the
    beginning of a deep model."""

    def __init__(self, graph: Graph):
        self.of = {node: i for i, node in enumerate(graph.nodes)}

    def add(self, node: Node) -> None:
        """Take in a new node, which other nodes read already, and which may stand before its inputs."""
        raised = [(node, max((self.of[x] for x in node.all_input_nodes), default=0))]
        while raised:
            node, rank = raised.pop()
            if self.of.get(node, -1) < rank:
                self.of[node] = rank
                raised += [(user, rank) for user in node.users]

    def reach(self, starts: Iterable[Node], targets: set[Node]) -> bool:
        """True if anything in `starts` depends on anything in `targets`."""
        least = min((self.of[x] for x in targets), default=0)
        sources = reached(starts, lambda x: (y for y in x.all_input_nodes if self.of[y] >= least))
        return any(x in targets for x in sources)


@dataclass(frozen=True)
class Matrix:
    """A matmul's operand: `base` reshaped to `shape` (2-D), and then transposed if `transposed`.

    `base` is the tensor before the last views, transpositions and float casts. This tensor is quantized, and
    its copies shared. A stack of matrices [E, R, C] (the weights of experts) has the shape (E * R, C); each
    of them is transposed if `transposed`.
    """

    base: Node
    shape: tuple  # of base as a matrix, before the transposition; ints or SymInts
    transposed: bool
    stack: int = 1  # how many matrices stand below each other

    @property
    def rows(self) -> Any:
        """Rows of one matrix of the stack."""
        return self.shape[0] // self.stack


def peel(operand: Node, more: tuple = (), stack: bool = False) -> Matrix:
    """The `Matrix` that a 2-D operand (or a 3-D one whose batch is 1) was made from; with `stack`, that of a
    3-D operand: a stack of matrices, each as it is or transposed. `more`: further operators that change no
    value, to look through. Always finds one: in the worst case the operand itself."""
    *batch, rows, columns = map(known, value(operand).shape)
    count = batch[0] if stack else 1
    node, flipped = operand, False
    while call_function(node, (*ALIKE, *more)):
        source = arg(node, 0)
        if value(source).device != value(node).device:
            break
        if call_function(node, CASTS) and not {value(node).dtype, value(source).dtype} <= set(FLOATS):
            break
        if call_function(node, PERMUTES):
            swaps = _swaps_each(node) if stack else _swaps(node, (rows, columns))
            if swaps is None:
                break
            if swaps:
                flipped, rows, columns = not flipped, columns, rows
        elif stack and call_function(node, VIEWS):
            shapes = (count, rows, columns), (count * rows, columns)
            if not any(same_shape(value(source).shape, x) for x in shapes):
                break
        node = source
    return Matrix(node, (count * rows, columns), flipped, count)


def reached(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """`starts`, and all nodes that one comes to from there by `following`, each of them once, depth first."""
    seen = dict.fromkeys(starts)
    stack = [*reversed(seen)]
    while stack:
        node = stack.pop()
        yield node
        new = dict.fromkeys(x for x in following(node) if x not in seen)
        seen |= new
        stack += reversed(new)


def readers(node: Node, through: tuple) -> Iterator[Node]:
    """The nodes that read a tensor, directly or after operators `through` which one looks, and these."""
    found = reached([node], lambda x: x.users if x is node or call_function(x, through) else ())
    return itertools.islice(found, 1, None)


def element(emit: Emitter, tensor: Node, number: int) -> Node:
    """[1], a view: an element of a tensor without gaps. (`as_strided` would count from where the storage
    begins, and an input may be a part of one.)"""
    return emit(aten.slice.Tensor, emit(aten.view.default, tensor, [-1]), 0, number, number + 1)


def element_of(node: Node) -> tuple[Node, int] | None:
    """The arguments of `element`, if it made this node."""
    if not call_function(node, (aten.slice.Tensor,)) or len(node.args) < 4:
        return None
    flat, dim, start, end = node.args[:4]
    if not call_function(flat, (aten.view.default,)) or dim != 0 or not isinstance(start, int):
        return None
    return (arg(flat, 0), start) if end == start + 1 else None  # type: ignore[arg-type]


def behind(node: Node, targets: tuple) -> Node:
    """The first node that is none of these operators, from `node` back through first arguments."""
    while call_function(node, targets):
        node = arg(node, 0)
    return node


def root(node: Node) -> Node:
    """The tensor from which views, permutations, casts, expansions and clones made this one."""
    return behind(node, (*ALIKE, aten.expand.default, aten.clone.default))


def _swaps(node: Node, shape: tuple) -> bool | None:
    """For a permutation whose result is read as the matrix `shape`: True if it swaps the rows and columns of
    its source, False if it leaves them as they were, else None. Dimensions of size 1 do not count."""
    order, result = order_of(node), value(node).shape
    turned = order[-2:] == [len(order) - 1, len(order) - 2] and all(map(_is_one, result[:-2]))
    if turned and same_shape(result[-2:], shape):
        return True  # also where one of the two is a single row
    kept = [d for d in order if not _is_one(value(arg(node, 0)).shape[d])]
    ranked = sorted(kept)
    if kept == ranked:
        return False
    # the result's rows are the last dimensions of the source, its columns the first
    split = kept.index(ranked[0])
    if kept != ranked[-split:] + ranked[:-split]:
        return None
    rows = 1
    for d in kept[:split]:
        rows = rows * value(arg(node, 0)).shape[d]
    return True if same_size(rows, shape[0]) else None


def _swaps_each(node: Node) -> bool | None:
    """The same for a stack of matrices: whether it swaps the rows and columns of each."""
    return {(0, 1, 2): False, (0, 2, 1): True}.get(tuple(order_of(node)))  # type: ignore[arg-type]


def order_of(node: Node) -> list[int]:
    """The permutation: dimension i of the result is dimension order[i] of the source."""
    rank = value(node).dim()
    order = list(range(rank))
    if call_function(node, (aten.permute.default,)):
        return [int(d) % rank for d in arg(node, 1)]
    if rank >= 2:
        one, other = -2, -1
        if not call_function(node, (aten.t.default,)):
            one, other = int(arg(node, 1)), int(arg(node, 2))
        order[one], order[other] = order[other], order[one]
    return order


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1
