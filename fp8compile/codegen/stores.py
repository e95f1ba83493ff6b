"""What a kernel stores of the values of a tile: FP8 copies, amaxes, sums, scales of blocks, values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .block_scales import Tiles, magnitude
from .expressions import TRITON_DTYPE, converted, number_text, saturates
from .group import Output
from .indexing import sizes, unravel, varies_with
from .text import both, bracketed, guarded, kept

if TYPE_CHECKING:
    from .kernel import Writer


class Stores:
    """Makes `lines`, the code after the values of the tile at hand, and `last`, that after all tiles of the
    program: amaxes are collected over all of them, and column sums and column amaxes if they lie below one
    another."""

    def __init__(self, writer: Writer):
        self.writer, self.walks = writer, writer.walk > 1
        self.several = writer.looping or bool(writer.group.span) or self.walks
        # beside sums of columns in registers, amaxes of tiles take one a row, most of it made by each thread
        self.by_row = self.walks and not writer.whole
        self.lines: list[str] = []
        self.last: list[str] = []
        self.quantized: dict[tuple, str] = {}
        self.rows, self.columns = writer.text(writer.domain.walked), writer.text(writer.domain.columns)

    def before(self) -> list[str]:
        """The statements before the first tile."""
        group, shape = self.writer.group, "[BLOCK_R, BLOCK_C]"
        width = "1" if self.by_row else "BLOCK_C"
        lines = [f"largest{i} = tl.zeros([BLOCK_R, {width}], tl.int32)" for i in range(len(group.amaxes))]
        if self.walks:
            names = [f"largest_of_column{i}" for i in range(len(group.column_amaxes))]
            lines += [f"{name} = tl.zeros({shape}, tl.int32)" for name in names]
            lines += [f"sum{i} = tl.zeros({shape}, tl.float32)" for i in range(len(group.sums))]
        return lines

    def write(self) -> list[str]:
        group = self.writer.group
        self.tiles = Tiles(self.writer, self.lines, self.writer.spans)
        if any(x not in self.writer.made for x in group.with_content("transposed")):
            self.lines.append(f"row_t = {self.writer.numbers('[None, :]')}")
            self.lines.append("col_t = start + tl.arange(0, BLOCK_C)[:, None].to(tl.int64)")
        for output in group.outputs:
            of_span = output.content == "blocks" and output.scale in self.writer.spans
            elsewhere = output.content in ("row", "number") or output in self.writer.made
            if not elsewhere and not of_span:  # those are the writer's own, or of another kernel
                getattr(self, f"store_{output.content}")(output, self.value(output))
        return self.lines

    def value(self, output: Output) -> str:
        """The value as a tile, also where the whole matrix is one number (the gradient of a sum)."""
        writer = self.writer
        value = writer.whole_value(output.node)
        if not any(varies_with(at) == "one" for (_, at), name in writer.outer.items() if name == value):
            return value
        widened = f"{value}_tile = tl.broadcast_to({value}, [BLOCK_R, BLOCK_C])"
        self.lines += [widened] if widened not in self.lines else []
        return f"{value}_tile"

    def pointer(self, output: Output) -> str:
        return self.writer.pointers[id(output)]

    def width(self, output: Output, columns: str) -> str:
        """The elements from one row of an FP8 copy to the next."""
        return f"width{self.writer.group.stored.index(output)}" if output.spaced else columns

    # -- by their content --

    def store_amax(self, output: Output, value: str) -> None:
        number = self.writer.group.amaxes.index(output)
        bits = magnitude(value, self.writer.masks)
        bits = f"tl.max({bits}, 1, keep_dims=True)" if self.by_row else bits
        self.largest(f"largest{number}", bits, self.several)
        self.last.append(f'tl.atomic_max(amax{number}, tl.max(largest{number}), sem="relaxed")')

    def store_column_amax(self, output: Output, value: str) -> None:
        number = self.writer.group.column_amaxes.index(output)
        into, largest = f"column_amax{number}", f"largest_of_column{number}"
        if output.groups is not None:
            self.tiles.amax_of_groups(into, value, output.groups, sizes(output.replaces))
            return
        self.largest(largest, self.tiles.magnitude(value), self.walks)
        mask = guarded(self.writer.masks.col)
        raised = f'tl.atomic_max({into} + col, tl.max({largest}, 0)[None, :]{mask}, sem="relaxed")'
        (self.last if self.walks else self.lines).append(raised)

    def largest(self, name: str, bits: str, collected: bool) -> None:
        self.lines.append(f"{name} = tl.maximum({name}, {bits})" if collected else f"{name} = {bits}")

    def store_blocks(self, output: Output, _value: str) -> None:
        assert output.scale is not None
        found, (where, mask) = self.tiles(output.scale), self.tiles.offset(output.scale)
        self.lines.append(f"tl.store({self.pointer(output)}{where}, {found}{guarded(mask)})")

    def store_sum(self, output: Output, value: str) -> None:
        sums, masks = self.writer.group.sums, self.writer.masks
        number, block = sums.index(output), "strip" if self.walks else "block"
        where = f"({block} * {len(sums)} + {number}) * {self.columns} + col"
        summed = kept(masks.inside, value)
        if self.walks:
            self.lines.append(f"sum{number} += {summed}")
            summed = f"sum{number}"
        (self.last if self.walks else self.lines).extend(
            [f"total = tl.sum({summed}, 0)[None, :]", f"tl.store(sums + {where}, total{guarded(masks.col)})"]
        )

    def store_value(self, output: Output, value: str) -> None:
        where = self.writer.offset(output.node, self.writer.domain.index(output.node), "row", "col")
        what = f"{value}.to({TRITON_DTYPE[output.node.meta['val'].dtype]})"
        mask = guarded(self.writer.masks.inside)
        self.lines.append(f"tl.store({self.pointer(output)}{where}, {what}{mask})")

    def store_copy(self, output: Output, value: str) -> None:
        fp8 = self.fp8(output, value)
        where = f"{self.pointer(output)} + row * {self.width(output, self.columns)} + col"
        self.lines.append(f"tl.store({where}, {fp8}{guarded(self.writer.masks.inside)})")

    def store_transposed(self, output: Output, value: str) -> None:
        fp8, masks = self.fp8(output, value), self.writer.masks
        columns_inside = f"(col_t < {self.columns})" if masks.col else ""
        inside = both(columns_inside, f"(row_t < {self.rows})" if masks.row else "")
        where = f"{self.pointer(output)} + col_t * {self.width(output, self.rows)} + row_t"
        self.lines.append(f"tl.store({where}, tl.trans({fp8}){guarded(inside)})")

    # -- FP8 --

    def fp8(self, output: Output, value: str) -> str:
        """The variable with the FP8 values, which several copies share."""
        key = (value, output.scale, output.dtype, output.fp8_max, output.divide)
        if key not in self.quantized:
            self.quantized[key] = self.quantize(output, value)
        return self.quantized[key]

    def quantize(self, output: Output, value: str) -> str:
        """value * scale, or value / scale, saturated; NaN where the value is infinite or NaN; zero outside of
        the matrix."""
        assert output.scale is not None and output.dtype is not None
        writer, lines, scale = self.writer, self.lines, self.scale(output)
        name, largest = writer.name("q"), number_text(float(output.fp8_max))
        # Triton's own division is approximate
        scaled = f"tl.div_rn({value}, {scale})" if output.divide else f"{value} * {scale}"
        if saturates(output.dtype) and output.fp8_max == torch.finfo(output.dtype).max:
            lines.append(f"{name} = tl.fma({value}, 0.0, {scaled})")  # infinity times zero is NaN
        else:
            lines.append(f"{name} = {scaled}")
            # by comparisons, which let NaN pass: Triton (#11111) miscompiles such min and max near the stores
            above = f"tl.where({name} < -{largest}, -{largest}, {name})"
            lines.append(f"{name} = tl.where({name} > {largest}, {largest}, {above})")
            lines.append(f'{name} = tl.where(tl.abs({value}) == float("inf"), float("nan"), {name})')
        inside = bracketed(kept(writer.masks.counts, name))
        lines.append(f"{name} = {converted(inside, output.dtype, writer.converts_by_ptx)}")
        return name

    def scale(self, output: Output) -> str:
        assert output.scale is not None
        node, granularity = output.scale.node, output.scale.granularity
        if granularity == "one":
            return f"{self.writer.scales[node]}_value"
        if granularity == "tile":
            return self.tiles.spread(output.scale)
        return self.writer.value(node, unravel(granularity, sizes(node)))
