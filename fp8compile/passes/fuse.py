"""fuse: put the operators that one walk over a matrix can compute with its FP8 casts into a generated kernel.

    h = silu(g) * u; a = amax(h)
    h8 = quantize(h, scale); h8t = ..  ->  h8, h8t, a = fp8_silu_mul_cast_transpose_amax(g, u, scale)

A group starts from the casts and amaxes of one matrix, together with the scales that one walk over the matrix
can compute: scales of rows, and of blocks that a tile holds. `grouping` extends it from there. A cast whose
scale waits for an amax of the whole matrix, or of its columns, needs another walk and so another group. Casts
of other matrices join a group if they read the same tensors. A group becomes a kernel unless the kernel would
move more bytes than Inductor's own kernels (`codegen.traffic`).

Runs on a partitioned graph, after Inductor's own passes. What is not fused stays in the graph for `lower`;
the debug log says why.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from .. import compat
from ..codegen import blocks, launch
from ..codegen.group import Group, Output
from ..codegen.indexing import Domain, sizes
from ..codegen.kernel import Kernel, write
from ..codegen.scales import Scale, chain, made_in_place, of_amax, of_cast
from ..codegen.text import Unwritable
from ..codegen.traffic import Sizes, compare
from ..ir import grouped, merged, ops
from ..ir.fx_utils import PERMUTES, VIEWS, arg, behind, is_data, reached, value
from ..ir.schemas import copies_at
from ..logs import get_logger
from .grouping import OURS, SEEDS, Grouping, Ranks
from .place import generated, place

logger = get_logger(__name__)

WINDOW = 12  # how many seeds ahead to look for casts that can join a group


@dataclass(eq=False)
class Seed:
    """Casts and amaxes of one matrix that one walk can compute together."""

    nodes: list[Node] = field(default_factory=list)

    @property
    def source(self) -> Node:
        return arg(self.nodes[0], 0)

    @property
    def domain(self) -> Domain:
        rows, columns = sizes(self.source)
        return Domain(rows, columns, grouped.order_of(self.nodes[0]))

    @property
    def sinks(self) -> list[Output]:
        casts = [node for node in self.nodes if not _is_amax(node)]
        found: list[Output] = []
        for node in self.nodes:
            found += _of_amax(node, casts) if _is_amax(node) else [_of_cast(node)]
        return found


def fuse(graph: Graph) -> int:
    """Fuse in place; returns how many kernels were generated."""
    if compat.triton.reorders():
        return 0
    made = _Finder(graph).run()
    if made:
        compat.triton.stable_sort(graph)
        place(graph, made)
    return len(made)


class _Finder:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.stored: set[Node] = set()
        self.sizes, self.ranks = Sizes(graph), Ranks(graph)
        self.grouping = Grouping(self.sizes, self.stored, self.ranks)
        self.walks: dict[Seed, tuple[set[Node], set[Node]]] = {}  # of `shares`: what it visits, what it reads

    def run(self) -> dict[Node, Kernel]:
        """The functional node of each group, with its kernel. Users take its outputs by number."""
        seeds = self.seeds()
        if len({value(seed.source).device for seed in seeds}) > 1:  # a graph has one vector of amaxes
            return {}
        done: dict[Node, Kernel] = {}
        taken: set[Seed] = set()
        for i, seed in enumerate(seeds):
            if seed in taken:
                continue
            source, others = seed.source, [x for x in seeds[i + 1 : i + 1 + WINDOW] if x not in taken]
            try:
                kernels, served = self.served(seed, others)
            except Unwritable as error:
                logger.debug("%s stays with Inductor: %s", source.name, error)
                continue
            taken.update(served)
            done.update(kernels)
        return done

    def served(self, seed: Seed, others: list[Seed]) -> tuple[dict[Node, Kernel], list[Seed]]:
        """The kernels that serve a seed, and all seeds that they serve. Raises Unwritable if none can."""
        source = seed.source
        # if sizes are data: Inductor keeps no strides of such copies (`GraphLowering.run_node`)
        needed = is_data(value(source).shape[0])
        try:
            alone = self.grouping(seed.domain, seed.sinks)
        except Unwritable:
            if not needed:
                raise
            self.stored.add(source)
            self.changed({source})
            alone = self.grouping(seed.domain, seed.sinks)
        group, joined = self.joined(alone, seed, others)
        ours, theirs = compare(group, self.sizes, self.stored, OURS)
        if ours > theirs and joined:
            group, joined = alone, []
            ours, theirs = compare(group, self.sizes, self.stored, OURS)
        if ours > theirs and not needed:
            raise Unwritable(f"a kernel would move {ours} bytes, not {theirs}")
        kernels = self.kernels(group, [seed, *joined])
        for node, kernel in kernels.items():
            moved, reads = f"{ours} bytes, {theirs} by Inductor", [x.name for x in node.all_input_nodes]
            logger.debug("%s: %s, %s; reads %s", source.name, kernel.name, moved, reads)
        return kernels, [seed, *joined]

    def kernels(self, group: Group, seeds: list[Seed]) -> dict[Node, Kernel]:
        """Write the kernel of a group, and put its functional node into the graph.

        A group becomes two kernels where a program would take 128 whole rows, because blocks are that tall
        (`blocks.apart`): so few programs do not fill a GPU, and its caches do not hold so many rows. The
        first kernel then writes the tensors that are cast, if other nodes read them anyway, or else the sums
        over rows.

        Raises Unwritable, with the graph as it was."""
        kernel = _written(group)  # before the replacement, which takes members out of the graph
        if not blocks.apart(group):
            return self.replaced(kernel)
        if any(node.target is ops.amax_blocks for node in group.levels):
            raise Unwritable("scales of rows beside scales of 128 rows")
        sources = {behind(seed.source, VIEWS) for seed in seeds}
        written = [x for x in group.with_content("value") if x.node in sources]
        rows = [Output("row", node, node) for node in group.levels]
        whole = len(written) == len(sources)
        first = self.grouping(group.domain, written if whole else rows, sums=whole)
        needed = _nearest(sources, {x.node for x in first.outputs}, group.members)
        inside = first.members.keys()
        first.outputs = [x for x in first.outputs if x.node in needed or set(x.replaces.users) - inside]
        kernels = self.replaced(_written(first))
        try:
            second = self.grouping(group.domain, [sink for seed in seeds for sink in seed.sinks])
            if blocks.apart(second):
                raise Unwritable("they need whole rows once more")
        except Unwritable as error:  # the outputs of the first kernel are additional inputs of the second
            logger.debug("%s: its casts stay with Inductor: %s", seeds[0].source.name, error)
            return kernels
        return kernels | self.replaced(_written(second))

    def joined(self, group: Group, seed: Seed, others: list[Seed]) -> tuple[Group, list[Seed]]:
        """The group extended by other seeds that the same walk can serve, and these seeds. They read the
        tensors that the group reads, and few others."""
        sinks, joined = seed.sinks, []
        for other in others:
            if other.domain != seed.domain or not self.shares(group, other):
                continue
            try:
                larger = self.grouping(seed.domain, [*sinks, *other.sinks])
            except Unwritable:
                continue
            if _tensors(larger) <= max(_tensors(group) + 1, 3):
                group, sinks = larger, [*sinks, *other.sinks]
                joined.append(other)
        return group, joined

    def shares(self, group: Group, seed: Seed) -> bool:
        """True if a seed reads or computes a matrix that the group reads or computes."""
        if seed not in self.walks:  # seeds before it ask, too
            walk = self.grouping.walk(seed.domain, [Output("value", seed.source, seed.source)])
            read = {x for x in (*walk.inputs, *walk.members) if seed.domain.is_full(x)}
            self.walks[seed] = {node for node, _ in walk.seen}, read
        theirs = self.walks[seed][1]
        return any(x in theirs for x in (*group.inputs, *group.members))

    def changed(self, nodes: Collection[Node]) -> None:
        """Forget the walks that visited a node which now stands in memory, or left the graph."""
        self.walks = {seed: walk for seed, walk in self.walks.items() if walk[0].isdisjoint(nodes)}

    # -- seeds --

    def seeds(self) -> list[Seed]:
        found: dict[tuple[Node, Node | None, bool], Seed] = {}
        for node in self.graph.nodes:
            if node.op != "call_function" or node.target not in SEEDS:
                continue
            source = arg(node, 0)
            if value(source).dim() != 2 or value(source).device.type not in launch.DEVICES:
                continue
            if _scale(node).granularity == "none":
                continue
            for late in (False, True):
                seed = found.setdefault((source, grouped.order_of(node), late), Seed())
                if late or not self.ranks.reach(_waits_for(node), set(seed.nodes)):
                    seed.nodes.append(node)
                    break
        return [seed for seed in found.values() if seed.nodes and seed.sinks]

    # -- in the graph --

    def replaced(self, kernel: Kernel) -> dict[Node, Kernel]:
        """Put a functional node for a group into the graph, which may be out of order until it is sorted."""
        group = kernel.group
        anchor = group.outputs[0].replaces
        with self.graph.inserting_before(anchor):
            order = [x for x in (group.domain.order, group.groups) if x is not None]
            node = self.graph.call_function(generated, (*group.inputs, *kernel.scales, *order))
        node.meta.update(val=None)
        for i, output in enumerate(group.outputs):
            with self.graph.inserting_after(node):
                item = self.graph.call_function(operator.getitem, (node, i))
            item.meta.update({k: v for k, v in output.replaces.meta.items() if k != "eager_input_vals"})
            # other kernels compute the scale anew, and do not wait for this one
            if output.content == "number":
                output.replaces.replace_all_uses_with(
                    item, lambda user: user.target not in (ops.quantize, ops.inverse)
                )
            else:
                output.replaces.replace_all_uses_with(item)
            self.stored.add(item)
        self.ranks.add(node)
        for item in node.users:
            self.ranks.add(item)
        self.changed({output.replaces for output in group.outputs})
        self.sweep([output.replaces for output in group.outputs])
        return {node: kernel}

    def sweep(self, dead: list[Node]) -> None:
        """Erase `dead` and then their inputs, as far as no node reads them any more."""
        while dead:
            node = dead.pop()
            unread = not node.users and not node._erased and node not in self.stored
            if unread and node.op == "call_function" and not node.is_impure():
                dead += node.all_input_nodes
                self.graph.erase_node(node)


def _tensors(group: Group) -> int:
    """How many inputs a group has; FP8 values and their scales count as one."""

    def scales(x: Node) -> bool:
        return all(user.target is ops.dequantize and arg(user, 1) is x for user in x.users)

    return sum(not x.users or not scales(x) for x in group.inputs)


def _written(group: Group) -> Kernel:
    """The kernel of a group. It also writes the scales that its programs compute, and their inverses, if
    others read them. `lower` does that if the matrix may be empty, because then no program may run."""
    if all(size.is_Integer and size > 0 for size in (group.domain.walked, group.domain.columns)):
        for scale in [x.node for x in group.scales.values() if x.computed]:
            for node in (scale, *(user for user in scale.users if user.target is ops.inverse)):
                if any(user.target not in (ops.quantize, ops.inverse) for user in node.users):
                    group.outputs.append(Output("number", node, node))
    return write(group)


def _nearest(sources: Iterable[Node], written: set[Node], members: Collection[Node]) -> set[Node]:
    """The written values that the sources are computed from, with no other written value in between."""

    def inputs(node: Node) -> list[Node]:
        return [x for x in node.all_input_nodes if x in members] if node not in written else []

    return written.intersection(reached(sources, inputs))


def _is_amax(node: Node) -> bool:
    return node.target in (ops.amax, ops.amax_blocks, grouped.group_amax)


def _scale(node: Node) -> Scale:
    """The scale of a cast; for an amax, the elements that it covers, in the same form."""
    if node.target is grouped.group_amax:
        return Scale(node, grouped.ALIGN, 1, groups=arg(node, 3))
    if _is_amax(node):
        return Scale(node) if node.target is ops.amax else of_amax(node)
    (copy,) = copies_at(node)
    return of_cast(copy.scale, copy.transposed, copy.block)


def _waits_for(node: Node) -> list[Node]:
    """The scale of a cast, if it must be in memory before a walk because the walk cannot compute it."""
    return [] if _is_amax(node) or made_in_place(_scale(node), arg(node, 0)) else [_scale(node).node]


def _of_cast(node: Node) -> Output:
    """The output that replaces a cast."""
    (copy,) = copies_at(node)
    beside = any(user.target is merged.side_by_side and arg(user, 1) == 1 for user in node.users)
    content = "transposed" if copy.transposed else "copy"
    how = (copy.dtype, copy.fp8_max, copy.divide)
    return Output(content, copy.source, node, _scale(node), *how, spaced=beside)


def _of_amax(node: Node, casts: list[Node]) -> list[Output]:
    """The outputs that replace an amax. Of a whole matrix or of columns: the amax itself. Of rows or blocks:
    the amax, and the scales and inverses computed from it, if nodes other than `casts` read them."""
    source, granularity, groups = arg(node, 0), _scale(node).granularity, _scale(node).groups
    if groups is not None:
        return [Output("column_amax", source, node, groups=groups)]
    if granularity in ("one", "col"):
        return [Output("amax" if granularity == "one" else "column_amax", source, node)]
    made = chain(node)
    read = [x for x in made if any(_read_outside(user, {*made, *casts}) for user in x.users)]
    if granularity == "row":
        return [Output("row", x, x) for x in read]
    return [Output("blocks", source, x, of_amax(x)) for x in read]


def _read_outside(user: Node, inside: set[Node]) -> bool:
    """True if this user is outside, or, if it is a permuted view of a scale, one of the view's users is."""
    if user.target in PERMUTES and user.users:
        return any(_read_outside(x, inside) for x in user.users)
    return user not in inside
