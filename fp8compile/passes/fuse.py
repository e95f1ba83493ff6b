"""fuse: find what can be computed in one walk over a matrix together with its FP8 casts, and put a generated kernel there.

    h = silu(g) * u                                     y0, y1, amax = fp8_silu_mul_cast_transpose_amax(g, u, scale)
    h8 = quantize(h, scale); h8t = ..(transposed)   ->
    amax = amax(h)

A group starts from the casts and amaxes of one matrix. It takes in what produces the matrix, as far back as it is
pointwise or a sum over rows and not in memory already; other casts over the same tensors; column sums of what it holds;
and writes what others read of it. It becomes a kernel if that moves fewer bytes than Inductor's own kernels would.

Runs on a partitioned graph, behind Inductor's own passes. What is not fused stays as it is, for `lower`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from .. import compat, ops
from ..codegen import launch
from ..codegen.domain import REDUCTIONS, RESHAPES, Domain, kind, product, sizes
from ..codegen.expressions import supported
from ..codegen.group import Group, Output, Walk, bytes_of
from ..codegen.kernel import Kernel, write
from ..graph import CASTS, PERMUTES, Emitter, arg, aten, hint, value
from ..logs import dump, get_logger

logger = get_logger(__name__)

MOST_INPUTS = 12
WINDOW = 12  # how many casts ahead one may be computed together with this one
STRIDED = 1 / 0.58  # how many times longer one-byte stores at a stride take (FACTS: 58% of the bandwidth)
VIEWS = (*RESHAPES, *PERMUTES, aten.expand.default)


@dataclass(eq=False)
class Seed:
    """Casts and amaxes of one matrix that can be taken together."""

    nodes: list[Node] = field(default_factory=list)

    @property
    def source(self) -> Node:
        return arg(self.nodes[0], 0)

    @property
    def domain(self) -> Domain:
        rows, columns = sizes(self.source)
        return Domain(rows, columns)

    @property
    def sinks(self) -> list[Output]:
        return [output for node in self.nodes for output in _sinks(node)]


Made = tuple[Group, Kernel]


def fuse(graph: Graph) -> int:
    """Returns how many kernels were generated. In place."""
    _learn_sizes(graph)
    finder = _Finder(graph)
    groups = finder.run()
    if groups:
        compat.stable_sort(graph)
        _launch_all(graph, groups)
    return len(groups)


class _Finder:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.stored: set[Node] = set()  # results of groups: in memory
        self.stops: set[Node] = set()

    def run(self) -> dict[Node, Made]:
        """The functional node of each group: its users take its outputs by number."""
        seeds = self.seeds()
        done: dict[Node, Made] = {}
        taken: set[Seed] = set()
        for i, seed in enumerate(seeds):
            if seed in taken:
                continue
            group = self.build([seed])
            if group is None:
                continue
            chosen = [seed]
            for other in seeds[i + 1 : i + 1 + WINDOW]:
                if other in taken or other.domain != seed.domain or not self.shares(group, other):
                    continue
                larger = self.build([*chosen, other])
                if larger is not None and len(larger.inputs) <= max(len(group.inputs) + 1, 3):
                    group, chosen = larger, [*chosen, other]
            taken.update(chosen)
            ours, theirs = self.bytes(group)
            if ours > theirs:
                logger.debug("fuse: %s stays with Inductor: %d bytes against %d", seed.source.name, ours, theirs)
                continue
            kernel = write(group)  # now: replacing it takes its members out of the graph
            done[self.replace(group)] = group, kernel
        return done

    # -- what there is --

    def seeds(self) -> list[Seed]:
        found: dict[tuple[Node, bool], Seed] = {}
        for node in self.graph.nodes:
            if node.op != "call_function" or node.target not in (ops.quantize, ops.quantize_both, ops.amax):
                continue
            source = arg(node, 0)
            if value(source).dim() != 2 or value(source).device.type not in launch.DEVICES:
                continue
            for late in (False, True):
                seed = found.setdefault((source, late), Seed())
                # a current scale waits for the amax: its cast is another walk
                if not seed.nodes or not self.reaches([node], set(seed.nodes)):
                    seed.nodes.append(node)
                    break
        return [seed for seed in found.values() if seed.nodes]

    def reaches(self, starts: Iterable[Node], targets: set[Node]) -> bool:
        """Does anything in `starts` depend on anything in `targets`?"""
        seen, stack = set(starts), list(starts)
        while stack:
            node = stack.pop()
            if node in targets:
                return True
            for x in node.all_input_nodes:
                if x not in seen:
                    seen.add(x)
                    stack.append(x)
        return False

    def shares(self, group: Group, seed: Seed) -> bool:
        """Does a seed read what the group reads or makes, and nothing that comes after it?"""
        walk = self.walk(seed.domain, [seed])
        big = {x for x in walk.inputs if group.domain.is_full(x)}
        near = {x for x in group.inputs if group.domain.is_full(x)} | set(group.members)
        return bool(near & (big | set(walk.members)))

    # -- one group --

    def walk(self, domain: Domain, seeds: list[Seed], stops: Iterable[Node] = ()) -> Walk:
        held = {*self.stored, *stops}
        walk = Walk(domain, held.__contains__)
        for seed in seeds:
            index = domain.full(sizes(seed.source))
            assert index is not None
            walk(seed.source, index)
        return walk

    def build(self, seeds: list[Seed]) -> Group | None:
        """The group of some casts, with everything that it has to write; None if it cannot be one kernel."""
        domain = seeds[0].domain
        sinks = [x for seed in seeds for x in seed.sinks]
        stops: set[Node] = set()
        while True:
            walk = self.walk(domain, seeds, stops)
            sums = self.column_sums(domain, walk, {x.replaces for x in sinks})
            outputs = [*sinks, *sums.values()]
            outputs += self.others(domain, walk, {x.replaces for x in outputs} | set(sums))
            scales = [x.scale for x in outputs if x.scale is not None]
            replaced = {x.replaces for x in outputs}
            reads = [x for x in [*walk.inputs, *scales] if x not in replaced]
            if not self.reaches(reads, replaced):
                break
            # what it would write, something that it reads is made of: leave that to others, and read it
            late = {x.replaces for x in outputs if x.kind in ("value", "row", "sum") and self.reaches(reads, {x.replaces})}
            late = {x for x in late if x not in stops}
            if not late:
                return None
            stops |= late
        group = Group(domain, outputs, dict(walk.inputs), dict(walk.members), dict(walk.levels), set(walk.loads))
        fits = len(group.inputs) <= MOST_INPUTS and all(self.readable(x) for x in group.inputs)
        return group if fits else None

    @staticmethod
    def readable(node: Node) -> bool:
        from ..codegen.expressions import TRITON_DTYPE

        tensor = node.meta.get("val")
        return isinstance(tensor, torch.Tensor) and tensor.dtype in TRITON_DTYPE and tensor.device.type in launch.DEVICES

    def others(self, domain: Domain, walk: Walk, sinks: set[Node]) -> list[Output]:
        """Members that someone else reads, and that are cheaper to write than to compute again."""
        found: list[Output] = []
        self.follow_rows(domain, walk, sinks)
        full = {node for node, index in walk.seen if kind(index) == "full" and node in walk.members}
        for node in walk.members:
            if node.target in VIEWS or node in sinks or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            readers = _readers(node, walk.members, sinks)
            if not readers:
                continue
            if node in walk.levels or node not in full:
                if self.of_sums(node, walk) and domain.row_index(node) is not None:
                    found.append(Output("row", node, node))
                continue
            needed = any(x.op == "output" or not _fusable(x) for x in readers)
            if needed or 2 * _number(bytes_of(node)) < self.cost_again(domain, node, walk):
                found.append(Output("value", node, node))
        return found

    def follow_rows(self, domain: Domain, walk: Walk, sinks: set[Node]) -> None:
        """Take in what others compute of one number a row alone (the statistics, rounded for backward): else a tiny kernel."""
        tensors = [node for node in walk.members if isinstance(node.meta.get("val"), torch.Tensor)]
        rows = [node for node in tensors if domain.row_index(node) is not None and self.of_sums(node, walk)]
        while rows:
            node = rows.pop()
            for user in _readers(node, walk.members, sinks):
                index = domain.row_index(user) if isinstance(user.meta.get("val"), torch.Tensor) else None
                operands = domain.operands(user, index) if index is not None else None
                if operands is not None and all(x[0] in walk.members for x in operands if isinstance(x, tuple)):
                    walk(user, index)  # type: ignore[arg-type]
                    rows.append(user)

    @staticmethod
    def of_sums(node: Node, walk: Walk) -> bool:
        """Is it made of a sum over rows that the group takes?"""
        stack, seen = [node], set()
        while stack:
            x = stack.pop()
            if x in walk.levels:
                return True
            if x in walk.members and x not in seen:
                seen.add(x)
                stack += x.all_input_nodes
        return False

    def cost_again(self, domain: Domain, node: Node, walk: Walk) -> int:
        """Bytes to read for computing a member once more."""
        if self.of_sums(node, walk):
            return 1 << 62
        index = domain.full(sizes(node))
        assert index is not None
        again = Walk(domain, walk.stop)
        again(node, index)
        return sum(_number(bytes_of(x)) for x in again.inputs)

    def column_sums(self, domain: Domain, walk: Walk, replaced: set[Node]) -> dict[Node, Output]:
        """Sums over all rows of what the group holds in its registers anyway."""
        found: dict[Node, Output] = {}
        big = {x for x in walk.inputs if domain.is_full(x)}
        candidates: dict[Node, None] = {}
        stack = [*walk.members, *walk.inputs]
        for _ in range(4):  # a few operators away: x * dy, a view
            following = []
            for node in stack:
                for user in node.users:
                    if user.op != "call_function" or user in candidates:
                        continue
                    if user.target in (aten.sum.dim_IntList,):
                        candidates[user] = None
                    elif user not in walk.members and (user.target in VIEWS or supported(user)) and domain.is_full(user):
                        following.append(user)
            stack = following
        for node in candidates:
            reduced = domain.reduction(node)
            if reduced is None or reduced[1] or node in replaced or not same_columns(node, domain):
                continue
            source = reduced[0]
            index = domain.full(sizes(source))
            probe = Walk(domain, walk.stop)
            probe(source, index)  # type: ignore[arg-type]
            if {x for x in probe.inputs if domain.is_full(x)} <= big and all(self.readable(x) for x in probe.inputs):
                walk(source, index)  # type: ignore[arg-type]
                found[node] = Output("sum", source, _rounded(node))
        return found

    def bytes(self, group: Group) -> tuple[int, int]:
        """Bytes that move: in the group's kernel, and in Inductor's kernels for the same."""
        reads = sum(_number(bytes_of(x)) for x in group.inputs)
        ours = theirs = reads
        for x in group.inputs:  # it would have been computed where it is read
            readers = set(x.users)
            if x.op == "call_function" and x not in self.stored and _fusable(x) and readers <= set(group.members):
                ours += _number(bytes_of(x))
        for output in group.outputs:
            size = _number(product(sizes(output.node)))
            if output.kind in ("copy", "transposed"):
                ours += size
                theirs += int(size * (STRIDED if output.kind == "transposed" else 1))
            elif output.kind in ("value", "row"):
                ours += _number(bytes_of(output.node))
                theirs += _number(bytes_of(output.node))
            elif output.kind == "amax":
                theirs += 8 * _number(group.domain.rows)
            else:
                ours += _number(group.domain.rows * group.domain.columns * 8) // 64
                theirs += reads
        return ours, theirs

    def replace(self, group: Group) -> Node:
        """Put a functional node for a group into the graph; the graph may be out of order until it is sorted."""
        scales = [x for x in group.scales]
        anchor = next(iter(group.outputs)).replaces
        with self.graph.inserting_before(anchor):
            node = self.graph.call_function(generated, (*group.inputs, *scales))
        node.meta.update(val=None)
        for i, output in enumerate(group.outputs):
            with self.graph.inserting_after(node):
                item = self.graph.call_function(operator.getitem, (node, i))
            item.meta.update({k: v for k, v in output.replaces.meta.items() if k != "eager_input_vals"})
            output.replaces.replace_all_uses_with(item)
            self.stored.add(item)
        self.sweep([output.replaces for output in group.outputs])
        return node

    def sweep(self, dead: list[Node]) -> None:
        """Erase what nobody reads any more."""
        while dead:
            node = dead.pop()
            if not node.users and not node._erased and node.op == "call_function" and node not in self.stored:
                dead += node.all_input_nodes
                self.graph.erase_node(node)


def generated(*_: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Stands for a group in a graph until its launch is written."""
    raise NotImplementedError


def _sinks(node: Node) -> list[Output]:
    """The outputs that stand for a cast or an amax."""
    source = arg(node, 0)
    if node.target is ops.amax:
        return [Output("amax", source, node)]
    scale, dtype, fp8_max = (arg(node, i) for i in (1, 2, 3))
    if node.target is ops.quantize:
        return [Output("transposed" if arg(node, 4) else "copy", source, node, scale, dtype, fp8_max)]
    return [
        Output("transposed" if arg(item, 1) else "copy", source, item, scale, dtype, fp8_max) for item in list(node.users)
    ]


def _readers(node: Node, members: dict[Node, None], sinks: set[Node]) -> list[Node]:
    """Who reads a member outside of its group, seen through views."""
    found = []
    for user in node.users:
        if user in sinks or user.target in (ops.quantize_both,) and set(user.users) <= sinks:
            continue
        if user.target in VIEWS:
            found += _readers(user, members, sinks)
        elif user not in members:
            found.append(user)
    return found


def _fusable(node: Node) -> bool:
    """Would Inductor compute this in a kernel with its neighbours?"""
    if node.op != "call_function":
        return False
    ours = (ops.quantize, ops.quantize_both, ops.amax)
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return pointwise or node.target in (*VIEWS, *REDUCTIONS, *_MOVES, *ours) or supported(node)


_MOVES = (aten.cat.default, aten.slice.Tensor, aten.select.int, aten.constant_pad_nd.default, aten.amax.default)


def _rounded(total: Node) -> Node:
    """A sum as it is read: behind the views and the cast that are all that reads it."""
    node = total
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.target not in (*RESHAPES, *CASTS) or (user.target in CASTS and node.target in CASTS):
            break
        node = user
    return node


def same_columns(node: Node, domain: Domain) -> bool:
    """Has it one element a column?"""
    return product(sizes(node)) == domain.columns


def _number(expr: sympy.Expr) -> int:
    """Bytes for the sizes that the graph was traced with."""
    return int(expr.subs({s: _HINTS.get(s, 4096) for s in expr.free_symbols})) if expr.free_symbols else int(expr)


_HINTS: dict[sympy.Symbol, int] = {}


def _learn_sizes(graph: Graph) -> None:
    """Note what the symbols of a graph were when it was traced."""
    for node in graph.find_nodes(op="placeholder"):
        tensor = node.meta.get("val")
        for size in tensor.shape if isinstance(tensor, torch.Tensor) else [tensor]:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and hint(size):
                _HINTS[size.node.expr] = hint(size)


def _launch_all(graph: Graph, groups: dict[Node, Made]) -> None:
    """Replace the functional nodes by launches, and what reads them by what is written."""
    order = [node for node in graph.nodes if node in groups]
    numbers: dict[Node, int] = {}
    gathers = graph.find_nodes(op="call_function", target=ops.gather)
    amaxes = [item for node in order for item in _items(node, groups[node][0]) if item[1].kind == "amax"]
    known = {item for item, _ in amaxes}
    for item in [x for gather in gathers for x in arg(gather, 0) if x in known] + [item for item, _ in amaxes]:
        numbers.setdefault(item, len(numbers))
    launcher = launch.Launcher(graph, len(numbers), order[0].args[0])  # type: ignore[arg-type]
    for gather in gathers:
        gather.args = (_runs(gather, numbers, launcher),)
    for node in order:
        _launch(node, *groups[node], numbers, launcher)


def _items(node: Node, group: Group) -> list[tuple[Node, Output]]:
    return [(item, group.outputs[int(arg(item, 1))]) for item in sorted(node.users, key=lambda x: arg(x, 1))]


def _runs(gather: Node, numbers: dict[Node, int], launcher: launch.Launcher) -> list[Node]:
    """The vectors to gather: amaxes that are neighbours in the graph's vector are one."""
    vectors: list[Node] = []
    run: list[int] = []
    for item in [*arg(gather, 0), None]:
        number = numbers.get(item, -1)
        if run and number != run[-1] + 1:
            vectors.append(launcher.amaxes(gather, run[0], len(run)))
            run = []
        if number >= 0:
            run.append(number)
        elif item is not None:
            vectors.append(item)
    return vectors


def _launch(node: Node, group: Group, kernel: Kernel, numbers: dict[Node, int], launcher: launch.Launcher) -> None:
    dump(f"{kernel.name}.py", lambda: kernel.source)
    items = _items(node, group)
    inputs: dict[str, object] = {f"x{i}": x for i, x in enumerate(node.args[: len(kernel.inputs)])}
    inputs.update({f"s{i}": x for i, x in enumerate(node.args[len(kernel.inputs) :])})
    by_output = {id(output): item for item, output in items}
    slots = [numbers[by_output[id(output)]] for output in kernel.amaxes]
    outputs, amaxes = launcher(node, kernel, group.domain.rows, group.domain.columns, inputs, slots)
    written = dict(zip(map(id, [*kernel.outputs, *kernel.amaxes]), [*outputs[: len(kernel.outputs)], *amaxes], strict=True))
    columns = launcher.totals(node, kernel, outputs)
    for item, output in items:
        result = _column_sum(item, *columns[id(output)]) if output.kind == "sum" else written[id(output)]
        item.replace_all_uses_with(result)
        node.graph.erase_node(item)
    node.graph.erase_node(node)


def _column_sum(item: Node, totals: Node, first: Any, size: Any) -> Node:
    """One of the column sums of a kernel, as the graph has it."""
    emit = Emitter(item.graph, item, item)
    total = emit(aten.slice.Tensor, totals, 0, first, size)
    if value(item).dtype != value(total).dtype:
        total = emit(torch.ops.prims.convert_element_type.default, total, value(item).dtype)
    return emit(aten.view.default, total, list(value(item).shape)) if value(item).dim() != 1 else total
