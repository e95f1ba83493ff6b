"""Steps that are compared, estimated, tuned."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

from .state import slots_of


def comparing(model: Any, **options: Any) -> Callable[..., Any]:
    """`fp8compile.compare` of one model, with its options: graphs are compiled once for all calls."""
    from fp8compile.dryrun.compare import Session

    session = Session(model, options or None)

    def compare(*args: Any, loss: Callable[[Any], torch.Tensor] | None = None, **kwargs: Any) -> Any:
        return session.run(args, kwargs, loss)

    return compare


@contextlib.contextmanager
def wrong_scale(model: nn.Module, name: str, role: str, factor: float) -> Iterator[None]:
    """Inside, the scale of one tensor is the right one times a factor."""
    slot = slots_of(model)[name, role, 0]
    before = slot.numbers.tensor.clone()
    wrong = before.clone()
    wrong[0] *= factor
    wrong[1] /= factor
    slot.page.write(slot.row, wrong)
    try:
        yield
    finally:
        slot.page.write(slot.row, before)


@contextlib.contextmanager
def compared_steps(fails: bool = False) -> Iterator[list[Any]]:
    """What comparisons take inside: (args, loss) of a comparison, then the phase of each run. `fails`: they
    divide by zero before the first run."""
    from fp8compile.dryrun.compare import Session

    found: list[Any] = []
    run, taking = Session.run, Session.taking

    def compare(self: Session, args: Any, kwargs: Any, loss: Any = None, repeat: bool = True) -> Any:
        found.append((args, loss))
        return run(self, args, kwargs, loss, repeat)

    def noted(self: Session, *batch: Any) -> Callable[..., Any]:
        step = 1 / 0 if fails else taking(self, *batch)

        def taken(phase: str, watched: Any) -> Any:
            found.append(phase)
            return step(phase, watched)

        return taken

    with mock.patch.object(Session, "run", compare), mock.patch.object(Session, "taking", noted):
        yield found


@contextlib.contextmanager
def described_once() -> Iterator[dict[tuple, tuple[Any, Any]]]:
    """Inside, `estimate` compiles a model once for each device, options and backend; all else is computed
    from that. Gives (compiler, (step on the described GPU, report)) of each compilation."""
    from fp8compile.dryrun.estimate import Compiler

    made: dict[tuple, tuple[Any, Any]] = {}
    stock = Compiler._compiled

    def compiled(self: Compiler, backend: Callable, order: Any = None) -> Any:
        cast, ours = torch.is_autocast_enabled("cpu"), isinstance(backend, functools.partial)
        key = (id(self.model), ours, repr(self.options), self.device.gpu, order, cast)
        if key not in made:
            made[key] = self, stock(self, backend, order)  # the model stays alive, and its id its own
        return made[key][1]

    with mock.patch.object(Compiler, "_compiled", compiled):
        yield made


@contextlib.contextmanager
def tuning(compiler: type, candidates: Sequence[str]) -> Iterator[None]:
    """Inside, `tune` takes its times from `compiler`, and has few candidates: each takes a trace."""
    times = mock.patch("fp8compile.dryrun.tune.Compiler", compiler)
    with times, mock.patch("fp8compile.dryrun.tune.candidates", lambda gpu: candidates):
        yield


@contextlib.contextmanager
def weighed() -> Iterator[dict[tuple[str, str], tuple[Any, str]]]:
    """The matmuls with weights of the last graph that was weighed inside, by (name, gemm), each with its
    decision before."""
    from fp8compile.passes import pipeline

    found: dict[tuple[str, str], tuple[Any, str]] = {}

    def noted(step: Any) -> Any:
        def run(joint: Any) -> int:
            before = {matmul: matmul.decision for matmul in joint.matmuls}
            result = step.run(joint)
            found.clear()
            found.update({(m.fqn, m.gemm): (m, before[m]) for m in joint.matmuls if m.weight is not None})
            return result

        return dataclasses.replace(step, run=run)

    with mock.patch.dict(
        pipeline.STAGES, joint=[noted(x) if x.name == "weigh" else x for x in pipeline.JOINT]
    ):
        yield found
