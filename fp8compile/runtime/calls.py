"""How each call of a compiled graph runs: which pages it gets, and whether it is warm or cold.

| call | its forward runs | with the scales of | the state |
|---|---|---|---|
| training, warm | the code that Inductor made | the state | moves |
| training, cold | eagerly (`ir.ops`) | the current amax, where a slot has no scale yet | moves |
| measured (see `probe`) | eagerly | the state | moves |
| observed: a phase of high precision | the code | none: nothing is cast, and it is never cold | moves |
| recomputation (see `repeats`) | as its original did | that call, from a copy of its page | stays |
| dry: `freeze_scaling_state`, shape inference | as a training call | the state, from a copy | stays |

A backward runs as its forward did: layouts and random numbers of saved tensors differ between the two ways.

When a call is cold: see `life`.

A forward inside of a running backward is a recomputation (eager checkpointing) if the forward of the same
call has run before. In a reentrant checkpoint, the forward in the backward counts as the first one: the
forward before it ran without gradients, as an evaluation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import compat
from ..errors import Fp8CompileError
from ..passes.joint import Rewritten
from . import leftovers, notices, probe
from .agreement import agree
from .interpreter import How
from .life import Book, PageSet
from .repeats import Ran

CAPTURED = (
    "a CUDA graph is being captured, and scales of this graph are not known yet: finding them waits for the "
    "device. Train some steps before, or leave the capture to Inductor: options={'triton.cudagraphs': True}"
)
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


@dataclass(frozen=True)
class Interface:
    """What is known of a graph before it is compiled."""

    weights: tuple[int, ...]  # positions among the graph's inputs, parameters first
    parameters: tuple[int, ...]
    packed: tuple[int, ...]  # parameters that are views: see `compat.flat`
    kind: str  # the class of the module whose forward it is, "" if it is none, or of several
    prefix: str  # what the names of its weights begin with, where that is a part of a model
    names: tuple[str, ...]  # of its inputs
    history: int  # amaxes that a slot keeps
    stateful: bool  # it has two inputs for its state
    observes: bool  # the graph moves the state but multiplies in high precision; its calls are never cold
    together: bool  # no rank may run a call eagerly alone: warm calls have other collectives
    trains: bool  # the graph is for training, not for evaluation


class Call(NamedTuple):
    """A call in progress."""

    pages: PageSet | None  # its state
    look: probe.Look | None  # set if the call is measured
    again: bool = False  # it is a recomputation
    dry: bool = False  # it leaves the state as it is
    ran: Ran | None = None  # how its forward runs


NO_CALL = Call(None, None)


class Calls:
    """Decides for each call of one graph which pages it gets, and how it runs."""

    def __init__(self, interface: Interface):
        self.interface = interface
        self.looking = probe.Looking()
        self.book: Book | None = None  # None if no tensor of the graph has a slot
        self.groups: tuple[str, ...] = ()  # process groups over which amaxes are reduced
        self.decisions: tuple[str, ...] = ()  # about each matmul of a weight
        self.agreed = False  # the ranks of those groups have compared their slots and decisions
        self.marks = compat.autograd.TensorMarks()  # tensors that eager forwards saved, each with its How
        self.local = threading.local()  # `call`: the call in progress on this thread

    def keep_state(self, done: Rewritten) -> None:
        """Make the book of a graph with slots. Forward and backward, compiled one by one, share it."""
        known = self.interface
        if self.book is None:
            self.book = Book(done.forward, done.backward, known.history, known.observes, known.together)

    @property
    def current(self) -> Call:
        return getattr(self.local, "call", NO_CALL)

    def run(self, function: Callable[..., Any], args: Sequence[Any], call: Call) -> Any:
        """`function(*args)`, with `call` in progress on this thread."""
        before, self.local.call = self.current, call
        try:
            with compat.autograd.saved_as_they_are(self._is_ours):
                return function(*args)
        finally:
            self.local.call = before

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        if self.book is not None and tensor.data_ptr() in self.book.by_pointer:
            return True
        return self.marks.note(tensor) is not None

    # -- before a call --

    def open(
        self, args: Sequence[Any], device: torch.device, look: probe.Look | None
    ) -> tuple[Call, torch.Tensor, torch.Tensor]:
        """Begin a call with these arguments: the `Call`, and the graph's pages of forward and backward."""
        assert self.book is not None
        pages = self.book.open(args, device)
        forward, backward = pages.forward.tensor, pages.backward.tensor
        if DRY.get() or compat.process_groups.inferring_shapes():
            with compat.autograd.unseen():
                forward, backward = pages.aside()
                return Call(pages, look, dry=True), forward, backward
        if pages.runs_cold() and compat.autograd.capturing():
            raise Fp8CompileError(CAPTURED)
        self.agree()
        if compat.autograd.hooked() and self._again(pages):
            ran, forward = pages.recompute()
            return Call(pages, look, True, False, ran), forward, backward
        notices.look()
        return Call(pages, look, ran=pages.begin()), forward, backward

    def _again(self, pages: PageSet) -> bool:
        """Is this forward a recomputation?"""
        return (pages.pending > 0 and compat.autograd.recomputing()) or compat.autograd.repeating()

    def agree(self) -> None:
        """Compare with other ranks, before the first all-reduce; after an error, again in the next call."""
        if not self.agreed:
            keys = (*self.book.keys[0], *self.book.keys[1]) if self.book is not None else ()
            known = self.interface
            names = [name.removeprefix(known.prefix) for name in known.names]
            slots = ", ".join(f"{names[key.input]} {key.role} {key.use}" for key in keys)
            agree(self.groups, slots, self.decisions)
            self.agreed = True

    # -- in a call --

    def forward(self, call: Call) -> How | None:
        """How to run the forward of a call eagerly; None: run the compiled code."""
        pages, look, again, _, ran = call
        cold, eagerly = False, look is not None
        if again and ran is not None:
            cold, eagerly = ran.cold, eagerly or ran.eager
        elif pages is not None:
            cold = pages.runs_cold()
            if pages.first:
                leftovers.before_call(pages, cold)
            eagerly = eagerly or cold
            if ran is not None:
                ran.cold, ran.eager, pages.was_cold = cold, eagerly, cold
        return How(cold, look) if eagerly else None

    def forward_done(self, call: Call) -> None:
        if call.pages is not None and not (call.again or call.dry) and not call.pages.backward.homes:
            call.pages.end()

    def backward(self, pages: PageSet | None, marker: torch.Tensor | None) -> How | None:
        """As `forward`. `marker`: a tensor that the forward saved; its mark tells how the forward ran."""
        if marker is not None:
            how = self.marks.note(marker)
        else:
            how = How(True) if pages is not None and pages.backward_runs_cold() else None
        if pages is not None:
            pages.begin_backward()
        if how is not None and how.look is not None:
            self.looking.backward(how.look)
        return how

    def backward_done(self, pages: PageSet | None) -> None:
        if pages is not None:
            pages.end()
