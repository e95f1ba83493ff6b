"""Copies that the step of an optimizer writes while it updates the weights.

A cast in forward reads each weight twice, for its amax and for the cast. A step that casts needs the scale
before it has all of the new weight. So it takes the scale of the copies that are there: scales are powers of
two, and as a weight's amax moves by less than a percent a step, its scale changes once in hundreds of steps.
The step raises the amax of what it writes, and `settle` casts those weights again whose scale is another one
now. The copies have the bits of a cast by the current amax, always, and no host waits for a device.

`casts_in_step` finds where the copies of a graph lie. It is about whole matrices in row-major order with one
scale; weights of any other graph are cast in forward.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from ...codegen.expressions import converts_by_ptx, saturates
from ...config.recipe import WHOLE
from ...extension import CastInStep
from ...ir import merged, ops
from ...ir.fx_utils import VIEWS, arg, behind, call_function, value
from ...ir.scale import inverse_of, scale_of
from ...ir.schemas import copies_at
from .hoist import Hoisted

UNIT = 128  # elements of a row that an optimizer takes together (`optim.states.BLOCK`)
RECAST = (64, 128, 8)  # rows and columns of a tile, warps
PROGRAMS = 1024  # most of which find nothing to do


class WeightPlace(NamedTuple):
    """The copies of a weight [R, C]: `rows`, [R, C] from a row on of a copy of the graph; `columns`, [C, R]
    from a column on. (copy, first row or column); None: there is none in this layout."""

    weight: int  # which of the graph's weights
    rows: tuple[int, int] | None
    columns: tuple[int, int] | None


class Shared(NamedTuple):
    """One scale: which copy of the graph is its inverse, the format's largest number, whose scale it is."""

    inverse: int
    fp8_max: float
    margin: int
    places: tuple[WeightPlace, ...]


def casts_in_step(hoisted: Hoisted) -> tuple[Shared, ...]:
    """Where a step can write all copies of a graph. Empty if there is one that it cannot write."""
    (output,) = hoisted.graph.find_nodes(op="output")
    copies = {node: i for i, node in enumerate(output.all_input_nodes)}
    weights = list(hoisted.graph.find_nodes(op="placeholder"))
    casts: dict[tuple[Node, Node], dict[bool, tuple[int, int]]] = {}  # by scale, weight, transposed?
    inverses: dict[Node, int] = {}
    for node, copy in copies.items():
        if call_function(node, (ops.inverse,)):
            inverses[arg(node, 0)] = copy
            continue
        parts = list(_parts(node))
        if not parts:  # such as an amax
            return ()
        for weight, scale, transposed, first in parts:
            if weight is None or weight not in weights or transposed in casts.get((scale, weight), ()):
                return ()
            casts.setdefault((scale, weight), {})[transposed] = copy, first
    of_scale: dict[Node, list[WeightPlace]] = {}
    for (scale, weight), its in casts.items():
        of_scale.setdefault(scale, []).append(
            WeightPlace(weights.index(weight), its.get(False), its.get(True))
        )
    read = [place.weight for places in of_scale.values() for place in places]
    if of_scale.keys() != inverses.keys() or len(read) != len(set(read)) or len(read) != len(weights):
        return ()
    found = []
    for scale, places in of_scale.items():
        amax, fp8_max, margin, power_of_2 = (arg(scale, i) for i in range(4))
        amaxes = arg(amax, 0) if call_function(amax, (merged.largest,)) else [amax]
        own = [behind(arg(x, 0), VIEWS) if call_function(x, (ops.amax,)) else None for x in amaxes]
        if not power_of_2 or sorted(map(id, own)) != sorted(id(weights[place.weight]) for place in places):
            return ()
        found.append(Shared(inverses[scale], fp8_max, margin, tuple(places)))
    return tuple(found)


def _parts(copy: Node) -> Iterator[tuple[Node | None, Node, bool, int]]:
    """(weight, scale, transposed, first row or column) of the casts that are put together in a copy. The
    weight is None where a step cannot write the cast."""
    item = 0
    if call_function(copy, (operator.getitem,)):
        copy, item = arg(copy, 0), arg(copy, 1)
    if call_function(copy, (merged.both_sides, merged.side_by_side)):
        dim = item if copy.target is merged.both_sides else arg(copy, 1)
        first = 0
        for part in arg(copy, item):
            for weight, scale, transposed, _ in _parts(part):
                yield weight if dim == transposed else None, scale, transposed, first
            first += value(part).shape[dim]
        return
    for made in copies_at(copy)[item : item + 1]:
        source = value(made.source)
        fits = made.block == WHOLE and made.rows is None and not made.divide
        weight = behind(made.source, VIEWS)
        fits = fits and source.dim() == 2 and source.shape[1] == value(weight).shape[-1]
        fits = fits and source.is_contiguous() and value(weight).is_contiguous()
        fits = fits and not source.shape[0] % 16 and not source.shape[1] % UNIT  # nothing is padded
        yield weight if fits else None, made.scale, made.transposed, 0


class PendingCopies:
    """Copies that a step writes, to the memory `copies`. `used`: the inverses of the scales by which it
    casts, float32 [scales]. `casts`: what it has to do with each weight."""

    def __init__(
        self, shared: tuple[Shared, ...], weights: Sequence[Tensor], copies: Sequence[Tensor], used: Tensor
    ):
        self.shared, self.copies = shared, copies
        self.amaxes = used.new_zeros(len(weights), dtype=torch.int32)  # bits of magnitudes
        self.casts: dict[int, CastInStep] = {}
        for i, one in enumerate(shared):
            for weight, rows, columns in one.places:
                height = weights[weight].numel() // weights[weight].shape[-1]
                self.casts[weight] = CastInStep(
                    copies[rows[0]].narrow(0, rows[1], height) if rows else None,
                    copies[columns[0]].narrow(1, columns[1], height) if columns else None,
                    used[i : i + 1],
                    self.amaxes[weight : weight + 1],
                    one.fp8_max,
                )

    def settle(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """The copies, after the step: cast again where the scale is another one now."""
        for one in self.shared:
            its = [place.weight for place in one.places]
            amax = self.casts[its[0]].amax
            if len(its) > 1:
                amax = torch.stack([self.amaxes[j] for j in its]).amax(0, keepdim=True)
            for i in its:
                weight = weights[i].detach().view(-1, weights[i].shape[-1])
                function = launch_recast if weight.is_cuda else recast
                function(weight, self.casts[i], amax, one.margin, self.copies[one.inverse])
        return self.copies


def recast(weight: Tensor, cast: CastInStep, amax: Tensor, margin: int, inverse: Tensor) -> None:
    """Write `inverse`, that of the scale from the amax (bits). If the copies have another one, cast the
    weight [R, C] again."""
    scale = scale_of(amax.view(torch.float32), cast.fp8_max, margin, True)
    inverse.copy_(inverse_of(scale))
    if not torch.equal(inverse, cast.inverse):
        ops.cast_into(weight, scale, cast.fp8_max, cast.rows, cast.columns)


def launch_recast(weight: Tensor, cast: CastInStep, amax: Tensor, margin: int, inverse: Tensor) -> None:
    """`recast` on a GPU. Its programs leave at once where the scale is the same."""
    from .triton_recast import fp8_recast

    height, width = weight.shape
    block_r, block_c, warps = RECAST
    tiles = -(-height // block_r) * -(-width // block_c)
    with torch.cuda.device_of(weight):
        fp8_recast[min(tiles, PROGRAMS),](
            weight,
            cast.rows,
            cast.columns,
            inverse,
            cast.inverse,
            amax,
            height,
            width,
            cast.apart,
            cast.fp8_max / 2.0**margin,
            cast.fp8_max,
            saturates(cast.dtype),
            converts_by_ptx(weight.device),
            block_r,
            block_c,
            num_warps=warps,
            enable_fp_fusion=False,
        )
