"""place: put the launch of each generated kernel where its functional node is.

   f = generated(x, scale); y8 = f[0]; amax = f[1]
   copy_(amaxes, raised(amaxes, [.., amax, amax(q)], [.., 7, 8]))
->
   y8 = empty(..); launch(kernel, x, scale, y8, amaxes[7])
   rows = row_amax(q); fp8_raise(rows, amaxes[8])

Kernels raise the state's amaxes where they are. Other amaxes (those of current scales, and those that are
reduced over ranks first) are elements of a vector of the graph, which is zeroed once.

Where Inductor reduces a tensor, it puts the first stage, a number a row, into the kernel that makes the
tensor. One launch takes the second stage of up to four tensors.

A launch that reads nothing but inputs of the graph (a cast of a weight, as a rule) moves to its first reader.
At the beginning of the graph, such launches would put a copy of each weight into memory before the first
matmul, and none would be in the cache.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from ..codegen import launch
from ..codegen.group import Group, Output
from ..codegen.indexing import VIEWS, product, sizes
from ..codegen.kernel import Kernel
from ..ir import merged, ops
from ..ir.fx_utils import Emitter, arg, aten, value
from ..logs import dump


def generated(*_: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Stands for a group in a graph until its launch is written."""
    raise NotImplementedError


def place(graph: Graph, kernels: dict[Node, Kernel]) -> None:
    """Replace the functional nodes by launches, and their results by the tensors that the launches write. The
    graph must be in topological order."""
    _sink(graph, kernels)
    order = [node for node in graph.nodes if node in kernels]
    amaxes = [item for node in order for item, x in _items(node, kernels[node].group) if x.content == "amax"]
    states = graph.find_nodes(op="call_function", target=ops.raised)
    places = {x: at for raised in states for x, at in _taken(raised, amaxes).items()}
    numbers: dict[Node, int] = {}
    gathers = graph.find_nodes(op="call_function", target=ops.gather)
    gathered = [x for gather in gathers for x in arg(gather, 0) if x in amaxes]
    for item in (*gathered, *amaxes):
        if item not in places:
            numbers.setdefault(item, len(numbers))
    counts = [product(sizes(x.replaces)) for node in order for x in kernels[node].group.column_amaxes]
    wide = [int(count) for count in counts if count.is_Integer]
    like: Any = order[0].args[0]
    columns = sum(map(launch.aligned, wide))
    launcher = launch.Launcher(graph, len(numbers), like, columns, _parts(graph, kernels))
    places |= {item: launch.AmaxPlace(launcher.vector, number) for item, number in numbers.items()}
    for gather in gathers:
        gather.args = (_runs(gather, numbers, launcher),)
    for node in order:
        _launch(node, kernels[node], places, launcher)
    for whole, memory in launcher.wholes.items():
        whole.replace_all_uses_with(memory)
        graph.erase_node(whole)


def _sink(graph: Graph, kernels: dict[Node, Kernel]) -> None:
    made = {node for node, x in kernels.items() if all(y.op == "placeholder" for y in x.group.inputs)}
    for node in graph.nodes:
        if node.target in (operator.getitem, *VIEWS) and node.args[0] in made:
            made.add(node)
        if node.target is merged.side_by_side and made.issuperset(arg(node, 0)):
            made.add(node)
    for node in reversed(list(graph.nodes)):
        if node not in made or not node.users:
            continue
        reader = min(node.users)
        while reader in made and reader.users:
            reader = min(reader.users)
        # not to the end, after the graph's writes to its inputs
        if node not in kernels or reader.op != "output":
            min(node.users).prepend(node)


def _parts(graph: Graph, kernels: dict[Node, Kernel]) -> dict[int, launch.BufferPart]:
    """By the id of an output: where it belongs in a matrix all of whose parts come from kernels."""
    found: dict[int, launch.BufferPart] = {}
    for whole in graph.find_nodes(op="call_function", target=merged.side_by_side):
        parts, dim, first = arg(whole, 0), arg(whole, 1), 0
        made = (x.target is operator.getitem and x.args[0] in kernels for x in parts)
        if not all(made) or any(len(x.users) > 1 for x in parts):
            continue
        for part in parts:
            output = kernels[arg(part, 0)].group.outputs[arg(part, 1)]
            found[id(output)] = launch.BufferPart(whole, dim, first)
            first += value(part).shape[dim]
    return found


def _taken(raised: Node, amaxes: list[Node]) -> dict[Node, launch.AmaxPlace]:
    """Take the amaxes of kernels that only the state reads from `raised`: the kernels raise them. An amax of
    several slots, of a tensor that has several settings or serves several weights, stays: a kernel raises it
    in one place."""
    state, found, rows = arg(raised, 0), arg(raised, 1), arg(raised, 2)
    pairs = list(zip(found, rows, strict=True))
    own = {x for x in amaxes if set(x.users) == {raised} and found.count(x) == 1}
    taken = {x: launch.AmaxPlace(state, row) for x, row in pairs if x in own}
    left = [(x, row) for x, row in pairs if x not in taken]
    raised.args = (state, [x for x, _ in left], [row for _, row in left])
    return taken


def _items(node: Node, group: Group) -> list[tuple[Node, Output]]:
    return [(item, group.outputs[int(arg(item, 1))]) for item in sorted(node.users, key=lambda x: arg(x, 1))]


def _runs(gather: Node, numbers: dict[Node, int], launcher: launch.Launcher) -> list[Node]:
    """The vectors to gather. Amaxes that are neighbours in the graph's vector form one vector."""
    vectors: list[Node] = []
    run: list[int] = []
    for item in [*arg(gather, 0), None]:
        number = numbers.get(item, -1)
        if run and number != run[-1] + 1:
            vectors.append(launcher.amaxes(gather, launch.AmaxPlace(launcher.vector, run[0]), len(run)))
            run = []
        if number >= 0:
            run.append(number)
        elif item is not None:
            vectors.append(item)
    return vectors


def _launch(
    node: Node, kernel: Kernel, places: dict[Node, launch.AmaxPlace], launcher: launch.Launcher
) -> None:
    dump(f"{kernel.name}.py", lambda: kernel.source)
    group = kernel.group
    items = _items(node, group)
    inputs: dict[str, object] = {f"x{i}": x for i, x in enumerate(node.args[: len(group.inputs)])}
    for i, x in enumerate(node.args[len(group.inputs) :][: len(kernel.scales)]):
        inputs[f"s{i}"] = launch.amax_bits(x) or x  # type: ignore[arg-type]
    more = [name for name, x in (("order", group.domain.order), ("groups", group.groups)) if x is not None]
    inputs.update(zip(more, node.args[len(node.args) - len(more) :], strict=True))
    by_output = {id(output): item for item, output in items}
    slots = [places[by_output[id(output)]] for output in group.amaxes]
    outputs, amaxes = launcher(node, kernel, inputs, slots)
    standing = [*group.stored, *group.amaxes, *group.column_amaxes]
    written = dict(zip(map(id, standing), [*outputs[: len(group.stored)], *amaxes], strict=True))
    columns = launcher.totals(node, group, outputs)
    for item, output in items:
        result = _column_sum(item, *columns[id(output)]) if output.content == "sum" else written[id(output)]
        item.replace_all_uses_with(result)
        node.graph.erase_node(item)
    node.graph.erase_node(node)


def _column_sum(item: Node, totals: Node, first: Any, size: Any) -> Node:
    """One column sum of a kernel, with the dtype and shape of the node that it replaces."""
    emit = Emitter(item.graph, item, item)
    total = emit(aten.slice.Tensor, totals, 0, first, size)
    if value(item).dtype != value(total).dtype:
        total = emit(torch.ops.prims.convert_element_type.default, total, value(item).dtype)
    return emit(aten.view.default, total, list(value(item).shape)) if value(item).dim() != 1 else total
