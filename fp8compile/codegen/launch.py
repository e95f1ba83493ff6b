"""Write a generated kernel into the graph that Inductor compiles: allocate outputs, launch, hand them on.

    y0 = empty(...); y1 = empty(...)
    triton_kernel_wrapper_mutation(kernel, grid, x0=.., s0=.., y0=y0, y1=y1, amaxes=vector, ..)

Inductor treats the kernel as one of its own: it uses its own launcher, records launches in CUDA graphs, tunes
over the kernel's configurations at the first launch, and caches the choice on disk.

Amaxes are int32: elements of one vector of the graph, zeroed once, or of what outlives the call
(`ops.raised`). Kernels raise them by atomic maxima on the bits of magnitudes: the bits of NaN are above those
of infinity, and the order of the maxima does not matter. Amaxes of columns are parts of that vector. Scales
and amaxes are passed as views of one element, each 16-byte aligned. With a slot's number as an argument,
Inductor would tune each launch as another kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import sympy
import torch
from torch.fx import Graph, Node

from .. import compat
from ..devices.gpu import gpu_of
from ..ir.fx_utils import STACKS, Emitter, arg, aten, element, hint, value
from ..ir.metadata import AMAX_BITS, READ_AGAIN
from ..ir.ops import APART
from . import blocks, walks
from .group import Group, Output
from .indexing import Domain, product, quotient, quotient_up, size_of, sizes
from .kernel import Kernel

DEVICES = ("cuda",)  # where Triton's kernels run

# (BLOCK_R, BLOCK_C, warps) of kernels that are written by hand
PARTIAL_SUMS = ((64, 32, 4),)  # numbers of a column at a time, columns, warps: 128 programs for 4096 columns
MOST_PARTIAL_SUMS = 512  # of a column: a program reads 64 KB, in about the time of one launch
RAISED = ((2048, 1, 4),)  # numbers of a tensor that a program takes
TRANSPOSED = ((64, 256, 8),)  # rows and columns of a copy


@functools.cache
def tuned(kernel: Any, configs: tuple[tuple[int, ...], ...]) -> Any:
    """A JIT function with the configurations to choose from, one object for all launches that ask for the
    same. A configuration is (BLOCK_R, BLOCK_C, warps) or (.., stages)."""
    import triton

    most = 1024 // (64 if torch.version.hip else 32)  # warps of a program: it has at most 1024 threads
    made = [  # 3 stages: Triton's own number
        triton.Config({"BLOCK_R": r, "BLOCK_C": c}, num_warps=min(warps, most), num_stages=(*stages, 3)[0])
        for r, c, warps, *stages in configs
    ]
    return triton.autotune(configs=made, key=[])(kernel)


def aligned(size: int) -> int:
    """`size` int32 elements, rounded up to a multiple of 16 bytes."""
    return -(-size // APART) * APART


def amax_bits(amaxes: Node) -> Node | None:
    """The part of the int32 vector of which `Launcher.amaxes` made these amaxes a float32 view; None for any
    other amaxes. A kernel reads the int32 bits where they are; the view would be a kernel of its own."""
    return arg(amaxes, 0) if AMAX_BITS in amaxes.meta else None


class AmaxPlace(NamedTuple):
    """Where an amax is: the number of it among those of an int32 tensor."""

    tensor: Node | None
    number: int


class BufferPart(NamedTuple):
    """Where a copy lies in a larger matrix, the result of `whole`: from `first` on, along dimension `dim`."""

    whole: Node
    dim: int
    first: int


class Launcher:
    """Writes launches into a graph."""

    MOST_RAISED = 4  # tensors that `fp8_raise` takes

    def __init__(
        self,
        graph: Graph,
        amaxes: int,
        like: Node,
        columns: int = 0,
        parts: Mapping[int, BufferPart] | None = None,
    ):
        """`amaxes`: how many amaxes of whole matrices there are. `columns`: elements for all amaxes of
        columns, as far as the matrix's width is known. `parts`: outputs in larger matrices, by id."""
        self.graph, self.like = graph, like
        self.symbols: dict[sympy.Expr, Node] = {}
        self.vector: Node | None = None
        self.parts = parts or {}
        self.wholes: dict[Node, Node] = {}  # what parts are written into: the node of the graph -> its memory
        self.first_column = APART * amaxes
        if amaxes or columns:
            start = next(node for node in graph.nodes if node.op != "placeholder")
            self.vector = self._zeros(Emitter(graph, start, like), self.first_column + columns)

    def __call__(
        self, before: Node, kernel: Kernel, inputs: dict[str, Any], places: list[AmaxPlace]
    ) -> tuple[list[Node], list[Node]]:
        """Launch a kernel. `inputs`: its parameters that are tensors or numbers; `places`: of its amaxes.
        Returns the nodes of its outputs (partial column sums last, if any), and of its amaxes: [1] float32
        each, then those of columns, [C, 1] or [E, C] float32."""
        emit, group = self._emitter(before), kernel.group
        outputs = [self._empty(emit, output, group.domain) for output in group.stored]
        tensors = dict(inputs)
        made = {i: blocks.made_of(output, group) for i, output in enumerate(group.stored)}
        tensors.update({f"y{i}": node for i, node in enumerate(outputs) if made[i] is None})
        if group.sums:
            shape = [blocks.row_blocks(group), len(group.sums) * group.domain.columns]
            outputs.append(self.new(emit, shape, torch.float32))
            tensors["sums"] = outputs[-1]
        tensors.update({f"amax{i}": self._bits(emit, place) for i, place in enumerate(places)})
        by_column = [self._columns(emit, product(sizes(x.replaces))) for x in group.column_amaxes]
        tensors.update({f"column_amax{i}": node for i, node in enumerate(by_column)})
        tensors.update({f"n{i}": self.number(emit, s) for i, s in enumerate(kernel.symbols)})
        configs = blocks.configurations(group)
        grids = [(self.number(emit, blocks.grid(group, config)), 1, 1) for config in configs]
        spaced = [i for i, output in enumerate(group.stored) if output.spaced and made[i] is None]
        widths = {f"width{i}": value(outputs[i]).stride(0) for i in spaced}
        loaded = compat.triton.load_kernel(kernel.name, kernel.source)
        launched = compat.triton.launch(emit, tuned(loaded, configs), grids, tensors, widths)
        launched.meta[READ_AGAIN] = self._read_again(kernel, grids[0][0], configs[0][2])
        for i, copy in made.items():
            if copy is not None:
                self._transpose(emit, outputs[group.stored.index(copy)], outputs[i], group.domain)
        wide = []
        for x, output in zip(by_column, group.column_amaxes, strict=True):
            amaxes = emit(aten.view.dtype, x, torch.float32)
            wide.append(emit(aten.view.default, amaxes, [-1, output.replaces.meta["val"].shape[1]]))
        return outputs, [*(self.amaxes(before, place, 1) for place in places), *wide]

    def _read_again(self, kernel: Kernel, programs: Any, warps: int) -> int:
        """Bytes of a launch's second reads (`walks`) in its default configuration."""
        gpu = gpu_of(self.like.meta["val"].device)
        if gpu is None:
            return 0
        full = {f"x{i}": x for i, x in enumerate(kernel.group.inputs) if kernel.group.domain.is_full(x)}
        moved = {name: hint(value(x).numel()) * value(x).itemsize for name, x in full.items()}
        count = hint(programs.meta["val"] if isinstance(programs, Node) else programs)
        return walks.read_again(kernel.source, moved, count, warps, gpu)

    def _transpose(self, emit: Emitter, copy: Node, to: Node, domain: Domain) -> None:
        """Write a transposed copy from a row-major one."""
        from .triton_kernels import fp8_transpose

        sizes_of = (("ROWS", "rows", domain.rows, 1), ("PADDED", "padded", domain.walked, 1))
        constants, numbers = self.size_arguments(emit, *sizes_of)
        constants |= {"COLUMNS": int(domain.columns), "FROM": value(copy).stride(0)}
        constants["TO"] = value(to).stride(0) if isinstance(value(to).stride(0), int) else None
        wide = [blocks.tiles(domain, block) for block in TRANSPOSED]
        grid = [(self.number(emit, count), 1, 1) for count in wide]
        launched = tuned(fp8_transpose, TRANSPOSED)
        compat.triton.launch(emit, launched, grid, {"x": copy, "y": to, **numbers}, constants)

    def _columns(self, emit: Emitter, count: sympy.Expr) -> Node:
        """[count] int32 zeros: a part of the vector, if the number is known."""
        if not count.is_Integer:
            return self._zeros(emit, self.number(emit, count))
        first, size = self.first_column, int(count)
        self.first_column += aligned(size)
        return emit(aten.as_strided.default, self.vector, [size], [1], first)

    def _zeros(self, emit: Emitter, size: Any) -> Node:
        device = self.like.meta["val"].device
        return emit(aten.full.default, [size], 0, dtype=torch.int32, device=device, pin_memory=False)

    def _emitter(self, before: Node) -> Emitter:
        """An emitter of nodes before `before`, for the same module."""
        stacks = {name: before.meta.get(name) for name in STACKS}
        return Emitter(self.graph, before, self.like, **stacks)

    @staticmethod
    def _bits(emit: Emitter, place: AmaxPlace) -> Node:
        assert place.tensor is not None
        return element(emit, place.tensor, APART * place.number)

    def amaxes(self, before: Node, first: AmaxPlace, count: int) -> Node:
        """[count] float32: amaxes that are neighbours, from `first` on."""
        emit = self._emitter(before)
        if count == 1:
            bits = self._bits(emit, first)
        else:
            place = APART * first.number
            bits = emit(aten.as_strided.default, first.tensor, [count], [APART], place)
        amaxes = emit(aten.view.dtype, bits, torch.float32)
        amaxes.meta[AMAX_BITS] = True
        return amaxes

    def raise_amaxes(self, before: Node, amaxes: Mapping[AmaxPlace, Node]) -> None:
        """Raise the amaxes at these places to the largest of [n] float32 each, one n."""
        from .triton_kernels import fp8_raise

        emit = self._emitter(before)
        tensors = {f"rows{i}": rows for i, rows in enumerate(amaxes.values())}
        tensors |= {f"amax{i}": self._bits(emit, place) for i, place in enumerate(amaxes)}
        missing = range(len(amaxes), self.MOST_RAISED)
        (count,) = sizes(next(iter(amaxes.values())))
        constants, arguments = self.size_arguments(emit, ("COUNT", "n", count, 1))
        constants |= dict.fromkeys([f"{name}{i}" for i in missing for name in ("rows", "amax")])
        grid = [(self.number(emit, quotient_up(count, RAISED[0][0])), 1, 1)]
        compat.triton.launch(emit, tuned(fp8_raise, RAISED), grid, {**tensors, **arguments}, constants)

    def _empty(self, emit: Emitter, output: Output, domain: Domain) -> Node:
        like = output.node.meta["val"]
        if output.content in ("value", "row"):
            shape = [self.number(emit, size_of(x)) for x in like.shape]
            strides = [self.number(emit, size_of(x)) for x in like.stride()]
            kind = {"dtype": like.dtype, "device": like.device, "pin_memory": False}
            return emit(aten.empty_strided.default, shape, strides, **kind)
        if output.content in ("blocks", "number"):
            return self.new(emit, list(sizes(output.replaces)), torch.float32)
        assert output.dtype is not None
        shape = [domain.rows, domain.columns] if output.content == "copy" else [domain.columns, domain.walked]
        if (part := self.parts.get(id(output))) is not None:
            if part.whole not in self.wholes:
                self.wholes[part.whole] = self.new(emit, list(sizes(part.whole)), output.dtype)
            end = self.number(emit, part.first + shape[part.dim])
            return emit(aten.slice.Tensor, self.wholes[part.whole], part.dim, part.first, end)
        return self.new(emit, shape, output.dtype)

    def new(self, emit: Emitter, shape: Iterable[Any], dtype: torch.dtype) -> Node:
        """An empty tensor, in row-major order."""
        kind = {"dtype": dtype, "device": self.like.meta["val"].device, "pin_memory": False}
        return emit(aten.empty.memory_format, [self.number(emit, x) for x in shape], **kind)

    def totals(self, before: Node, group: Group, outputs: list[Node]) -> dict[int, tuple[Node, Any, Any]]:
        """For each column sum of a group, by the id of its output: the vector that holds it, its first
        element there, and the element after its last."""
        sums = group.sums
        if not sums:
            return {}
        emit = self._emitter(before)
        dtypes = {output.replaces.meta["val"].dtype for output in sums}
        # convert all sums at once: slices of the result are views
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        total = self._total(emit, outputs[-1], dtype)
        columns = size_of(total.meta["val"].shape[0]) / len(sums)
        edges = [self.number(emit, columns * i) for i in range(len(sums) + 1)]
        return {id(output): (total, edges[i], edges[i + 1]) for i, output in enumerate(sums)}

    def _total(self, emit: Emitter, partial: Node, dtype: torch.dtype) -> Node:
        """The sum of the rows of a matrix of partial sums. Inductor splits such a sum, which has few results,
        over two kernels. That is faster only where a column has many numbers."""
        from .triton_kernels import fp8_column_sums

        rows, columns = sizes(partial)
        if not (rows.is_Integer and columns.is_Integer and rows <= MOST_PARTIAL_SUMS):
            total = emit(aten.sum.dim_IntList, partial, [0])
            if dtype == torch.float32:
                return total
            return emit(torch.ops.prims.convert_element_type.default, total, dtype)
        total = self.new(emit, [columns], dtype)
        constants = {"ROWS": int(rows), "COLUMNS": int(columns)}
        grid = [(int(quotient_up(columns, c)), 1, 1) for _, c, _ in PARTIAL_SUMS]
        sums = tuned(fp8_column_sums, PARTIAL_SUMS)
        compat.triton.launch(emit, sums, grid, {"partial": partial, "total": total}, constants)
        return total

    def size_arguments(
        self, emit: Emitter, *wanted: tuple[str, str, sympy.Expr, int]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(constants, numbers) for a kernel that has a `tl.constexpr` and an argument for a size, of which
        one is None: the argument where the size is known. `wanted`: (name of the constant, of the argument,
        size, what divides the argument)."""
        constants: dict[str, Any] = {}
        numbers: dict[str, Any] = {}
        for known, unknown, size, unit in wanted:
            if size.is_Integer:
                constants |= {known: int(size), unknown: None}
            else:
                constants[known] = None
                numbers[unknown] = self.number(emit, quotient(size, unit) if unit != 1 else size)
        return constants, numbers

    def number(self, emit: Emitter, expr: Any) -> Any:
        """An int, or a node with the value of an expression."""
        if isinstance(expr, int):
            return expr
        if expr.is_Integer:
            return int(expr)
        return compat.triton.size_node(emit, expr, self._symbol)

    def _symbol(self, symbol: sympy.Symbol) -> Node:
        """A node with the value of a symbol: an input of the graph, or a size of a tensor."""
        if symbol not in self.symbols:
            first = None
            for node in self.graph.nodes:
                value = node.meta.get("val")
                same = isinstance(value, torch.SymInt) and value.node.expr == symbol
                if same and (node.op == "placeholder" or not first):
                    self.symbols[symbol] = node
                    return node
                if first is None and isinstance(value, torch.Tensor) and symbol in sizes(node):
                    first = node
            assert first is not None, symbol
            anchor = first.next
            while anchor.op == "placeholder":
                anchor = anchor.next
            found = Emitter(self.graph, anchor, first)
            self.symbols[symbol] = found(aten.sym_size.int, first, sizes(first).index(symbol))
        return self.symbols[symbol]
