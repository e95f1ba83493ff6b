"""Measures what quantization does to tensors: how many elements overflow or vanish, how far copies are off.

An ordinary call computes none of this. A `Measurement` asks for it. Then the next training call of each graph
of the model runs eagerly, forward and backward, as a cold call does (`calls`), and measures every cast.
Outputs, gradients and scaling state of that call are the ordinary ones. The results stay on the device until
they are read, so that a measured call does not wait.

A tensor is named by its parameter, its role, the use of the parameter, and its layout if the two layouts
differ. A tensor with one scale, or with square blocks, has the same values in both layouts. One with a scale
for a row, or a block of a row, has not.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from .. import process
from ..errors import one_line
from ..ir import ops
from ..ir.metadata import OPERAND
from ..ir.scale import inverse_of
from ..ir.schemas import FP8Copy, copies_at, copies_of
from ..logs import get_logger
from .named_weights import named_weights
from .parameters import ParameterRecord, all_records, ids_of, record_of

CASTS = (ops.quantize, ops.quantize_both)
CHUNK = 1 << 24  # elements at a time: a measured call takes no more memory than a cold one
ROUNDING = 1 + 2.0**-20  # amax * scale is off by as much: only what exceeds fp8_max * ROUNDING overflows
COLUMNS = (
    "elements", "amax", "overflows", "underflows", "error", "signal", "scales", "scale", "scale_inv_min",
    "scale_inv_max", "row_error", "column_error",
)  # fmt: skip

Name = tuple[str, int, str]  # role, use, layout: "" (both have the same values), "plain" or "transposed"
OnOperand = Callable[[Any, Name, Tensor, FP8Copy], object]  # a weight, which tensor, its values, the cast


class CastKind(NamedTuple):
    """How a tensor is quantized. `recipe`: "tensorwise" where delayed scaling has `current_scaling`."""

    recipe: str
    format: str  # "e4m3fn", "e5m2", ...

    @classmethod
    def of(cls, recipe: str, dtype: torch.dtype) -> CastKind:
        """`dtype`: an FP8 one."""
        return cls(recipe, str(dtype).removeprefix("torch.float8_"))


logger = get_logger(__name__)

ENDS = "measures no more"


@contextlib.contextmanager
def ending(what: str, end: Callable[[], object]) -> Iterator[None]:
    """An error of what measures must not end a training: it is a warning, `what: error`, and calls `end`."""
    try:
        yield
    except Exception as error:
        logger.warning("fp8: %s: %s", what, one_line(error))
        with contextlib.suppress(Exception):
            end()


def forget() -> None:
    """All graphs are gone: for each weight, the casts of the next graph replace theirs."""
    for _, record in all_records():
        record.outdated = True


class Active(list["Measurement"]):
    """The measurements that wait for calls."""


class Measurement:
    """Asks that the next training call of each graph of a model is measured. `records`: {record of a weight:
    {Name: vector of COLUMNS}}.

    `on_operand` gets each tensor that the call casts, once, before the call goes on: `[R, C]` in high
    precision, and the cast of it. So other casts of the same values can be tried. It does not get weights
    that arrive in FP8 (FSDP2's gather). Its error ends the measurement."""

    def __init__(self, model: nn.Module, on_operand: OnOperand | None = None):
        """TypeError if `model` is no module."""
        self.model, self.on_operand = weakref.ref(model), on_operand
        self.members = ids_of(named_weights(model).values())
        self.done: set[tuple[int, ...]] = set()
        self.others: set[tuple[int, ...]] = set()  # graphs of other models
        self.records: dict[ParameterRecord, dict[Name, Tensor]] = {}
        self.gemms: set[tuple[ParameterRecord, str]] = set()  # those in FP8, by their weight's record
        self.failed = False

    def begin(self) -> Measurement:
        process.of(Active).append(self)
        return self

    def end(self) -> None:
        if self in process.of(Active):
            process.of(Active).remove(self)

    def wants(self, key: tuple[int, ...]) -> bool:
        """True if these weights of a call (by identity) are the model's and no such call was measured yet."""
        model = self.model()
        if model is None:
            self.end()
        elif self.members.isdisjoint(key) and key not in self.others:
            # another model's, or assigned since the last look
            self.members = ids_of(named_weights(model).values())
            self.others.add(key)
        return key not in self.done and not self.members.isdisjoint(key)


def _fail(measurements: Sequence[Measurement]) -> None:
    for measurement in list(measurements):
        measurement.failed = True
        measurement.end()


@dataclass(eq=False)
class MeasuredCall:
    """One call that runs eagerly: it is measured or, if `measurements` is empty, beside one that is."""

    key: tuple[int, ...]
    owners: Mapping[int, weakref.ref]  # by input of the graph
    measurements: Sequence[Measurement]

    def __call__(self, node: Node, args: tuple, result: Any) -> None:
        """Measure what a cast made of its arguments. What `save` casts is no operand of a matmul."""
        with ending(ENDS, self.end):
            self._measure(node, args, result)

    def end(self) -> None:
        _fail(self.measurements)
        self.measurements = ()

    def _measure(self, node: Node, args: tuple, result: Any) -> None:
        operand = node.meta.get(OPERAND)
        if operand is None:
            return
        owner = self.owners[operand.input]()
        if owner is None or not self.measurements:
            return
        for name, made in zip(names_of(node), copies_of(node.target, args), strict=False):
            kept = [measurement.records.get(record_of(owner), {}) for measurement in self.measurements]
            if all(name in known for known in kept):
                continue  # measured in the other layout, which has the same values
            given = made.source.detach()
            if made.transposed and made.rows is not None:
                given = ops.ordered(given, made.rows)
            scale, copy = inverse_of(made.scale) if made.divide else made.scale, made.of(result)
            turned = made.transposed and bool(name[2])
            if made.transposed and not turned:  # the values of both layouts: its rows are those of x
                copy, scale = copy[:, : given.shape[0]].t(), scale if scale.dim() == 1 else scale.t()
            found = measured(given, scale, copy, made.fp8_max, turned, made.block)
            self.note(owner, name, found)
            for measurement in self.measurements:
                if measurement.on_operand is not None:
                    measurement.on_operand(owner, name, given, made)

    def note(self, owner: Any, name: Name, found: Tensor) -> None:
        """Keep what was measured of a tensor of the weight `owner`."""
        record = record_of(owner)
        for measurement in self.measurements:
            measurement.records.setdefault(record, {})[name] = found
        record.measured[name] = found


@dataclass(eq=False)
class MeasuredCalls:
    """The measured calls of one graph whose backwards have not run yet, by their weights."""

    pending: dict[tuple[int, ...], PendingForwards] = field(default_factory=dict)

    def at(
        self, args: Sequence[Any], weights: Sequence[int], in_backward: bool, may_begin: bool
    ) -> MeasuredCall | None:
        """Set for a call that runs eagerly, else None. `may_begin`: it may begin a measurement."""
        call = None
        with ending(ENDS, lambda: _fail(process.of(Active))):
            call = self._at(args, weights, in_backward, may_begin)
        return call

    def _at(
        self, args: Sequence[Any], weights: Sequence[int], in_backward: bool, may_begin: bool
    ) -> MeasuredCall | None:
        key = tuple(id(args[i]) for i in weights)
        pending = self.pending.get(key)
        wanting: list[Measurement] = []
        if pending is None or not in_backward:  # else it recomputes a measured call or one beside it
            active = list(process.of(Active)) if may_begin else []
            wanting = [measurement for measurement in active if measurement.wants(key)]
            if not wanting and pending is None:
                return None
            if wanting:
                pending = self.pending.setdefault(key, PendingForwards())
                pending.patience = PendingForwards.patience
            assert pending is not None
            if pending.patience == 0:  # the backwards do not come
                del self.pending[key]
                return None
            pending.patience -= 1
            pending.forwards += 1
        for measurement in wanting:
            measurement.done.add(key)
        return MeasuredCall(key, {i: weakref.ref(args[i]) for i in weights}, wanting)

    def backward(self, call: MeasuredCall) -> None:
        """The backward of a call has begun."""
        pending = self.pending.get(call.key)
        if pending is not None:
            pending.forwards -= 1
            if pending.forwards <= 0:
                del self.pending[call.key]


@dataclass(eq=False)
class PendingForwards:
    """Forwards that ran eagerly. Until their backwards have run, further forwards with the same weights run
    that way, too, because a recomputation cannot be attributed to one of them."""

    forwards: int = 0
    patience: int = 16  # how many more forwards may come before the backwards are given up


def names_of(cast: Node) -> list[Name]:
    """The names of a cast's copies, in the order of its results: one if both layouts have the same values."""
    operand, copies = cast.meta[OPERAND], copies_at(cast)
    if copies[0].block[0] == copies[0].block[1]:
        return [(operand.role, operand.use, "")]
    return [(operand.role, operand.use, "transposed" if copy.transposed else "plain") for copy in copies]


def casts_of(graph: Graph) -> dict[tuple[int, Name], CastKind]:
    """Every tensor that a graph (before lowering) quantizes, by (input of its weight, name)."""
    found = {}
    for op in CASTS:
        for node in graph.find_nodes(op="call_function", target=op):
            operand = node.meta.get(OPERAND)
            if operand is None:
                continue
            cast = CastKind.of(operand.recipe, node.args[2])
            found.update({(operand.input, name): cast for name in names_of(node)})
    return found


def know(owners: Mapping[int, weakref.ref], casts: Mapping[tuple[int, Name], CastKind]) -> None:
    """Record that a graph with these weights makes these casts."""
    for (position, name), cast in casts.items():
        owner = owners[position]() if position in owners else None
        if owner is not None:
            record = record_of(owner)
            if record.outdated:
                record.casts, record.measured, record.outdated = {}, {}, False
            record.casts[name] = cast


def unknow(owners: Mapping[int, weakref.ref], casts: Iterable[tuple[int, Name]]) -> None:
    """Forget that a graph with these weights makes these casts."""
    for position, name in casts:
        owner = owners[position]() if position in owners else None
        if owner is not None:
            record = record_of(owner)
            record.casts.pop(name, None)
            record.measured.pop(name, None)


def measured(
    x: Tensor, scale: Tensor, copy: Tensor, fp8_max: float, transposed: bool, block: Sequence[int]
) -> Tensor:
    """COLUMNS (float64 `[12]`, on x's device) of x `[R, C]` and its FP8 copy `[R, C]` or `[C, R padded]`.

    Overflows: |x * scale| > fp8_max. Underflows: x is not 0, but its copy is. `error`: the sum of (x - copy *
    scale_inv)^2, `signal`: that of x^2, both over finite elements. `row_error`: the median over the copy's
    rows of sqrt(error / signal) of a row, without rows of zeros; NaN if there is no other. `column_error`:
    the same of its columns."""
    x = x.t() if transposed else x
    counts = torch.zeros(2, dtype=torch.float64, device=x.device)
    rows, columns = x.shape
    step = max(128, CHUNK // max(1, columns) // 128 * 128)  # so that no block is cut
    peak = torch.zeros((), dtype=torch.float64, device=x.device)
    squares = torch.zeros(2, rows, dtype=torch.float64, device=x.device)  # of each row: error, signal
    down = torch.zeros(2, columns, dtype=torch.float64, device=x.device)  # of each column
    for start in range(0, rows if columns else 0, step):
        part = x[start : start + step].to(torch.float32)
        image = copy[start : start + step, :columns].to(torch.float32)
        own = scale if scale.dim() == 1 else scale[start // block[0] : (start + step) // block[0]]
        multiplier = ops.spread(own, (part.shape[0], columns), block)
        divider = ops.spread(inverse_of(own), (part.shape[0], columns), block)
        peak = torch.maximum(peak, part.abs().amax().to(torch.float64))
        finite = part.isfinite()
        over = (part * multiplier).abs() > fp8_max * ROUNDING
        under = (part != 0) & (image == 0)
        counts += torch.stack((over.sum(), under.sum()))
        for i, values in enumerate((part - image * divider, part)):
            square = torch.where(finite, values, 0.0).to(torch.float64).square()
            squares[i, start : start + step] = square.sum(1)
            down[i] += square.sum(0)
    inverse = inverse_of(scale).to(torch.float64)
    elements = torch.full((), float(rows * columns), dtype=torch.float64, device=x.device)
    count = torch.full((), float(scale.numel()), dtype=torch.float64, device=x.device)
    ends = [count * 0] * 3
    if scale.numel():
        ends = [scale.amax().to(torch.float64), inverse.amin(), inverse.amax()]
    errors = _median_error(squares), _median_error(down)
    return torch.stack((elements, peak, *counts, *squares.sum(1), count, *ends, *errors))


def _median_error(squares: Tensor) -> Tensor:
    """The median of sqrt(error / signal) of [error, signal], `[2, n]`, where there is a signal; else NaN."""
    error, signal = squares
    ratios = torch.where(signal > 0, (error / signal).sqrt(), torch.nan)
    return ratios.nanmedian() if ratios.numel() else ratios.new_full((), torch.nan)
