"""fuse: find what can be computed in one walk over a matrix together with its FP8 casts, and put a generated kernel there.

    h = silu(g) * u                                     y0, y1, amax = fp8_silu_mul_cast_transpose_amax(g, u, scale)
    h8 = quantize(h, scale); h8t = ..(transposed)   ->
    amax = amax(h)

A group starts from the casts and amaxes of one matrix (`grouping`), and with them the scales that a walk over it can compute:
those of its rows and of blocks that a tile holds. Casts whose scales wait for an amax of the whole matrix, or of its columns,
are another walk's. Casts of other matrices join a group if they read the same tensors. It becomes a kernel unless that moves
more bytes than Inductor's own kernels would (`codegen.traffic`).

Runs on a partitioned graph, behind Inductor's own passes. What is not fused stays as it is, for `lower`; the debug log says
why.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from .. import compat
from ..codegen import launch
from ..codegen.group import Group, Output
from ..codegen.indexing import Domain, sizes
from ..codegen.kernel import Kernel, Unwritable, write
from ..codegen.scales import Scale, chain, made_in_place, of_amax, of_cast
from ..codegen.traffic import Sizes, compare
from ..ir import ops
from ..ir.fx_utils import PERMUTES, VIEWS, arg, behind, value
from ..logs import get_logger
from .grouping import OURS, SEEDS, Grouping, reaches
from .place import Made, generated, place

logger = get_logger(__name__)

WINDOW = 12  # how many casts ahead one may be computed together with this one


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
        casts = [node for node in self.nodes if not _is_amax(node)]
        return [output for node in self.nodes for output in (_of_amax(node, casts) if _is_amax(node) else [_of_cast(node)])]


def fuse(graph: Graph) -> int:
    """Returns how many kernels were generated. In place."""
    if compat.reorders():
        return 0
    made = _Finder(graph).run()
    if made:
        compat.stable_sort(graph)
        place(graph, made)
    return len(made)


class _Finder:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.stored: set[Node] = set()
        self.sizes = Sizes(graph)
        self.grouping = Grouping(self.sizes, self.stored)

    def run(self) -> dict[Node, Made]:
        """The functional node of each group: its users take its outputs by number."""
        seeds = self.seeds()
        if len({value(seed.source).device for seed in seeds}) > 1:  # a graph has one vector of amaxes
            return {}
        done: dict[Node, Made] = {}
        taken: set[Seed] = set()
        for i, seed in enumerate(seeds):
            if seed in taken:
                continue
            group = self.grouping(seed.domain, seed.sinks)
            if isinstance(group, str):
                logger.debug("%s stays with Inductor: %s", seed.source.name, group)
                continue
            alone = group
            group, joined = self.joined(group, seed, [x for x in seeds[i + 1 : i + 1 + WINDOW] if x not in taken])
            ours, theirs = compare(group, self.sizes, self.stored, OURS)
            if ours > theirs and joined:
                group, joined = alone, []
                ours, theirs = compare(group, self.sizes, self.stored, OURS)
            if ours > theirs:
                logger.debug("%s stays with Inductor: a kernel would move %d bytes, not %d", seed.source.name, ours, theirs)
                continue
            source = seed.source.name
            try:
                kernels = self.kernels(group, [seed, *joined])
            except Unwritable as error:
                logger.debug("%s stays with Inductor: %s", source, error)
                continue
            taken.update([seed, *joined])
            for node, (_, kernel) in kernels.items():
                logger.debug("%s: %s, %d bytes, %d by Inductor; reads %s", source, kernel.name, ours, theirs, _reads(node))
            done.update(kernels)
        return done

    def kernels(self, group: Group, seeds: list[Seed]) -> dict[Node, Made]:
        """The kernel of a group, and its functional node in the graph. Two of them where a program would take 128 whole rows,
        because blocks are as tall: those are too few programs for a GPU, and more than its caches hold. Then the first writes
        what is cast, if someone else reads that anyway, or else the sums over rows.

        Raises Unwritable, with the graph as it was."""
        kernel = write(group)  # now: replacing it takes its members out of the graph
        if not launch.apart(group):
            return self.replaced(group, kernel)
        if any(node.target is ops.amax_blocks for node in group.levels):
            raise Unwritable("scales of rows beside scales of 128 rows")
        sources = {behind(seed.source, VIEWS) for seed in seeds}
        written = [x for x in group.with_content("value") if x.node in sources]
        rows = [Output("row", node, node) for node in group.levels]
        whole = len(written) == len(sources)
        first = self.grouping(group.domain, written if whole else rows, sums=whole)
        if isinstance(first, str):
            raise Unwritable(first)
        needed = _nearest(sources, {x.node for x in first.outputs}, group.members)
        first.outputs = [x for x in first.outputs if x.node in needed or not set(x.replaces.users) <= first.members.keys()]
        kernels = self.replaced(first, write(first))
        second = self.grouping(group.domain, [sink for seed in seeds for sink in seed.sinks])
        if not isinstance(second, str) and launch.apart(second):
            second = "they need whole rows once more"
        if isinstance(second, str):  # what the first writes are more inputs than there were
            logger.debug("%s: its casts stay with Inductor: %s", seeds[0].source.name, second)
            return kernels
        return kernels | self.replaced(second, write(second))

    def joined(self, group: Group, seed: Seed, others: list[Seed]) -> tuple[Group, list[Seed]]:
        """The group with the other casts that one walk can serve, too, and those: they read what it reads, and little else."""
        sinks, joined = seed.sinks, []
        for other in others:
            if other.domain != seed.domain or not self.shares(group, other):
                continue
            larger = self.grouping(seed.domain, [*sinks, *other.sinks])
            if not isinstance(larger, str) and len(larger.inputs) <= max(len(group.inputs) + 1, 3):
                group, sinks = larger, [*sinks, *other.sinks]
                joined.append(other)
        return group, joined

    def shares(self, group: Group, seed: Seed) -> bool:
        """Does a seed read or make what the group reads or makes?"""
        walk = self.grouping.walk(seed.domain, [Output("value", seed.source, seed.source)])
        theirs = {x for x in (*walk.inputs, *walk.members) if seed.domain.is_full(x)}
        return not theirs.isdisjoint({*group.inputs, *group.members})

    # -- what there is --

    def seeds(self) -> list[Seed]:
        found: dict[tuple[Node, bool], Seed] = {}
        for node in self.graph.nodes:
            if node.op != "call_function" or node.target not in SEEDS:
                continue
            source = arg(node, 0)
            if value(source).dim() != 2 or value(source).device.type not in launch.DEVICES:
                continue
            if _scale(node).granularity == "none":
                continue
            for late in (False, True):
                seed = found.setdefault((source, late), Seed())
                if late or not reaches(_waits_for(node), set(seed.nodes)):
                    seed.nodes.append(node)
                    break
        return [seed for seed in found.values() if seed.nodes and seed.sinks]

    # -- in the graph --

    def replaced(self, group: Group, kernel: Kernel) -> dict[Node, Made]:
        """Put a functional node for a group into the graph; the graph may be out of order until it is sorted."""
        anchor = next(iter(group.outputs)).replaces
        with self.graph.inserting_before(anchor):
            node = self.graph.call_function(generated, (*group.inputs, *group.scales))
        node.meta.update(val=None)
        for i, output in enumerate(group.outputs):
            with self.graph.inserting_after(node):
                item = self.graph.call_function(operator.getitem, (node, i))
            item.meta.update({k: v for k, v in output.replaces.meta.items() if k != "eager_input_vals"})
            output.replaces.replace_all_uses_with(item)
            self.stored.add(item)
        self.sweep([output.replaces for output in group.outputs])
        return {node: (group, kernel)}

    def sweep(self, dead: list[Node]) -> None:
        """Erase what nobody reads any more."""
        while dead:
            node = dead.pop()
            if (
                not node.users
                and not node._erased
                and not node.is_impure()
                and node.op == "call_function"
                and node not in self.stored
            ):
                dead += node.all_input_nodes
                self.graph.erase_node(node)


def _nearest(sources: Iterable[Node], written: Collection[Node], members: Collection[Node]) -> set[Node]:
    """Of what is written, that from which the sources are computed, and not that from which only such values are."""
    front, seen, found = list(sources), set(), set()
    while front:
        node = front.pop()
        if node in written:
            found.add(node)
        elif node not in seen:
            seen.add(node)
            front += [x for x in node.all_input_nodes if x in members]
    return found


def _is_amax(node: Node) -> bool:
    return node.target in (ops.amax, ops.amax_blocks)


def _scale(node: Node) -> Scale:
    """What a copy is scaled by; what an amax is of."""
    if _is_amax(node):
        return Scale(node) if node.target is ops.amax else of_amax(node)
    block = arg(node, 5) if len(node.args) > 5 else (0, 0)
    return of_cast(arg(node, 1), bool(arg(node, 4)), tuple(block))  # type: ignore[arg-type]


def _waits_for(node: Node) -> list[Node]:
    """What has to be in memory before a walk: a scale that it cannot compute itself."""
    return [] if _is_amax(node) or made_in_place(_scale(node), arg(node, 0)) else [_scale(node).node]


def _of_cast(node: Node) -> Output:
    """The output that stands for a copy."""
    content = "transposed" if arg(node, 4) else "copy"
    return Output(content, arg(node, 0), node, _scale(node), arg(node, 2), arg(node, 3))


def _of_amax(node: Node, casts: list[Node]) -> list[Output]:
    """The outputs that stand for an amax: itself, or those of the scales made of it that others than these casts read."""
    source, granularity = arg(node, 0), _scale(node).granularity
    if granularity in ("one", "col"):
        return [Output("amax" if granularity == "one" else "column_amax", source, node)]
    made = chain(node)
    read = [x for x in made if any(_read_outside(user, {*made, *casts}) for user in x.users)]
    if granularity == "row":
        return [Output("row", x, x) for x in read]
    return [Output("blocks", source, x, of_amax(x)) for x in read]


def _read_outside(user: Node, inside: set[Node]) -> bool:
    """Does someone outside read it? Views of scales are seen through."""
    if user.target in PERMUTES and user.users:
        return any(_read_outside(x, inside) for x in user.users)
    return user not in inside


def _reads(made: Node) -> str:
    return ", ".join(f"{x.name} ({x.target if x.op == 'call_function' else x.op})" for x in made.all_input_nodes)
