"""Group -> the source of one Triton kernel.

    one pass                                  with sums over rows (a norm)

    a program is a tile [BLOCK_R, BLOCK_C]    a program is a block of BLOCK_R whole rows
        load, compute, store                      for each pass: for each tile: load, accumulate
                                                  for each tile: load, compute, store

A program of one pass may also take a *span* of columns, strip by strip, where a tile of 128 x 128 elements is
too much for the registers. It walks over the strips twice: for the amaxes of the span's rows, then the rest.

Values are named after their order (`v3`), inputs `x0`, scales `s0`, outputs `y0`. A tile has one scale for
each of its blocks, [BLOCK_R / rows, BLOCK_C / columns]; these are spread over the tile where values are
multiplied with them. Offsets are 64-bit. Row numbers are [BLOCK_R, 1], column numbers [1, BLOCK_C], so a
value that varies with one of them only is computed once a row or column.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from .. import compat
from ..devices.gpu import gpu_of
from ..ir import ops
from ..ir.fx_utils import arg
from .block_scales import Tiles, magnitude
from .composites import composite
from .expressions import FLOATS, TRITON_DTYPE, expression, number_text, prelude, rounded
from .group import Group, Output, statistics_of, title
from .indexing import VIEWS, Index, in_memory, sizes, varies_with
from .scales import FROM_AMAX, SPAN, Scale, computed_scale, loaded_scale
from .stores import Stores
from .text import Masks, bracketed, dtype_name, guarded, indented, integer, kept


@dataclass(frozen=True)
class Kernel:
    """The kernel of a group, and what it is called with beside the group's inputs and outputs."""

    name: str
    source: str
    group: Group
    scales: tuple[Node, ...]  # what it reads of them
    symbols: tuple[sympy.Symbol, ...]


def write(group: Group) -> Kernel:
    """The kernel of a group. Same group, same source: names do not depend on the graph."""
    return Writer(group).write()


class Writer:
    def __init__(self, group: Group):
        self.group, self.domain = group, group.domain
        gpu = gpu_of(group.outputs[0].node.meta["val"].device)
        self.by_ptx = gpu is not None and not gpu.gfx and compat.triton.converts_wrongly(gpu.capability)
        self.masks = Masks.of(group.domain)
        self.inputs = {node: f"x{i}" for i, node in enumerate(group.inputs)}
        self.scales: dict[Node, str] = {}
        self.read: list[Node] = []  # what the kernel reads of them, in the order of its parameters
        for node, scale in group.scales.items():
            self.scales[node] = f"s{len(self.read)}"
            self.read += scale.read
        self.pointers = {id(output): f"y{i}" for i, output in enumerate(group.stored)}
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}  # as the kernel calls them: n0, n1, ..
        self.count = 0
        self.outer: dict[tuple[Node, Index], str] = {}  # values that vary with the row or with nothing
        self.outer_lines: list[str] = []
        self.loop: dict[tuple[Node, Index], str] = {}  # values of the tile at hand
        self.lines: list[str] = []
        self.reduced: dict[Node, str] = {}  # sums over rows that are known by now
        self.means: dict[Node, str] = {}
        self.spans: dict[Scale, str] = {}  # scales of the rows of a span

    # -- the whole --

    def write(self) -> Kernel:
        group = self.group
        rows, columns = self.text(self.domain.rows), self.text(self.domain.columns)
        looping, span, amaxes = bool(group.passes), group.span, range(len(group.amaxes))
        width, start = (span, "span") if span else ("BLOCK_C", "start")
        body = ["pid = tl.program_id(0).to(tl.int64)", *(["block = pid"] if looping else [])]
        if not looping:
            body += [f"tiles = ({columns} + {width} - 1) // {width}", "block = pid // tiles"]
            body += [f"{start} = pid % tiles * {width}"]
        body += self.rows(rows)
        for node, scale in group.scales.items():
            if scale.granularity == "one":
                body += loaded_scale(scale, self.scales[node])
        body += [self.store_number(output) for output in group.with_content("number")]
        for number in range(group.passes):
            body += self.reduce(number, columns)
        if looping or span:
            body += [f"largest{i} = tl.zeros([BLOCK_R, BLOCK_C], tl.int32)" for i in amaxes]
        self.lines, self.loop, self.outer_lines = [], {}, []
        head = self.columns(columns)
        before = self.span(head) if span else []
        self.lines, self.loop = [], {}
        outputs = Stores(self, looping or bool(span)).write()
        tile = [*head, *self.lines, *outputs]
        body += self.outer_lines
        if span:
            tile = [*before, *self.strips(tile)]
        if looping:
            body += [f"for start in range(0, {columns}, BLOCK_C):", *indented(tile)]
        else:
            body += tile
        for output in group.with_content("row"):
            body += self.store_row(output)
        body += [f'tl.atomic_max(amax{i}, tl.max(largest{i}), sem="relaxed")' for i in amaxes]
        text = "\n".join(indented([*self.comments(), *body]))
        parameters = self.parameters()
        name = f"{title(group)}_{hashlib.sha256(f'{parameters}{text}'.encode()).hexdigest()[:8]}"
        imports = ["import triton", "import triton.language as tl"]
        if "libdevice." in text:  # by this name Inductor imports it in the code that it copies kernels to
            imports.append("from triton.language.extra import libdevice")
        source = "\n".join([*imports, "", "", "@triton.jit", f"def {name}({parameters}):", text, ""])
        return Kernel(name, source, group, tuple(self.read), tuple(self.symbols))

    def parameters(self) -> str:
        group = self.group
        names = [*self.inputs.values(), *(f"s{i}" for i in range(len(self.read)))]
        names += ["order"] if self.domain.order is not None else []
        names += ["groups"] if group.groups is not None else []
        names += self.pointers.values()
        names += ["sums"] if group.sums else []
        names += [f"amax{i}" for i in range(len(group.amaxes))]
        names += [f"column_amax{i}" for i in range(len(group.column_amaxes))]
        names += [f"n{i}" for i in range(len(self.symbols))]
        widths = [f"width{i}" for i, output in enumerate(group.stored) if output.spaced]
        return ", ".join([*names, *(f"{x}: tl.constexpr" for x in (*widths, "BLOCK_R", "BLOCK_C"))])

    def comments(self) -> list[str]:
        """Comments: inputs and scales of blocks with dtype and shape, outputs with content and dtype."""
        lines = []
        scales = self.group.scales
        blocks = {node: name for node, name in self.scales.items() if scales[node].granularity == "tile"}
        for node, name in {**self.inputs, **blocks}.items():
            shape = ", ".join(self.text(size).strip("()") for size in sizes(node))
            lines.append(f"# {name}: {dtype_name(node.meta['val'].dtype)} [{shape}]")
        for output in self.group.stored:
            node, scale = output.replaces if output.content == "blocks" else output.node, output.scale
            dtype = dtype_name(output.dtype or node.meta["val"].dtype)
            lines.append(f"# {self.pointers[id(output)]}: {output.content} {dtype}")
            if scale is not None and scale.granularity != "one":
                lines[-1] += f", a scale for {scale.rows or 'all'} x {scale.columns or 'all'}"
        return lines  # not listed: single scales (s), float32; amax, int32 bits of a float32; sums, float32

    def rows(self, rows: str) -> list[str]:
        """The numbers of the rows. In a padded order they are read from memory: row `-2 - source` belongs to
        no group, so it is computed, but does not count."""
        walk = "block * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]"
        if self.domain.order is None:
            return [f"row = {walk}", *([f"row_inside = row < {rows}"] if self.masks.row else [])]
        return [
            f"walk = {walk}",
            f"source = tl.load(order + walk, mask=walk < {self.text(self.domain.walked)}, other=-1)",
            "row = tl.where(source < -1, -2 - source, source).to(tl.int64)",
            "row_inside = source != -1",
            "row_counts = source >= 0",
        ]

    def columns(self, columns: str) -> list[str]:
        lines = ["col = start + tl.arange(0, BLOCK_C)[None, :].to(tl.int64)"]
        lines += [f"col_inside = col < {columns}"] if self.masks.col else []
        lines += ["inside = row_inside & col_inside"] if self.masks.inside == "inside" else []
        return [*lines, "counts = row_counts & col_inside"] if self.masks.counts == "counts" else lines

    # -- passes --

    def reduce(self, number: int, columns: str) -> list[str]:
        """One pass: all sums over rows that are known after it."""
        nodes = [node for node, level in self.group.levels.items() if level == number]
        self.lines, self.loop, self.outer_lines = [], {}, []
        start, last = [], []
        for node in nodes:
            whole, part = statistics_of(node)
            source = arg(whole, 0)
            index = self.domain.full(sizes(source))
            assert index is not None
            value, name, into = self.value(source, index), self.name("r"), self.name("acc")
            self.reduced[node] = name
            if node.target is ops.amax_blocks:
                start.append(f"{into} = tl.zeros([BLOCK_R, BLOCK_C], tl.int32)")
                self.lines.append(f"{into} = tl.maximum({into}, {magnitude(value, self.masks)})")
                last.append(f"{name} = tl.max({into}, 1, keep_dims=True).to(tl.float32, bitcast=True)")
                continue
            start.append(f"{into} = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)")
            if part == "var":
                mean = self.means[whole]
                value = f"({value} - {mean}) * ({value} - {mean})"
            self.lines.append(f"{into} += {kept(self.masks.inside, value)}")
            total = f"tl.sum({into}, 1, keep_dims=True)"
            size = self.text(self.domain.columns)
            if part == "mean":
                total = f"tl.div_rn({total}, {size} * 1.0)"
            elif part == "var":
                correction = whole.kwargs.get("correction", 1)
                total = f"tl.div_rn({total}, {size} - {number_text(float(correction))})"  # type: ignore[arg-type]
            if part == "mean" and whole is not node:  # the variance takes the mean before it is rounded
                self.means[whole] = self.name("mean")
                last.append(f"{self.means[whole]} = {total}")
                total = self.means[whole]
            last.append(f"{name} = {rounded(total, node.meta['val'].dtype)}")
        tile = indented([*self.columns(columns), *self.lines])
        return [*self.outer_lines, *start, f"for start in range(0, {columns}, BLOCK_C):", *tile, *last]

    def span(self, head: list[str]) -> list[str]:
        """The scales of the rows of a span: a pass over its strips for their amaxes."""
        tiles = Tiles(self, [])
        starts = tiles.amaxes_of_spans()
        passed = [*starts, *self.strips([*head, *self.lines, *tiles.lines])]
        tiles.lines.clear()
        tiles.scales_of_spans(self.pointers)
        self.spans = tiles.known
        return [*passed, *tiles.lines]

    @staticmethod
    def strips(lines: list[str]) -> list[str]:
        return [f"for strip in range(0, {SPAN}, BLOCK_C):", *indented(["start = span + strip", *lines])]

    # -- values --

    def value(self, node: Node, index: Index) -> str:
        """The name of a value; writes what computes it where it is computed first."""
        if (node, in_memory(index)) in self.group.loads:
            index = in_memory(index)
        key = (node, index)
        if known := self.loop.get(key) or self.outer.get(key):
            return known
        if node in self.reduced and key not in self.group.loads:
            return self.reduced[node]
        if key in self.group.loads:
            before: list[str] = []
            text, name = self.load(node, index), self.name("v")
        else:
            operands = self.domain.operands(node, index)
            assert operands is not None, node
            texts = [self.value(*x) if isinstance(x, tuple) else number_text(x) for x in operands]
            if node.target in (*VIEWS, torch.ops.aten.index.Tensor, torch.ops.aten.slice.Tensor):
                return texts[0]
            name = f"v{self.count + 1}"
            if node.target is torch.ops.aten.cat.default:
                text, before = self.beside(node, index, texts), []
            elif node.target in FROM_AMAX:
                *before, text = computed_scale(node, texts[0], name)
                text = text.removeprefix(f"{name} = ")
            elif whole := composite(node):
                before, text = whole.text(texts)
            else:
                text, before = expression(node, texts, name), prelude(node, texts, name)
            if text in texts:
                return text
            self.count += 1
        inner = varies_with(index) in ("full", "col")
        (self.loop if inner else self.outer)[key] = name
        lines = self.lines if inner else self.outer_lines
        lines += [*(line for line in before if line not in lines), f"{name} = {text}"]
        return name

    def beside(self, node: Node, index: Index, parts: list[str]) -> str:
        """The one of several values side by side that the column is in."""
        terms, made = self.domain.parts(node, index), parts[-1]
        assert terms is not None
        for value, after in reversed([*zip(parts, terms[1:], strict=False)]):
            first, whole = after.part  # type: ignore[misc]
            made = f"tl.where(col % {whole} < {first}, {value}, {made})"
        return made

    def load(self, node: Node, index: Index) -> str:
        dtype = node.meta["val"].dtype
        masks = {"full": self.masks.inside, "row": self.masks.row, "col": self.masks.col, "one": ""}
        axes = {"full": ("row", "col"), "row": ("row",), "col": ("col",), "one": ()}[varies_with(index)]
        other = "0.0" if dtype.is_floating_point else "0"
        mask = guarded(masks[varies_with(index)], other)
        text = f"tl.load({self.inputs[node]}{self.offset(node, index, *axes)}{mask})"
        if dtype in FLOATS:
            return f"{text}.to(tl.float32)"
        return f"{text} != 0" if dtype == torch.bool else text

    def offset(self, node: Node, index: Index, *varying: str) -> str:
        """` + ...`: the offset from a tensor's first element to those at `index`. It has an element for each
        row or column (`varying`), even if a matrix of one row or column has no term for them."""
        parts = []
        for (axis, divisor, size), stride in self.domain.address(node, index).items():
            if isinstance(axis, Node):
                axis = self.value(axis, self.domain.row_index(axis))  # type: ignore[arg-type]
            text = axis if divisor == 1 else f"{axis} // {self.text(divisor)}"
            text = text if size is None else f"{text} % {self.text(size)}"
            parts.append(text if stride == 1 else f"{bracketed(text)} * {self.text(stride)}")
        shift = self.domain.shift(node, index)
        parts += [self.text(shift)] if shift != 0 else []
        width, stride = self.domain.turn(node, index)
        if width:
            turn = f"{width // 2} - col // {width // 2} % 2 * {width}"
            parts.append(turn if stride == 1 else f"({turn}) * {self.text(stride)}")
        found = set(re.findall(r"\w+", " ".join(parts)))
        parts += [f"{axis} * 0" for axis in varying if axis not in found]
        return "".join(f" + {part}" for part in parts)

    # -- outputs of one value, or one a row; the others are `Stores` --

    def store_number(self, output: Output) -> str:
        """The first program stores a scale that all programs compute, or its inverse."""
        scaled = output.node in self.scales
        name = f"{self.scales[output.node if scaled else arg(output.node, 0)]}_value"
        stored = name if scaled else f"tl.div_rn(1.0, {name})"
        return f"tl.store({self.pointers[id(output)]}, {stored}, mask=pid == 0)"

    def store_row(self, output: Output) -> list[str]:
        index = self.domain.row_index(output.node)
        assert index is not None
        self.outer_lines = []
        value = self.value(output.node, index)
        where, dtype = self.offset(output.node, index, "row"), TRITON_DTYPE[output.node.meta["val"].dtype]
        store = f"tl.store({self.pointers[id(output)]}{where}, {value}.to({dtype}){guarded(self.masks.row)})"
        return [*self.outer_lines, store]

    # -- text --

    def name(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def text(self, expr: sympy.Expr) -> str:
        """An integer expression. Symbols become parameters."""
        for symbol in sorted(expr.free_symbols, key=str):
            ours = sympy.Symbol(f"n{len(self.symbols)}", integer=True, positive=True)
            self.symbols.setdefault(symbol, ours)
        return bracketed(integer(expr.subs(self.symbols, simultaneous=True)))
