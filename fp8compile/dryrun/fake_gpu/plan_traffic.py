"""How many bytes a launch moves: each buffer once, as far as the kernel touches it.

Inductor's scheduler counts by the same rule (`get_read_write_buffers_sizes`: worst inputs, best kernel), with
two faults that matter for the logits of a language model. It takes no more than 1e9 elements of a buffer for
a fused kernel, an extern kernel and a user's kernel; GPT-2's logits at 64 x 1024 tokens are 3.3e9. And it
takes a fused kernel to touch all of a buffer (up to that limit), also where it gathers one element of a row.

Here, a kernel touches of a buffer the sum of what the accesses of its parts touch, but no more than the
buffer:

    x[i, j]           as many elements as the loop variables of the index have values
    x[i, index[i]]    as many as the loop runs, because the addresses are data
    extern            all of the buffer
    user's            all of each argument, which may be a view of a part of a buffer

A kernel of ours that walks over an input twice reads it twice where L2 is too small (`codegen.walks`).
Inductor's loops over a row count once: a program takes one row, or few, so that what is resident stays in L2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from ...ir.metadata import READ_AGAIN
from .step import Touch

Number = Callable[[Any], int]  # the hint of a size


def touched(node: Any, number: Number) -> list[Touch]:
    """The buffers that a scheduler's node reads and writes. `number` gives the hint of a size."""
    from torch._inductor import ir

    kernel = getattr(node, "node", None)
    if isinstance(kernel, ir.UserDefinedTritonKernel):
        written = {x.get_name() for x in kernel.mutable_args}
        moved = [(x.get_name(), _size(x, number)) for x in kernel.inputs]
        return [_touch(node, name, size, name in written, number) for name, size in moved]
    counts: dict[str, int] = {}
    for name, elements in _touched(node, number):
        counts[name] = counts.get(name, 0) + elements
    writes = {dep.name for part in node.get_nodes() for dep in part.read_writes.writes}
    moved = [(name, _bytes(node, name, elements, number)) for name, elements in counts.items()]
    return [_touch(node, name, size, name in writes, number) for name, size in moved]


def _touch(node: Any, name: str, size: int, written: bool, number: Number) -> Touch:
    """A buffer that is changed in place has its first name."""
    first = node.scheduler.mutation_real_name.get(name, name)
    return Touch(first, max(size, _whole(name, number)), size, written)


def read_again(kernel: Any) -> int:
    """The bytes of second reads that come from memory, of a kernel of ours (`codegen.walks`). Its node is
    among the origins of Inductor's kernels that read its results, too."""
    return sum(x.meta.get(READ_AGAIN, 0) for x in kernel.get_origins())


def _touched(node: Any, number: Number) -> Iterator[tuple[str, int]]:
    """The buffers that a node touches, with a number of elements for each access. A buffer that only lives
    within a fused kernel is not in memory."""
    parts = node.get_nodes()
    inside = {name for name in node.get_buffer_names() if len(parts) > 1 and not _outlives(node, name, parts)}
    for part in parts:
        runs = _runs(part, number)
        deps = {*part.read_writes.reads, *part.read_writes.writes}
        for dep in deps:
            # a WeakDep is an order, not an access
            if dep.name not in inside and type(dep).__name__ != "WeakDep":
                yield dep.name, _elements(dep, runs, number)


def _outlives(node: Any, name: str, parts: Any) -> bool:
    return bool({user.node for user in node.scheduler.name_to_buf[name].users} - {*parts})


def _runs(part: Any, number: Number) -> int | None:
    """How often the body of a generated loop runs; None for other kernels."""
    if not hasattr(part, "get_ranges") or getattr(part, "_body", None) is None:
        return None
    return math.prod(number(size) for group in part.get_ranges() for size in group)


def _elements(dep: Any, runs: int | None, number: Number) -> int:
    if runs is None or type(dep).__name__ != "MemoryDep":
        return 1 << 62  # all of the buffer
    if dep.is_indirect():
        return runs
    used = dep.index.free_symbols
    sizes = zip(dep.var_names, dep.size, strict=True)
    return min(runs, math.prod(number(size) for name, size in sizes if name in used))


def _buffer(name: str) -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    buffer: Any = V.graph.name_to_buffer.get(name)
    if buffer is None:
        buffer = V.graph.graph_inputs.get(name)
    return None if isinstance(buffer, ir.TorchBindObject) else buffer


def _whole(name: str, number: Number) -> int:
    """The bytes of a buffer; 0 if it is no tensor."""
    from torch._inductor import ir

    buffer = _buffer(name)
    other = isinstance(getattr(buffer, "layout", None), (ir.MultiOutputLayout, ir.NoneLayout))
    return 0 if buffer is None or other else _size(buffer, number)


def _bytes(node: Any, name: str, elements: int, number: Number) -> int:
    """The bytes of at most so many elements of a buffer."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    buffer = _buffer(name)
    if buffer is None:
        return 0
    layout = getattr(buffer, "layout", None)
    if isinstance(layout, ir.MultiOutputLayout):  # the outputs are buffers of their own
        users = [user.node for user in node.scheduler.name_to_buf[name].users]
        outputs = [user for user in users if isinstance(getattr(user, "node", None), ir.MultiOutput)]
        return sum(_size(out.node, number) for user in outputs for out in user.get_outputs())
    if isinstance(layout, ir.NoneLayout):  # a kernel that only mutates
        return sum(_size(V.graph.get_buffer(changed), number) for changed in buffer.get_mutation_names())
    return min(elements * buffer.get_dtype().itemsize, _size(buffer, number))


def _size(buffer: Any, number: Number) -> int:
    return math.prod(map(number, buffer.get_size())) * int(buffer.get_dtype().itemsize)
