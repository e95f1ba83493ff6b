"""Statistics while a model trains: `fp8compile.monitor(model, every=100, to="run.jsonl")`.

A monitor counts optimizer steps, as a schedule does. It measures the first training call after step 99, 199,
... (see `stats`). After step 100, 200, ..., it writes one line per tensor. Other steps compute nothing extra.
`fp8compile plot` draws these files.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from .. import compat
from ..config.settings import integer
from ..errors import OptionError
from ..ir.records import FP8
from ..logs import get_logger, rank, say_once
from ..runtime.named_weights import named_weights, unwrapped
from ..runtime.optimizer_steps import each_step, steps_of
from ..runtime.parameters import find
from ..runtime.probe import Measurement, ending
from .report import report
from .stats import COSTLY, COUNTS, STATE, table, tensor_of

logger = get_logger(__name__)

TENSORBOARD = "tensorboard:"
Row = dict[str, Any]
Write = Callable[[list[Row]], Any]


class Addition(Protocol):
    """Has further rows to write at some steps."""

    def arm(self, step: int) -> None:
        """Called when `step` steps were taken."""

    def rows(self, step: int) -> list[Row]:
        """Called after the `step`-th step, before `arm`."""

    def close(self) -> None: ...


class Monitor:
    """Measures a model at every `every`-th step. `with` closes it. `written`: how many it has written."""

    def __init__(self, model: nn.Module, every: int, write: Write, close: Callable[[], Any]):
        self.every, self.written = every, 0
        self._model, self._write, self._close = weakref.ref(model), write, close
        self._measurement: Measurement | None = None
        self._additions: list[Addition] = []
        self._count = steps_of(model)  # `step` continues from here
        self._forget: Callable[[], None] | None = each_step(self._at, model)
        self._arm(self._count)

    def add(self, addition: Addition) -> None:
        """Let something else write rows, too."""
        self._additions.append(addition)
        addition.arm(self._count)

    def step(self) -> None:
        """Count a step by hand, in a training loop whose optimizer is not a `torch.optim.Optimizer`.

        Where other models are trained in this process, call `set_step(0, model)` before `monitor`: without an
        optimizer of its own, a model is taken to be at their step.
        """
        self._count += 1
        self._at(self._count)

    def close(self) -> None:
        """Stop measuring, and close the file or writer that `monitor` opened."""
        if self._forget is None:
            return
        self._forget()
        self._forget = None
        if self._measurement is not None:
            self._measurement.end()
        for addition in self._additions:
            addition.close()
        self._close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _arm(self, step: int) -> None:
        model = self._model()
        if model is not None and self._measurement is None and (step + 1) % self.every == 0:
            self._measurement = Measurement(model).begin()

    def _at(self, step: int) -> None:
        """Called after the `step`-th optimizer step."""
        model = self._model()
        if model is None or self._forget is None:
            return self.close()
        self._count = step
        with ending(f"the monitor of {type(model).__name__} stops", self.close):
            self._look(model, step)

    def _look(self, model: nn.Module, step: int) -> None:
        measurement = self._measurement
        if measurement is not None and measurement.failed:
            return self.close()
        due = step % self.every == 0  # else counted from another model's steps, or changed by `set_step`
        if measurement is not None and due and not measurement.records:
            why = "nothing of it runs in FP8 (fp8compile.report(model) says why)"
            if any(record.decision == FP8 for record in report(model).matmuls):
                why = "no training call was in FP8 (in a schedule's phase of high precision none is)"
            text = f"monitor of {type(model).__name__}: {why}"
            say_once(logger, logging.WARNING, f"{text}: nothing to write at step {step}", key=text)
        elif measurement is not None:
            measurement.end()
            self._measurement = None
            if due:
                self._put([{"step": step, **row} for row in table(model, measurement)])
        for addition in self._additions:
            rows = addition.rows(step) if self._forget is not None else []
            if rows:
                self._put(rows)
        if self._forget is not None:
            self._arm(step)
            for addition in self._additions:
                addition.arm(step)

    def _put(self, rows: list[Row]) -> None:
        self._write(rows)
        self.written += 1


def monitor(model: nn.Module, every: int = 100, to: Any = "fp8compile.jsonl") -> Monitor:
    """`fp8compile.monitor` without comparisons: see `dryrun.watch.monitor`."""
    integer("every", every, 1)
    inner = unwrapped(model)
    records = map(find, named_weights(inner).values())
    if not compat.autograd.is_compiled(model) and not any(x.casts or x.graphs for x in records):
        raise OptionError(
            "monitor(model): the model must be compiled: what torch.compile(model, backend='fp8') returned, "
            f"or a module that has been called once in FP8; got a {type(inner).__name__} that is not"
        )
    write, close = _sink(to)
    return Monitor(inner, every, write, close)


def _nothing(*_: Any) -> None:
    """The writer of a process that does not write."""


def _sink(to: Any) -> tuple[Write, Callable[[], Any]]:
    if isinstance(to, (str, PathLike)) and rank() not in (None, 0):
        return _nothing, _nothing
    if isinstance(to, str) and to.startswith(TENSORBOARD):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            message = f"monitor(to={to!r}) needs tensorboard: pip install tensorboard ({error})"
            raise OptionError(message) from None
        return _scalars(SummaryWriter(to.removeprefix(TENSORBOARD)))
    if isinstance(to, (str, PathLike)):
        folder = Path(to).parent
        if not folder.is_dir():
            raise OptionError.of("to", str(to), f"in an existing folder; there is no folder {folder}")
        file = open(to, "a", encoding="utf-8")  # noqa: SIM115
        return _lines(file), file.close
    if callable(getattr(to, "add_scalar", None)):
        return _scalars(to)[0], _nothing
    if callable(getattr(to, "write", None)):
        return _lines(to), _nothing
    if callable(to):
        return to, _nothing
    raise OptionError.of(
        "to", to, "a path, a file object, a SummaryWriter, 'tensorboard:DIR' or a function of a list of dicts"
    )


def _lines(file: Any) -> Write:
    def write(rows: list[Row]) -> None:
        file.write("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
        if hasattr(file, "flush"):
            file.flush()

    return write


def _scalars(writer: Any) -> tuple[Write, Callable[[], Any]]:
    def write(rows: list[Row]) -> None:
        for row in rows:
            if "compare" in row:
                place, keys = "compare", [key for key in row if key not in ("step", "use")]
            else:
                place, keys = tensor_of(row), [*STATE, *COUNTS, *COSTLY]
            for key in keys:
                if isinstance(row[key], (int, float)):
                    writer.add_scalar(f"fp8/{row['name']}/{place}/{key}", row[key], row["step"])

    return write, writer.close if hasattr(writer, "close") else _nothing
