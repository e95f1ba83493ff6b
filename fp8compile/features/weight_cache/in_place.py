"""Casts that write to memory that is there, rather than to new tensors.

    w8, w8t = quantize_both(w, scale); return w8, w8t
->
    w8, w8t = quantize_both(w, scale); copy_(copy_0, w8); copy_(copy_1, w8t)

`write_in_place` runs after the generated kernels are in the graph. Inductor lets its own kernels write to an
input that is only written; here ours do:

    y = empty(..); launch(kernel, y, ..); copy_(copy_0, y)  ->  launch(kernel, copy_0, ..)
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ...ir.fx_utils import arg, aten, value

ALLOCATED = (aten.empty.memory_format, aten.empty_strided.default)


def into_memory(graph: Graph) -> Graph:
    """A graph that writes its results to one more input each, and returns nothing."""
    made = Graph()
    copies = made.graph_copy(graph, {})
    last = made.find_nodes(op="placeholder")[-1]
    with made.inserting_after(last):
        targets = [made.placeholder(f"copy_{i}") for i in reversed(range(len(copies)))][::-1]  # type: ignore
    for target, copy in zip(targets, copies, strict=True):  # type: ignore[arg-type]
        made.call_function(aten.copy_.default, (target, copy))
    made.output(())
    return made


def write_in_place(graph: Graph) -> int:
    """In a graph that returns nothing. Returns how many tensors need not be copied any more."""
    done = 0
    (output,) = graph.find_nodes(op="output")
    if output.all_input_nodes:
        return 0
    for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, made = arg(write, 0), arg(write, 1)
        if target.op == "placeholder" and len(target.users) == 1 and _is_memory(made, target):
            made.replace_all_uses_with(target, lambda user, write=write: user is not write)
            write.replace_all_uses_with(target)
            graph.erase_node(write)
            graph.erase_node(made)
            done += 1
    return done


def _is_memory(made: Node, target: Node) -> bool:
    """True if `made` was allocated in this graph, for other operators to write to, in `target`'s layout."""
    one, other = value(made), value(target)
    alike = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    return made.target in ALLOCATED and alike
