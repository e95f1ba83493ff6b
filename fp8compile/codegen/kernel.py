"""Group -> the source of one Triton kernel.

    one pass                                  with sums over rows (a norm)

    a program is a tile [BLOCK_R, BLOCK_C]    a program is a block of BLOCK_R whole rows
        load, compute, store                      for each pass: for each tile: load, accumulate
                                                  for each tile: load, compute, store
                                              or, where a tile holds whole rows (`blocks.whole_rows`):
                                                  load, sum up, compute, store

A program that collects sums or amaxes of columns takes several blocks of rows, one after the other
(`blocks.walk`); what varies with the column alone is loaded before.

A program of one pass may also take a *span* of columns, strip by strip, where a tile of 128 x 128 elements is
too much for the registers. It walks over the strips twice: for the amaxes of the span's rows, then the rest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import sympy
from torch.fx import Node

from ..ir import ops
from ..ir.fx_utils import arg
from . import blocks
from .block_scales import Tiles, magnitude
from .expressions import TRITON_DTYPE, converts_by_ptx, number_text, rounded, widens_by_ptx
from .group import Group, Output, statistics_of, title
from .indexing import sizes
from .scales import SPAN, Scale, loaded_scale
from .stores import Stores
from .text import MOST_COLUMNS, Masks, dtype_name, guarded, indented, kept
from .values import Values


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


class Writer(Values):
    def __init__(self, group: Group):
        self.whole, self.walk = blocks.whole_rows(group), blocks.walk(group)
        self.looping = bool(group.passes) and not self.whole
        fixed: tuple[str, ...] = ("row" if self.looping or group.span else "col", "one")
        if self.whole and group.domain.rows == 1:
            fixed = ()  # a row and its sums look like values that no row changes
        width = blocks.configurations(group)[0][1] if self.whole else MOST_COLUMNS
        super().__init__(group, Masks.of(group.domain, width), fixed)
        device = group.outputs[0].node.meta["val"].device
        self.converts_by_ptx = converts_by_ptx(device)
        if widens_by_ptx(device) and group.domain.columns != 1:  # two at a time
            self.by_ptx = group.sole_inputs
        self.scales: dict[Node, str] = {}
        self.read: list[Node] = []  # what the kernel reads of them, in the order of its parameters
        for node, scale in group.scales.items():
            self.scales[node] = f"s{len(self.read)}"
            self.read += scale.read
        # copies that a kernel of their own makes
        self.made = [output for output in group.stored if blocks.made_of(output, group) is not None]
        self.pointers = {
            id(output): f"y{i}" for i, output in enumerate(group.stored) if output not in self.made
        }
        self.means: dict[Node, str] = {}
        self.spans: dict[Scale, str] = {}  # scales of the rows of a span

    # -- the whole --

    def write(self) -> Kernel:
        group, columns = self.group, self.text(self.domain.columns)
        body = ["pid = tl.program_id(0).to(tl.int64)", *self.position(columns)]
        for node, scale in group.scales.items():
            if scale.granularity == "one":
                body += loaded_scale(scale, self.scales[node])
        body += [self.store_number(output) for output in group.with_content("number")]
        stores = Stores(self)
        if self.looping:
            body += self.looped(stores)
        elif group.span:
            body += self.spanned(stores)
        else:
            body += self.tiled(stores)
        body += stores.last
        text = "\n".join(indented([*self.comments(), *body]))
        parameters = self.parameters()
        name = f"{title(group)}_{hashlib.sha256(f'{parameters}{text}'.encode()).hexdigest()[:8]}"
        imports = ["import triton", "import triton.language as tl"]
        if "libdevice." in text:  # by this name Inductor imports it in the code that it copies kernels to
            imports.append("from triton.language.extra import libdevice")
        source = "\n".join([*imports, "", "", "@triton.jit", f"def {name}({parameters}):", text, ""])
        return Kernel(name, source, group, tuple(self.read), tuple(self.symbols))

    def position(self, columns: str) -> list[str]:
        """Where a program begins."""
        block = "strip" if self.walk > 1 else "block"
        if self.group.passes:
            return [f"{block} = pid", *(["start = 0"] if self.whole else [])]
        width, start = (self.group.span, "span") if self.group.span else ("BLOCK_C", "start")
        tiles = f"tiles = ({columns} + {width} - 1) // {width}"
        return [tiles, f"{block} = pid // tiles", f"{start} = pid % tiles * {width}"]

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
        widths = [
            f"width{i}"
            for i, output in enumerate(group.stored)
            if output.spaced and id(output) in self.pointers
        ]
        return ", ".join([*names, *(f"{x}: tl.constexpr" for x in (*widths, "BLOCK_R", "BLOCK_C"))])

    def comments(self) -> list[str]:
        """Comments: inputs and scales of blocks with dtype and shape, outputs with content and dtype."""
        lines = []
        scales = self.group.scales
        tiled = {node: name for node, name in self.scales.items() if scales[node].granularity == "tile"}
        for node, name in {**self.inputs, **tiled}.items():
            shape = ", ".join(self.text(size).strip("()") for size in sizes(node))
            lines.append(f"# {name}: {dtype_name(node.meta['val'].dtype)} [{shape}]")
        for output in (x for x in self.group.stored if id(x) in self.pointers):
            node, scale = output.replaces if output.content == "blocks" else output.node, output.scale
            dtype = dtype_name(output.dtype or node.meta["val"].dtype)
            lines.append(f"# {self.pointers[id(output)]}: {output.content} {dtype}")
            if scale is not None and scale.granularity != "one":
                lines[-1] += f", a scale for {scale.rows or 'all'} x {scale.columns or 'all'}"
        return lines  # not listed: single scales (s), float32; amax, int32 bits of a float32; sums, float32

    def rows(self) -> list[str]:
        """The numbers of the rows. In a padded order they are read from memory: row `-2 - source` belongs to
        no group, so it is computed, but does not count."""
        walk = self.numbers("[:, None]")
        if self.domain.order is None:
            inside = f"row_inside = row < {self.text(self.domain.rows)}"
            return [f"row = {walk}", *([inside] if self.masks.row else [])]
        return [
            f"walk = {walk}",
            f"source = tl.load(order + walk, mask=walk < {self.text(self.domain.walked)}, other=-1)",
            "row = tl.where(source < -1, -2 - source, source).to(tl.int64)",
            "row_inside = source != -1",
            "row_counts = source >= 0",
        ]

    def numbers(self, axes: str) -> str:
        """The numbers of the rows of the block at hand, 64-bit."""
        numbers = f"block * BLOCK_R + tl.arange(0, BLOCK_R){axes}"
        return numbers if self.walk == 1 else f"({numbers}).to(tl.int64)"  # Triton's interpreter: 32-bit

    def columns(self) -> list[str]:
        lines = ["col = start + tl.arange(0, BLOCK_C)[None, :].to(tl.int64)"]
        return [*lines, *([f"col_inside = col < {self.text(self.domain.columns)}"] if self.masks.col else [])]

    def inside(self) -> list[str]:
        """Masks of rows and columns."""
        lines = ["inside = row_inside & col_inside"] if self.masks.inside == "inside" else []
        return [*lines, "counts = row_counts & col_inside"] if self.masks.counts == "counts" else lines

    # -- one tile, or several in a column --

    def tiled(self, stores: Stores) -> list[str]:
        """A tile of a program, which holds whole rows if there are sums over rows."""
        for node in sorted(self.group.levels, key=self.group.levels.__getitem__):
            self.lines += self.known(node, self.term(node))
        stored = stores.write()
        self.lines += stored
        for output in self.group.with_content("row"):
            self.lines.append(self.store_row(output))
        tile = [*self.rows(), *self.inside(), *self.lines]
        if self.walk > 1:  # whole rows are loaded while those before them are computed
            last = f"({self.text(self.domain.walked)} + BLOCK_R - 1) // BLOCK_R"
            steps = f"strip * {self.walk}, tl.minimum((strip + 1) * {self.walk}, {last})"
            steps = f"tl.range({steps}, num_stages=2)" if self.whole else f"range({steps})"
            tile = [*stores.before(), f"for block in {steps}:", *indented(tile)]
        return [*self.columns(), *self.outer_lines, *tile]

    # -- several tiles in a row --

    def looped(self, stores: Stores) -> list[str]:
        """Passes over a block of rows."""
        body, passes = self.rows(), self.group.passes
        self.eviction = "evict_last"  # read again soon
        for number in range(passes):
            nodes = [node for node, level in self.group.levels.items() if level == number]
            body += self.reduce(nodes, back=(passes - number) % 2 == 0)
        body += stores.before()
        self.lines, self.loop, self.outer_lines, self.eviction = [], {}, [], "evict_first"
        stored = stores.write()
        body += [*self.outer_lines, *self.over_columns([*self.lines, *stored], back=True)]
        self.outer_lines = []
        stored = [self.store_row(output) for output in self.group.with_content("row")]
        return [*body, *self.outer_lines, *stored]

    def over_columns(self, tile: list[str], back: bool) -> list[str]:
        """A loop over columns; `back`: from the last ones, which are still in the cache, to the first."""
        columns = self.text(self.domain.columns)
        tile = [*self.columns(), *self.inside(), *tile]
        if not back:
            return [f"for start in range(0, {columns}, BLOCK_C):", *indented(tile)]
        start = f"start = ({columns} - 1) // BLOCK_C * BLOCK_C - done"
        return [f"for done in range(0, {columns}, BLOCK_C):", *indented([start, *tile])]

    def reduce(self, nodes: list[Node], back: bool) -> list[str]:
        """One pass: all sums over rows that are known after it."""
        self.lines, self.loop, self.outer_lines = [], {}, []
        start, last = [], []
        for node in nodes:
            term, into = self.term(node), self.name("acc")
            if node.target is ops.amax_blocks:
                start.append(f"{into} = tl.zeros([BLOCK_R, BLOCK_C], tl.int32)")
                self.lines.append(f"{into} = tl.maximum({into}, {term})")
            else:
                start.append(f"{into} = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)")
                self.lines.append(f"{into} += {term}")
            last += self.known(node, into)
        return [*self.outer_lines, *start, *self.over_columns(self.lines, back), *last]

    def term(self, node: Node) -> str:
        """What a sum or an amax over rows takes of each element."""
        whole, part = statistics_of(node)
        value = self.whole_value(arg(whole, 0))
        if node.target is ops.amax_blocks:
            return magnitude(value, self.masks)
        if part == "var":
            value = f"({value} - {self.means[whole]}) * ({value} - {self.means[whole]})"
        return kept(self.masks.inside, value)

    def known(self, node: Node, terms: str) -> list[str]:
        """The statements that compute a sum or an amax over rows from its terms."""
        whole, part = statistics_of(node)
        name = self.reduced[node] = self.name("r")
        if node.target is ops.amax_blocks:
            return [f"{name} = tl.max({terms}, 1, keep_dims=True).to(tl.float32, bitcast=True)"]
        lines, total, size = [], f"tl.sum({terms}, 1, keep_dims=True)", self.text(self.domain.columns)
        if part == "mean":
            total = f"tl.div_rn({total}, {size} * 1.0)"
        elif part == "var":
            correction = whole.kwargs.get("correction", 1)
            total = f"tl.div_rn({total}, {size} - {number_text(float(correction))})"  # type: ignore[arg-type]
        if part == "mean" and whole is not node:  # the variance takes the mean before it is rounded
            self.means[whole] = self.name("mean")
            lines.append(f"{self.means[whole]} = {total}")
            total = self.means[whole]
        return [*lines, f"{name} = {rounded(total, node.meta['val'].dtype)}"]

    def spanned(self, stores: Stores) -> list[str]:
        """A pass over the strips of a span for the amaxes of its rows, and another one for the rest."""
        head = [*self.columns(), *self.inside()]
        tiles = Tiles(self, [])
        starts = tiles.amaxes_of_spans()
        passed = [*starts, *self.strips([*head, *self.lines, *tiles.lines])]
        tiles.lines.clear()
        tiles.scales_of_spans(self.pointers)
        self.spans = tiles.known
        self.lines, self.loop = [], {}
        stored = stores.write()
        tile = self.strips([*head, *self.lines, *stored])
        return [*self.rows(), *stores.before(), *self.outer_lines, *passed, *tiles.lines, *tile]

    @staticmethod
    def strips(lines: list[str]) -> list[str]:
        return [f"for strip in range(0, {SPAN}, BLOCK_C):", *indented(["start = span + strip", *lines])]

    # -- outputs of one value, or one a row; the others are `Stores` --

    def store_number(self, output: Output) -> str:
        """The first program stores a scale that all programs compute, or its inverse."""
        scaled = output.node in self.scales
        name = f"{self.scales[output.node if scaled else arg(output.node, 0)]}_value"
        stored = name if scaled else f"tl.div_rn(1.0, {name})"
        return f"tl.store({self.pointers[id(output)]}, {stored}, mask=pid == 0)"

    def store_row(self, output: Output) -> str:
        index = self.domain.index_of_row(output.node)
        value = self.value(output.node, index)
        where, dtype = self.offset(output.node, index, "row"), TRITON_DTYPE[output.node.meta["val"].dtype]
        return f"tl.store({self.pointers[id(output)]}{where}, {value}.to({dtype}){guarded(self.masks.row)})"
