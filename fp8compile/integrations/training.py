"""What trainers' callbacks share: options, compiling in place, the step, numbers to log, one complaint."""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from .. import compat
from ..config.options import OURS, parse
from ..config.policy import Schedule, load
from ..config.recipe import ROLES
from ..config.settings import integer
from ..errors import OptionError, StrictError
from ..ir.records import FP8
from ..logs import get_logger
from ..reporting.monitor import Monitor, monitor
from ..reporting.report import report
from ..reporting.stats import stats
from ..runtime.optimizer_steps import set_step

logger = get_logger(__name__)

# What is logged of a column, over all tensors of a role: the worst
_WORST = {"amax": max, "overflows%": max, "underflows%": max, "sqnr": min}


def options_of(policy: Any, schedule: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The `options` of torch.compile, checked: raises OptionError, also if a policy file is missing.

    `schedule` is a dict as the table [schedule] of a policy, or a `Schedule`. It replaces that of the policy.
    """
    found = dict(options)
    if policy is not None:
        found["policy"] = policy
    if schedule is not None:
        if isinstance(schedule, Mapping):
            schedule = load({"schedule": dict(schedule)}).schedule
        elif not isinstance(schedule, Schedule):
            wanted = "a dict such as {'warmup_steps': 200}, or a fp8compile.Schedule"
            raise OptionError.of("schedule", schedule, wanted)
        found["policy"] = dataclasses.replace(load(policy), schedule=schedule)
    parse(found)
    return found


class Training:
    """One training run, of a callback `FP8Callback`. `measure_every`: see `fp8compile.monitor`."""

    def __init__(
        self, policy: Any, schedule: Any, measure_every: int | None, options: Mapping[str, Any]
    ) -> None:
        self.options = options_of(policy, schedule, options)
        if measure_every is not None:
            integer("measure_every", measure_every, 1)
        self._every = measure_every
        self._model: weakref.ref[nn.Module] | None = None
        self._done: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # compiled here, or found compiled
        self._monitor: Monitor | None = None
        self._measured: list[dict[str, Any]] = []
        self._checked = False

    def compile(self, modules: Iterable[nn.Module]) -> None:
        """Compile these in place: parameters keep their names. What is compiled already is left as it is."""
        for module in modules:
            if module in self._done:
                continue
            self._done.add(module)
            if compat.autograd.is_compiled(module):
                given = [name for name in self.options if name in OURS]
                level = logging.WARNING if given else logging.INFO
                lost = f"; without effect: {', '.join(given)}" if given else ""
                text = "fp8: FP8Callback: %s is compiled already and stays so%s"
                logger.log(level, text, type(module).__name__, lost)
                continue
            module.compile(backend="fp8", options=self.options)

    def begin(self, model: nn.Module, step: int) -> None:
        """Before the first step: `step` is the number of optimizer steps that the run has taken before."""
        self.end()
        self._model, self._checked = weakref.ref(model), False
        set_step(step, model)
        if compat.autograd.is_compiled(model):
            self._measure(model)

    def stepped(self) -> None:
        """After a step, once a run: complain if nothing became FP8."""
        model = self._model() if self._model is not None else None
        if self._checked or model is None:
            return
        self._checked = True
        found = report(model)
        if any(record.decision == FP8 for record in found.matmuls):
            self._measure(model)  # where a trainer holds a wrapper, only the first call shows it is compiled
            return
        message = f"FP8Callback: nothing of {type(model).__name__} became FP8: {found.summary()}"
        if self.options.get("strict"):
            raise StrictError(message)
        logger.warning("fp8: %s", message)

    def numbers(self) -> dict[str, float]:
        """For the trainer's log. All are finite.

        fp8/share: the FLOPs of FP8 matmuls over those of all matmuls. fp8/matmuls: how many are FP8.
        fp8/ROLE/amax: the largest of all tensors of that role. With `measure_every`, of the last measured
        call: fp8/ROLE/overflows%, fp8/ROLE/underflows% (the largest) and fp8/ROLE/sqnr (the smallest).
        """
        model = self._model() if self._model is not None else None
        if model is None:
            return {}
        found = report(model)
        # a graph with a note is for evaluation
        matmuls = [record for graph in found.graphs if not graph.note for record in graph.matmuls]
        in_fp8 = sum(record.decision == FP8 for record in matmuls)
        logged: dict[str, float] = {"fp8/share": found.fp8_flop_fraction, "fp8/matmuls": in_fp8}
        rows = stats(model).rows()
        for role in ROLES:
            for column, worst in _WORST.items():
                source = rows if column == "amax" else self._measured
                values = [row[column] for row in source if row["role"] == role and row[column] is not None]
                if values and math.isfinite(worst(values)):
                    logged[f"fp8/{role}/{column}"] = worst(values)
        return logged

    def end(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
        self._monitor, self._measured = None, []

    def _measure(self, model: nn.Module) -> None:
        if self._every is not None and self._monitor is None:
            self._monitor = monitor(model, self._every, self._keep)

    def _keep(self, rows: list[dict[str, Any]]) -> None:
        self._measured = rows
