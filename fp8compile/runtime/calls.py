"""How each call of a compiled graph runs: the code that Inductor made, or eagerly (`ir.ops`). A measured call
(see `probe`) runs eagerly. So does a cold one: a feature does not know yet what the code needs (a scale).

A backward runs as its forward did: layouts and random numbers of saved tensors differ between the two ways.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from .. import compat
from . import probe
from .agreement import agree
from .interpreter import EagerMode

DRY: ContextVar[bool] = ContextVar("fp8compile_dry_run", default=False)


@contextlib.contextmanager
def freeze_scaling_state() -> Iterator[None]:
    """Inside, training calls on this thread leave the scaling state as it is. Use it for batches that are no
    training data: a search for the largest batch that fits, a call that only asks for the shapes of the
    outputs. Results are the usual ones, and the backward of such a call may run outside. Pipeline stages of
    torch.distributed do not need this: fp8compile recognises their shape inference."""
    token = DRY.set(True)
    try:
        yield
    finally:
        DRY.reset(token)


def is_dry() -> bool:
    """True in a call with a batch that is no training data."""
    return DRY.get() or compat.process_groups.inferring_shapes()


@dataclass(frozen=True)
class Interface:
    """What is known of a graph before it is compiled."""

    weights: tuple[int, ...]  # positions among the graph's inputs, parameters first
    parameters: tuple[int, ...]
    packed: tuple[int, ...]  # parameters that are views: see `compat.flat`
    kind: str  # the class of the module whose forward it is, "" if it is none, or of several
    prefix: str  # what the names of its weights begin with, where that is a part of a model
    names: tuple[str, ...]  # of its inputs
    trains: bool  # the graph is for training, not for evaluation


@dataclass(eq=False)
class Call:
    """A call in progress. `measuring`: set if it is measured. `state`: of the feature that decides whether
    it is `cold`; None if none does. `own`: addresses of tensors that are saved without the user's hooks."""

    measuring: probe.MeasuredCall | None = None
    state: Any = None
    cold: bool = False
    own: tuple[int, ...] = ()

    @property
    def mode(self) -> EagerMode | None:
        """How to run it eagerly; None: run the compiled code."""
        return EagerMode(self.cold, self.measuring) if self.cold or self.measuring is not None else None


class Calls:
    """The calls of one graph."""

    def __init__(self, interface: Interface):
        self.interface = interface
        self.measured_calls = probe.MeasuredCalls()
        self.groups: tuple[str, ...] = ()  # process groups over which amaxes are reduced
        self.decisions: tuple[str, ...] = ()  # about each matmul of a weight
        self.agreed = False  # the ranks of those groups have compared their graphs
        self.marks = compat.autograd.TensorMarks()  # what eager forwards saved, each with its EagerMode
        self.local = threading.local()  # `call`: the call in progress on this thread

    @property
    def current(self) -> Call | None:
        """The call in progress on this thread, if it may run eagerly."""
        return getattr(self.local, "call", None)

    def run(self, function: Callable[..., Any], args: Sequence[Any], call: Call) -> Any:
        """`function(*args)`, with `call` in progress on this thread."""

        def is_ours(tensor: torch.Tensor) -> bool:
            return tensor.data_ptr() in call.own or self.marks.note(tensor) is not None

        before, self.local.call = self.current, call
        try:
            with compat.autograd.saved_as_they_are(is_ours):
                return function(*args)
        finally:
            self.local.call = before

    def agree(self, slots: str = "") -> None:
        """Compare with the other ranks, before the first all-reduce; after an error, again in the next call.
        `slots`: what has to be the same beside the decisions."""
        agree(self.groups, slots, self.decisions)
        self.agreed = True
