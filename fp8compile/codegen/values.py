"""The values of a kernel's tile: each is loaded, or computed from others, where it is used first.

Values are named after their order (`v3`), inputs `x0`, scales `s0`, outputs `y0`. Offsets are 64-bit. Row
numbers are [BLOCK_R, 1], column numbers [1, BLOCK_C], so a value that varies with one of them only is
computed once a row or column.
"""

from __future__ import annotations

import re

import sympy
import torch
from torch.fx import Node

from ..ir.fx_utils import FLOATS, aten
from .composites import composite
from .expressions import expression, number_text, prelude, widened
from .group import Group
from .indexing import VIEWS, Index, in_memory, varies_with
from .scales import FROM_AMAX, computed_scale
from .text import Masks, bracketed, guarded, integer


class Values:
    """Writes values into `lines`, those of the tile at hand, or into `outer_lines`, before the loop over
    tiles. `fixed`: what a value varies with if that loop, over columns or over rows, leaves it as it is."""

    def __init__(self, group: Group, masks: Masks, fixed: tuple[str, ...]):
        self.group, self.domain, self.masks, self.fixed = group, group.domain, masks, fixed
        self.inputs = {node: f"x{i}" for i, node in enumerate(group.inputs)}
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}  # as the kernel calls them: n0, n1, ..
        self.count = 0
        self.outer: dict[tuple[Node, Index], str] = {}  # values before the loop
        self.outer_lines: list[str] = []
        self.loop: dict[tuple[Node, Index], str] = {}  # values of the tile at hand
        self.lines: list[str] = []
        self.reduced: dict[Node, str] = {}  # sums over rows that are known by now
        self.by_ptx: set[Node] = set()  # inputs that PTX makes float32
        self.eviction = ""  # what happens in the cache to what is read

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
            if node.target in (*VIEWS, aten.index.Tensor, aten.slice.Tensor):
                return texts[0]
            name = f"v{self.count + 1}"
            if node.target is aten.cat.default:
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
        inner = varies_with(index) not in self.fixed
        (self.loop if inner else self.outer)[key] = name
        lines = self.lines if inner else self.outer_lines
        lines += [*(line for line in before if line not in lines), f"{name} = {text}"]
        return name

    def whole_value(self, node: Node) -> str:
        """The name of the value of a node that holds the matrix."""
        return self.value(node, self.domain.index(node))

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
        if self.eviction and self.domain.is_full(node):
            mask += f', eviction_policy="{self.eviction}"'
        text = f"tl.load({self.inputs[node]}{self.offset(node, index, *axes)}{mask})"
        if dtype in FLOATS:
            return widened(text, node in self.by_ptx)
        return f"{text} != 0" if dtype == torch.bool else text

    def offset(self, node: Node, index: Index, *varying: str) -> str:
        """` + ...`: the offset from a tensor's first element to those at `index`. It has an element for each
        row or column (`varying`), even if a matrix of one row or column has no term for them."""
        parts = []
        for (axis, divisor, size), stride in self.domain.address(node, index).items():
            if isinstance(axis, Node):
                axis = self.value(axis, self.domain.index_of_row(axis))
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
