"""Extend a few casts and amaxes of one matrix to a group: all nodes that one kernel should compute with them.

The search goes back from the matrix as long as values are pointwise or sums over rows, and not in memory
already. Then it looks forward for outputs that come almost for free: column sums of values that the kernel
holds anyway (a bias gradient), members of the group that other nodes read, and norm statistics that others
round. The kernel writes a member that others read, unless computing the member again is cheaper for them.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Node

from ..codegen import launch
from ..codegen.expressions import TRITON_DTYPE, supported
from ..codegen.group import Group, Output
from ..codegen.indexing import RESHAPES, VIEWS, Domain, product, sizes
from ..codegen.text import Unwritable
from ..codegen.traffic import Sizes, fusable
from ..ir import grouped, ops
from ..ir.fx_utils import CASTS, Ranks, aten, is_tensor, reached, value

MOST_INPUTS = 12
SEEDS = (ops.quantize, ops.amax, ops.amax_blocks, grouped.group_amax)
OURS = (*SEEDS, ops.current_scale, ops.served_inverse, ops.inverse)


class Grouping:
    """Finds groups. `stored`: results of earlier groups, which are in memory."""

    def __init__(self, sizes_of: Sizes, stored: set[Node], ranks: Ranks):
        self.sizes, self.stored, self.ranks = sizes_of, stored, ranks

    def walk(self, domain: Domain, sinks: list[Output], stops: Collection[Node] = ()) -> Group:
        walk = Group(domain, lambda node: node in self.stored or node in stops)
        for sink in sinks:
            walk.output(sink)
        return walk

    def __call__(self, domain: Domain, sinks: list[Output], sums: bool = True) -> Group:
        """The group of the casts and amaxes `sinks`, with all its outputs. `sums`: take in column sums of
        values that the kernel holds. Raises Unwritable if it cannot be one kernel."""
        stops: set[Node] = set()
        orders = [x for x in (domain.order, *(sink.groups for sink in sinks)) if isinstance(x, Node)]
        while True:
            walk = self.walk(domain, sinks, stops)
            totals = self.column_sums(domain, walk, {x.replaces for x in sinks} | stops) if sums else {}
            outputs = [*sinks, *totals.values()]
            outputs += self.others(domain, walk, {*(x.replaces for x in outputs), *totals, *walk.tiles})
            walk.outputs = outputs
            replaced = {x.replaces for x in outputs}
            reads = [*walk.inputs, *walk.scales, *orders]
            if not self.ranks.reach(reads, replaced):
                break
            # a tensor to read may depend on outputs of the group: leave such outputs to others, and read them
            others = {x.replaces for x in outputs if x.content in ("value", "row", "sum")} - stops
            late = {x for x in others if self.ranks.reach(reads, {x})}
            if not late:
                raise Unwritable("it reads what is made of its own results")
            stops |= late
        if len(walk.inputs) > MOST_INPUTS:
            raise Unwritable(f"{len(walk.inputs)} inputs")
        for x in (*walk.inputs, *walk.scales):
            if not readable(x):
                raise Unwritable(f"{x.name} cannot be read: {_described(x)}")
        return walk

    def others(self, domain: Domain, walk: Group, sinks: set[Node]) -> list[Output]:
        """Members that someone else reads, and that are cheaper to write than to compute again."""
        found: list[Output] = []
        self.follow_rows(domain, walk, sinks)
        self.follow_casts(domain, walk, sinks)
        full = self.full(domain, walk)
        for node in walk.members:
            if node.target in VIEWS or node in sinks or not is_tensor(node):
                continue
            readers = _readers(node, walk.members, sinks)
            if not readers:
                continue
            if node in walk.levels or node not in full:
                if self.of_sums(node, walk) and (node, domain.row_index(node)) in walk.seen:
                    found.append(Output("row", node, node))
                continue
            needed = any(x.op == "output" or not fusable(x, OURS) for x in readers)
            write_and_read, again = 2 * self.sizes.bytes_of(node), self.cost_again(domain, node, walk)
            if needed or write_and_read < again or (write_and_read == again and self.of_sums(node, walk)):
                found.append(Output("value", node, node))
        return found

    def follow_rows(self, domain: Domain, walk: Group, sinks: set[Node]) -> None:
        """Take in nodes that compute one number a row from members alone (statistics that are rounded for
        backward): outside, they would be a tiny kernel."""
        tensors = [node for node in walk.members if is_tensor(node)]
        rows = [node for node in tensors if domain.row_index(node) is not None and self.of_sums(node, walk)]
        while rows:
            node = rows.pop()
            for user in _readers(node, walk.members, sinks):
                index = domain.row_index(user) if is_tensor(user) else None
                operands = domain.operands(user, index) if index is not None else None
                read = [x[0] for x in operands or () if isinstance(x, tuple)]
                if operands is not None and all(x in walk.members for x in read):
                    walk(user, index)  # type: ignore[arg-type]
                    rows.append(user)

    def follow_casts(self, domain: Domain, walk: Group, sinks: set[Node]) -> None:
        """Take in roundings: an adapter's matmul may read one. Casts to FP8 read the value before it is
        rounded, so Inductor would compute it once more."""
        for node in self.full(domain, walk):
            for user in node.users:
                taken = user in walk.members or user in sinks or walk.stop(user)
                if user.target not in CASTS or taken or not supported(user) or not readable(user):
                    continue
                if value(user).dtype.itemsize < value(node).dtype.itemsize:
                    walk(user, domain.index(user))

    @staticmethod
    def full(domain: Domain, walk: Group) -> dict[Node, None]:
        """The members that hold the matrix, element by element."""
        return {x: None for x, index in walk.seen if x in walk.members and index == domain.full(sizes(x))}

    @staticmethod
    def of_sums(node: Node, walk: Group) -> bool:
        """True if this node is computed from a sum over rows that the group computes."""
        sources = reached([node], lambda x: x.all_input_nodes if x in walk.members else ())
        return any(x in walk.levels for x in sources)

    def cost_again(self, domain: Domain, node: Node, walk: Group) -> int:
        """Bytes to read for computing a member once more."""
        again = Group(domain, walk.stop)
        again(node, domain.index(node))
        return sum(map(self.sizes.bytes_of, again.inputs))

    def column_sums(self, domain: Domain, walk: Group, replaced: set[Node]) -> dict[Node, Output]:
        """Column sums (over all rows) of values that the kernel holds in registers anyway."""
        found: dict[Node, Output] = {}
        big = {x for x in walk.inputs if domain.is_full(x)}
        candidates: dict[Node, None] = {}
        stack = [*walk.members, *walk.inputs]
        for _ in range(4):  # a sum may be a few operators away: after x * dy, after a view
            following = []
            for node in stack:
                for user in node.users:
                    if user.op != "call_function" or user in candidates:
                        continue
                    passed = user.target in VIEWS or supported(user)
                    if user.target is aten.sum.dim_IntList:
                        candidates[user] = None
                    elif passed and user not in walk.members and domain.is_full(user):
                        following.append(user)
            stack = following
        for node in candidates:
            reduced, taken = domain.reduction(node), replaced & {node, _rounded(node)}
            if taken or reduced is None or reduced[1] or product(sizes(node)) != domain.columns:
                continue
            source = reduced[0]
            index = domain.index(source)
            probe = Group(domain, walk.stop)
            probe(source, index)
            if {x for x in probe.inputs if domain.is_full(x)} <= big and all(map(readable, probe.inputs)):
                walk(source, index)
                found[node] = Output("sum", source, _rounded(node))
        return found


def readable(node: Node) -> bool:
    """True if a kernel can read it."""
    there = is_tensor(node) and value(node).device.type in launch.DEVICES
    return there and value(node).dtype in TRITON_DTYPE


def _described(node: Node) -> str:
    tensor = node.meta.get("val")
    return f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__


def _readers(node: Node, members: dict[Node, None], sinks: set[Node]) -> list[Node]:
    """The nodes outside of the group that read a member, directly or through views."""

    def users(x: Node) -> list[Node]:
        return [user for user in x.users if user not in sinks] if x is node or x.target in VIEWS else []

    return [x for x in reached([node], users) if x is not node and x.target not in VIEWS and x not in members]


def _rounded(total: Node) -> Node:
    """A sum as others read it: the last of the reshapes and casts after it that are each the only reader."""
    node = total
    while len(node.users) == 1:
        user = next(iter(node.users))
        cast = user.target in CASTS and node.meta["val"].dtype == torch.float32
        if user.target not in RESHAPES and not cast:
            break
        node = user
    return node
