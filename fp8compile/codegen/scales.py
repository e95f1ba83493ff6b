"""The scales of a cast: which elements of the matrix share one, and how a kernel gets them.

    one     a scale for the whole matrix, [1]: from memory, or made by each program of the amax in memory
    row     a scale a row: made by an earlier pass over the row (like a norm's sum), or from memory
    col     a scale a column: from memory; its amax was taken in another walk
    tile    a scale for `rows` x `columns` elements, whole blocks in a tile: made in place, or from memory

In the graph, a scale to be computed is `current_scale(amax_blocks(x, ..))`, perhaps permuted for square
blocks; a scale from memory is a tensor that was computed earlier. A scale computed in place equals that of
`ir.scale.scale_of` bit for bit: reach / amax in float64, rounded to float32, is the correctly rounded float32
quotient, because both numbers are float32 and 53 bits are more than 2 * 24 (Figueroa, "When is double
rounding innocuous?", 1995). So no kernel divides in float64, which some GPUs do 64 times slower.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from ..ir import grouped, merged, ops
from ..ir.fx_utils import PERMUTES, arg, value
from ..ir.scale import EXPONENT, LARGEST, MANTISSA, SMALLEST
from .expressions import number_text

FROM_AMAX = (ops.current_scale, ops.served_inverse, ops.inverse)  # elementwise, from amaxes or from scales
MOST = 128  # elements of a block along one side that a tile holds
SPAN = 128  # columns that a program takes strip by strip, see `kernel`


@dataclass(frozen=True)
class Scale:
    """One scale for `rows` x `columns` elements of the matrix [R, C]; 0 stands for all rows or all columns.

    `node`: float32 [1], or one a block, [blocks of rows, blocks of columns]; `flipped`: [blocks of columns,
    blocks of rows]. `groups`: the group of each `rows` rows, or how many rows a group has if all have equally
    many; then `node` is [groups, columns].
    """

    node: Node
    rows: int = 0
    columns: int = 0
    flipped: bool = False
    groups: Node | int | None = None

    @property
    def read(self) -> tuple[Node, ...]:
        """What a kernel reads of a scale for the whole matrix: the scale, or what each program computes it
        from: an amax or, where several tensors have one scale, the amaxes or the scales of all of them."""
        if not self.computed:
            return (self.node,)
        source = arg(self.node, 0)
        if self.node.target is merged.least:
            return tuple(source)
        return tuple(arg(source, 0)) if source.target is merged.largest else (source,)

    @property
    def computed(self) -> bool:
        return self.granularity == "one" and self.node.target in (ops.current_scale, merged.least)

    @property
    def granularity(self) -> str:
        """one, row, col or tile; none for blocks that no kernel is written for."""
        known = {(0, 0): "one", (1, 0): "row", (0, 1): "col"}.get((self.rows, self.columns))
        whole = all(0 < size <= MOST and size & (size - 1) == 0 for size in (self.rows, self.columns))
        return known or ("tile" if whole else "none")

    @property
    def of_span(self) -> bool:
        """True if there is one scale for each row of a span."""
        return (self.rows, self.columns) == (1, SPAN)


def of_cast(scale: Node, transposed: bool, block: tuple[int, int]) -> Scale:
    """The scale of a copy; `block` counts rows and columns of that copy."""
    rows, columns = reversed(block) if transposed else block
    if not rows and not columns:
        return Scale(scale)
    if scale.target is grouped.of_groups:
        return Scale(arg(scale, 0), rows, columns, groups=arg(scale, 1))
    flipped = transposed
    while scale.target in PERMUTES and value(scale).dim() == 2:
        scale, flipped = arg(scale, 0), not flipped
    return _banded(Scale(scale, rows, columns, flipped))


def of_amax(node: Node) -> Scale:
    """An `amax_blocks`, or a scale or inverse of it, with the block of the matrix that each number is for."""
    rows, columns = arg(amax_of(node), 2)  # type: ignore[arg-type]
    transposed = bool(arg(amax_of(node), 1))  # type: ignore[arg-type]
    return Scale(node, columns, rows, True) if transposed else _banded(Scale(node, rows, columns, False))


def _banded(scale: Scale) -> Scale:
    """Blocks of one column that are too tall for a tile, as groups of equally many rows."""
    tall = scale.granularity == "none" and scale.columns == 1 and scale.rows % grouped.ALIGN == 0
    return Scale(scale.node, grouped.ALIGN, 1, groups=scale.rows) if tall and not scale.flipped else scale


def amax_of(node: Node) -> Node | None:
    """The `amax_blocks` that a scale, or the inverse of one, is computed from."""
    while node.op == "call_function" and node.target in FROM_AMAX:
        node = arg(node, 0)
    return node if node.op == "call_function" and node.target is ops.amax_blocks else None


def made_in_place(scale: Scale, source: Node) -> bool:
    """True if the walk that casts `source` can compute this scale."""
    amax = amax_of(scale.node)
    if amax is None or arg(amax, 0) is not source or scale.groups is not None:
        return False
    own = of_amax(amax)
    return scale.granularity in ("row", "tile") and (own.rows, own.columns) == (scale.rows, scale.columns)


def chain(amax: Node) -> list[Node]:
    """An `amax_blocks`, and the scales and inverses that are computed from it."""
    found = [amax]
    for node in found:
        found += [user for user in node.users if user.target in FROM_AMAX and user not in found]
    return found


def loaded_scale(scale: Scale, name: str) -> list[str]:
    """Lines that set `{name}_value` to a scale for the whole matrix. `name`: the first pointer to what it is
    read or computed from, `s3`; others follow it."""
    loads = [f"tl.load(s{int(name[1:]) + i})" for i in range(len(scale.read))]
    if not scale.computed or scale.node.target is merged.least:
        return [f"{name}_value = {_folded('minimum', loads)}"]
    if len(loads) > 1:  # as integers: the bits of NaN are above those of all numbers
        loads = [_folded("maximum", [f"{x}.to(tl.int32, bitcast=True)" for x in loads])]
    lines = computed_scale(scale.node, f"{name}_amax", f"{name}_value")
    return [f"{name}_amax = {loads[0]}.to(tl.float32, bitcast=True)", *lines]


def _folded(function: str, values: Sequence[str]) -> str:
    return functools.reduce(lambda a, b: f"tl.{function}({a}, {b})", values)


def computed_scale(node: Node, operand: str, name: str) -> list[str]:
    """Lines that set `name` to the scales of `operand`, if these are amaxes, or to the inverses of scales."""
    if node.target is ops.inverse:
        return [f"{name} = tl.div_rn(1.0, {operand})"]
    served = node.target is ops.served_inverse
    lines = (_served_inverse if served else _current_scale)(node, operand, name)
    if len(node.args) > 3 and node.args[3]:
        bits = f"{name}.to(tl.int32, bitcast=True)"
        power = f"({bits} + {MANTISSA}) & {EXPONENT}" if served else f"{bits} & {EXPONENT}"  # up, or down
        lines.append(f"{name} = ({power}).to(tl.float32, bitcast=True)")
    return lines


def _current_scale(node: Node, operand: str, name: str) -> list[str]:
    """`ir.scale.scale_of`, before it is rounded to a power of two."""
    reach, largest, smallest = arg(node, 1) / 2.0 ** arg(node, 2), number_text(LARGEST), number_text(SMALLEST)
    raised = f"tl.where({name} < {smallest}, {smallest}, {name})"
    return [
        f"{name} = tl.div_rn({number_text(reach)}, {operand})",
        f"{name} = tl.where({name} > {largest}, {largest}, {raised})",
        f'{name} = tl.where(({operand} > 0) & ({operand} < float("inf")), {name}, 1.0)',
    ]


def _served_inverse(node: Node, operand: str, name: str) -> list[str]:
    """`ir.scale.served_inverse_of`, before that, by comparisons, which let NaN pass."""
    fp8_max, least = number_text(float(arg(node, 1))), number_text(float(arg(node, 2)))
    return [
        f"{name} = tl.div_rn(tl.where({operand} < {least}, {least}, {operand}), {fp8_max})",
        f'{name} = tl.where({operand} < float("inf"), {name}, 1.0)',
    ]
