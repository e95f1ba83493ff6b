"""Amaxes, scales and inverses of blocks in a kernel: one number for each block of a tile.

A tile [BLOCK_R, BLOCK_C] holds whole blocks of `rows` x `columns`, so amaxes need no pass of their own:

    m1 = the bits of magnitudes, 0 outside of the matrix                  [BLOCK_R, BLOCK_C]
    t2 = max(reshape(m1, [BLOCK_R, BLOCK_C // 32, 32]), 2)                [BLOCK_R, BLOCK_C // 32]
    t3 = the scale of t2
    value * reshape(broadcast(t3[:, :, None], [BLOCK_R, BLOCK_C // 32, 32]), [BLOCK_R, BLOCK_C])

Each copy of a tensor, row by row or transposed, has its own blocks, and is made of the same registers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import sympy
from torch.fx import Node

from ..ir import ops
from ..ir.fx_utils import arg
from ..ir.grouped import ALIGN
from .indexing import quotient, size_of
from .scales import Scale, computed_scale, of_amax
from .text import Masks, both, guarded, kept

if TYPE_CHECKING:
    from .kernel import Writer


class Tiles:
    """Appends the code for scales of blocks to `lines`, after the values of the tile at hand."""

    def __init__(self, writer: Writer, lines: list[str], known: dict[Scale, str] | None = None):
        self.writer, self.lines = writer, lines
        self.known = dict(known or {})
        self.magnitudes: dict[str, str] = {}
        self.numbered: set[str] = set()

    def __call__(self, scale: Scale) -> str:
        """The variable with the blocks' scales, inverses or amaxes: [BLOCK_R / rows, BLOCK_C / columns]."""
        node, writer = scale.node, self.writer
        if scale in self.known:
            return self.known[scale]
        if node not in writer.group.tiles:
            where, mask = self.offset(scale)
            name = writer.name("t")
            self.lines.append(f"{name} = tl.load({writer.scales[node]}{where}{guarded(mask, '1.0')})")
        elif node.target is ops.amax_blocks:
            bits = self.magnitude(writer.whole_value(arg(node, 0)))
            name = writer.name("t")
            largest = _largest(bits, scale.rows, scale.columns)
            self.lines.append(f"{name} = {largest}.to(tl.float32, bitcast=True)")
        else:
            operand, name = self(replace(scale, node=arg(node, 0))), writer.name("t")
            self.lines += computed_scale(node, operand, name)
        self.known[scale] = name
        return name

    def spread(self, scale: Scale) -> str:
        """An expression for the scales of blocks, spread to one for each element: [BLOCK_R, BLOCK_C]."""
        name, rows, columns = self(scale), scale.rows, scale.columns
        if rows == 1 and columns == 1 or self.writer.group.span and scale.of_span:
            return name
        axes = "[:, :, None]" if rows == 1 else "[:, None, :]" if columns == 1 else "[:, None, :, None]"
        return f"tl.reshape(tl.broadcast_to({name}{axes}, {_shape(rows, columns)}), [BLOCK_R, BLOCK_C])"

    def magnitude(self, value: str) -> str:
        if value not in self.magnitudes:
            self.magnitudes[value] = self.writer.name("m")
            self.lines.append(f"{self.magnitudes[value]} = {magnitude(value, self.writer.masks)}")
        return self.magnitudes[value]

    def offset(self, scale: Scale) -> tuple[str, str]:
        """(` + ..`, the offset from the first scale to those of the tile's blocks; the blocks' mask)."""
        value, text = scale.node.meta["val"], self.writer.text
        if scale.groups is not None:
            group = self.groups_of_rows(int(value.shape[0]), scale.groups)
            mask = both(f"({group} < {value.shape[0]})", self.writer.masks.col)
            return f" + {group} * {text(size_of(value.shape[1]))} + col", mask
        blocks = (self.numbers("row", scale.rows), self.numbers("col", scale.columns))
        offset, mask, masks = "", "", self.writer.masks
        for name, d in zip(blocks, (1, 0) if scale.flipped else (0, 1), strict=True):
            stride = size_of(value.stride()[d])
            offset += f" + {name}" if stride == 1 else f" + {name} * {text(stride)}"
            if name == "row" and self.writer.domain.order is not None:
                mask = both(mask, "row_inside")
            elif not name.startswith("(span") and (masks.row if name.startswith("row") else masks.col):
                # not for a span: each begins inside of the matrix
                mask = both(mask, f"({name} < {text(size_of(value.shape[d]))})")
        return offset, mask

    def numbers(self, axis: str, size: int) -> str:
        """The variable with the numbers of the tile's blocks of `size` rows or columns."""
        if size == 1:
            return axis
        if axis == "col" and size == self.writer.group.span:
            return f"(span // {size})"
        name = f"{axis}_{size}"
        if name not in self.numbered:
            self.numbered.add(name)
            if axis == "row":
                text = f"block * BLOCK_R // {size} + tl.arange(0, BLOCK_R // {size})[:, None]"
            else:
                text = f"start // {size} + tl.arange(0, BLOCK_C // {size})[None, :]"
            self.lines.append(f"{name} = {text}.to(tl.int64)")
        return name

    # -- groups: one number for each column of a group of rows --

    def groups_of_rows(self, count: int, groups: Node | int) -> str:
        """The variable with the groups of the tile's rows, [BLOCK_R / ALIGN, 1]; `count` stands for none."""
        block = self.numbers("row", ALIGN)
        name = f"group_{groups if isinstance(groups, int) else 'of_row'}"
        if name not in self.numbered:
            self.numbered.add(name)
            if isinstance(groups, int):
                text = f"{block} * {ALIGN} // {groups}"
            else:
                last = self.writer.text(quotient(self.writer.domain.walked, ALIGN))
                text = f"tl.load(groups + {block}, mask={block} < {last}, other={count})"
            self.lines.append(f"{name} = {text}")
        return name

    def amax_of_groups(
        self, into: str, value: str, groups: Node | int, shape: tuple[sympy.Expr, ...]
    ) -> None:
        """Raise the amaxes [E, C] at `into` by those of the tile's columns in each group: all rows at once
        where the tile lies in one group."""
        bits, count, wide = self.magnitude(value), int(shape[0]), self.writer.text(shape[1])
        group = self.groups_of_rows(count, groups)
        raised, inside = 'tl.atomic_max({} + {} * {} + col, {}{}, sem="relaxed")', self.writer.masks.col
        parts = f"tl.max(tl.reshape({bits}, [BLOCK_R // {ALIGN}, {ALIGN}, BLOCK_C]), 1)"
        self.lines += [
            f"first = tl.min({group})",
            f"if first == tl.max({group}):",
            f"    if first < {count}:",
            "        " + raised.format(into, "first", wide, f"tl.max({bits}, 0)[None, :]", guarded(inside)),
            "else:",
            "    " + raised.format(into, group, wide, parts, guarded(both(inside, f"({group} < {count})"))),
        ]

    # -- spans: one number for each row of 128 columns --

    def amaxes_of_spans(self) -> list[str]:
        """Writes how a strip raises the amaxes of a span's rows; returns the lines before the strips."""
        before = []
        for node in self.writer.group.tiles:
            if node.target is ops.amax_blocks and of_amax(node).of_span:
                bits = self.magnitude(self.writer.whole_value(arg(node, 0)))
                into = self.writer.name("acc")
                before.append(f"{into} = tl.zeros([BLOCK_R, BLOCK_C], tl.int32)")
                self.lines.append(f"{into} = tl.maximum({into}, {bits})")
                self.known[of_amax(node)] = into
        return before

    def scales_of_spans(self, pointers: dict[int, str]) -> None:
        """Writes the lines after the strips: the amaxes, the scales (computed from amaxes, or loaded), and
        the stores of those that are outputs."""
        for scale, into in list(self.known.items()):
            name = self.known[scale] = self.writer.name("t")
            self.lines.append(f"{name} = tl.max({into}, 1, keep_dims=True).to(tl.float32, bitcast=True)")
        for output in self.writer.group.outputs:
            if output.scale is not None and output.scale.of_span:
                name = self(output.scale)
                if output.content == "blocks":
                    where, mask = self.offset(output.scale)
                    self.lines.append(f"tl.store({pointers[id(output)]}{where}, {name}{guarded(mask)})")


def magnitude(value: str, masks: Masks) -> str:
    """An expression for the bits of magnitudes, int32. They are ordered like the magnitudes, with NaN above
    infinity. 0 outside of the matrix, and in rows of no group."""
    return kept(masks.counts, f"tl.abs({value}).to(tl.int32, bitcast=True)", "0")


def _largest(bits: str, rows: int, columns: int) -> str:
    """An expression for the largest bits in each block of a tile."""
    if rows == 1 and columns == 1:
        return bits
    blocks = f"tl.reshape({bits}, {_shape(rows, columns)})"
    if rows == 1:
        return f"tl.max({blocks}, 2)"
    return f"tl.max({blocks}, 1)" if columns == 1 else f"tl.max(tl.max({blocks}, 3), 1)"


def _shape(rows: int, columns: int) -> str:
    high = ["BLOCK_R"] if rows == 1 else [f"BLOCK_R // {rows}", str(rows)]
    wide = ["BLOCK_C"] if columns == 1 else [f"BLOCK_C // {columns}", str(columns)]
    return f"[{', '.join(high + wide)}]"
