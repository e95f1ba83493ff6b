"""Measuring what quantization does to tensors: which ones overflow, which vanish, how far the copies are from them.

Nothing of this is computed in an ordinary call. A `Measurement` asks for it: the next training call of each graph of the model,
forward and backward, then runs operator by operator, as a cold call does (`calls`), and every cast on the way is looked
at. Outputs, gradients and scaling state of that call are the ordinary ones. What was measured stays on the device until it is
read, so that a measured call does not wait.

A tensor is named by its parameter, its role, the use of the parameter, and the layout where layouts differ: a tensor with one
scale, or with square blocks, has copies of the same values in either; one with a scale a row or a block of a row has not.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from ..config.recipe import WHOLE, recipe_of
from ..ir import ops
from ..ir.scale import inverse_of
from .parameters import ParameterRecord, all_records, ids_of, record_of
from .state import named_weights

CASTS = (ops.quantize, ops.quantize_both)
CHUNK = 1 << 24  # elements at a time: a measured call takes no more memory than a cold one
ROUNDING = 1 + 2.0**-20  # amax * scale is off by as much: beyond the FP8 maximum is what is beyond this
COLUMNS = (
    "elements", "amax", "overflows", "underflows", "error", "signal", "scales", "scale", "scale_inv_min", "scale_inv_max"
)  # fmt: skip

Name = tuple[str, int, str]  # role, use, layout: "" (both are the same), "plain" or "transposed"


class Cast(NamedTuple):
    """How a tensor is quantized. `recipe` is that of its scale: with `current_scaling`, delayed scaling has tensorwise ones."""

    recipe: str
    format: str  # "e4m3fn", "e5m2", ...


ACTIVE: list[Measurement] = []


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Inside, no measurement was asked for."""
    before, ACTIVE[:] = list(ACTIVE), []
    try:
        yield
    finally:
        ACTIVE[:] = before


def forget() -> None:
    """All graphs are gone: what the next one says of a weight replaces what they said."""
    for _, record in all_records():
        record.outdated = True


class Measurement:
    """Asks that the next training call of each graph of a model is measured. `records`: {weight: {Name: vector of COLUMNS}}, a
    weight by its record."""

    def __init__(self, model: nn.Module):
        """TypeError if it is no module."""
        self.model = weakref.ref(model)
        self.members = ids_of(named_weights(model).values())
        self.done: set[tuple[int, ...]] = set()
        self.others: set[tuple[int, ...]] = set()  # graphs of other models
        self.records: dict[ParameterRecord, dict[Name, Tensor]] = {}

    def begin(self) -> Measurement:
        ACTIVE.append(self)
        return self

    def end(self) -> None:
        if self in ACTIVE:
            ACTIVE.remove(self)

    def wants(self, key: tuple[int, ...]) -> bool:
        """A graph with these weights (by identity): is it one of the model's, and the first call that could be measured?"""
        model = self.model()
        if model is None:
            self.end()
        elif self.members.isdisjoint(key) and key not in self.others:  # or weights that were assigned since
            self.members = ids_of(named_weights(model).values())
            self.others.add(key)
        return key not in self.done and not self.members.isdisjoint(key)


@dataclass(eq=False)
class Look:
    """One call that runs operator by operator for the sake of measuring; without measurements, because one beside it does."""

    key: tuple[int, ...]
    owners: Mapping[int, weakref.ref]  # by input of the graph
    measurements: Sequence[Measurement]

    def __call__(self, node: Node, args: tuple, result: Any) -> None:
        """Measure what a cast made of its arguments."""
        operand = node.meta["fp8_operand"]
        owner = self.owners[operand.input]()
        if owner is None or not self.measurements:
            return
        for name, item in names_of(node).items():
            kept = [measurement.records.setdefault(record_of(owner), {}) for measurement in self.measurements]
            if all(name in known for known in kept):
                continue  # the other layout of the same values
            x, scale, _, fp8_max = args[:4]
            other = args[4] if node.target is ops.quantize_both and len(args) > 4 else None
            transposed = args[4] if node.target is ops.quantize else name[2] == "transposed"
            scale = other if item == 1 and other is not None else scale
            copy = result if item is None else result[item]
            found = measured(x.detach(), scale, copy, fp8_max, transposed, block_of(node))
            for known in kept:
                known[name] = found
            record_of(owner).measured[name] = found


@dataclass(eq=False)
class Looking:
    """What one graph has to know of calls that were measured, by their weights, until their backwards have run."""

    open: dict[tuple[int, ...], Open] = field(default_factory=dict)

    def at(self, args: Sequence[Any], weights: Sequence[int], in_backward: bool, may_begin: bool) -> Look | None:
        """A call of the graph: does it run operator by operator? `may_begin`: it is no recomputation of an ordinary call."""
        key = tuple(id(args[i]) for i in weights)
        opened = self.open.get(key)
        wanting: list[Measurement] = []
        if opened is None or not in_backward:  # else a recomputation, of a call that was measured or one beside it
            wanting = [measurement for measurement in list(ACTIVE) if may_begin and measurement.wants(key)]
            if not wanting and opened is None:
                return None
            if wanting:
                opened = self.open.setdefault(key, Open())
                opened.patience = Open.patience
            assert opened is not None
            if opened.patience == 0:  # its backward does not come
                del self.open[key]
                return None
            opened.patience -= 1
            opened.forwards += 1
        for measurement in wanting:
            measurement.done.add(key)
        return Look(key, {i: weakref.ref(args[i]) for i in weights}, wanting)

    def backward(self, look: Look) -> None:
        """The backward of a call has begun."""
        opened = self.open.get(look.key)
        if opened is not None:
            opened.forwards -= 1
            if opened.forwards <= 0:
                del self.open[look.key]


@dataclass(eq=False)
class Open:
    """Forwards that ran operator by operator. As long as their backwards have not run, others of the same weights run that way,
    too: where activations are recomputed, nobody knows which of them is recomputed."""

    forwards: int = 0
    patience: int = 16  # for forwards without backwards


def names_of(cast: Node) -> dict[Name, int | None]:
    """What is measured of a cast: names of the tensor, and which result has it (None: the only one)."""
    operand, block = cast.meta["fp8_operand"], block_of(cast)
    alike = block[0] == block[1]
    if cast.target is ops.quantize:
        layout = "" if alike else "transposed" if cast.args[4] else "plain"
        return {(operand.role, operand.use, layout): None}
    return {(operand.role, operand.use, layout): i for i, layout in enumerate([""] if alike else ["plain", "transposed"])}


def block_of(cast: Node) -> tuple[int, int]:
    return tuple(cast.args[5]) if len(cast.args) > 5 else WHOLE  # type: ignore[arg-type, return-value]


def casts_of(graph: Graph) -> dict[tuple[int, Name], Cast]:
    """Everything that a graph (before lowering) quantizes, by input of its weight and name."""
    found = {}
    for op in CASTS:
        for node in graph.find_nodes(op="call_function", target=op):
            operand = node.meta.get("fp8_operand")
            if operand is None:
                continue
            recipe = recipe_of(bool(operand.settings.window), block_of(node))
            cast = Cast(recipe, str(node.args[2]).removeprefix("torch.float8_"))
            found.update({(operand.input, name): cast for name in names_of(node)})
    return found


def know(owners: Mapping[int, weakref.ref], casts: Mapping[tuple[int, Name], Cast]) -> None:
    """A graph quantizes this with these weights."""
    for (position, name), cast in casts.items():
        owner = owners[position]() if position in owners else None
        if owner is not None:
            record = record_of(owner)
            if record.outdated:
                record.casts, record.measured, record.outdated = {}, {}, False
            record.casts[name] = cast


def measured(x: Tensor, scale: Tensor, copy: Tensor, fp8_max: float, transposed: bool, block: Sequence[int]) -> Tensor:
    """COLUMNS (float64 `[10]`, on x's device) of x `[R, C]` and its FP8 copy, plain `[R, C]` or transposed `[C, R padded]`.

    Overflows: |x * scale| > fp8_max. Underflows: x is not 0, and its copy is. `error`: the sum of (x - copy * scale_inv)^2,
    `signal`: that of x^2, both over finite elements.
    """
    x = x.t() if transposed else x
    total = torch.zeros(4, dtype=torch.float64, device=x.device)
    rows, columns = x.shape
    step = max(128, CHUNK // max(1, columns) // 128 * 128)  # so that no block is cut
    peak = torch.zeros((), dtype=torch.float64, device=x.device)
    for start in range(0, rows if columns else 0, step):
        part = x[start : start + step].to(torch.float32)
        image = copy[start : start + step, :columns].to(torch.float32)
        own = scale if scale.dim() == 1 else scale[start // block[0] : (start + step) // block[0]]
        multiplier = ops.spread(own, (part.shape[0], columns), block)
        divider = ops.spread(inverse_of(own), (part.shape[0], columns), block)
        peak = torch.maximum(peak, part.abs().amax().to(torch.float64))
        finite = part.isfinite()
        error = torch.where(finite, part - image * divider, 0.0)
        total += torch.stack(
            (
                ((part * multiplier).abs() > fp8_max * ROUNDING).sum().to(torch.float64),
                ((part != 0) & (image == 0)).sum().to(torch.float64),
                error.to(torch.float64).square().sum(),
                torch.where(finite, part, 0.0).to(torch.float64).square().sum(),
            )
        )
    inverse = inverse_of(scale).to(torch.float64)
    elements = torch.full((), float(rows * columns), dtype=torch.float64, device=x.device)
    count = torch.full((), float(scale.numel()), dtype=torch.float64, device=x.device)
    ends = (scale.amax().to(torch.float64), inverse.amin(), inverse.amax()) if scale.numel() else [count * 0] * 3
    return torch.stack((elements, peak, *total, count, *ends))
