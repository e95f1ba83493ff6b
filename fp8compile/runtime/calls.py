"""How each call of a compiled graph runs: which page it gets, and whether it is warm or cold.

| call | its forward runs | with the scales of | amaxes |
|---|---|---|---|
| training, warm | the code that Inductor made | the state | kept |
| training, cold | eagerly (`ir.ops`) | the current amax, where a slot has no scale yet | kept |
| measured (see `probe`) | eagerly | the state | kept |
| observed: a phase of high precision | the code | none: nothing is cast, and it is never cold | kept |
| dry: `freeze_scaling_state`, shape inference | as a training call | the state | lost |

A backward runs as its forward did: layouts and random numbers of saved tensors differ between the two ways.

When a call is cold: see `life`. When the state moves: see `arena`.

A forward inside of a running backward is a recomputation (eager checkpointing) if a forward of its weights
waits for a backward. It runs as that one did, since the state has not moved, and raises no amax further. In a
reentrant checkpoint, the forward in the backward is the first one: the forward before it ran without
gradients, as an evaluation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import compat, process
from ..errors import Fp8CompileError
from ..passes.joint import Rewritten
from . import leftovers, notices, probe
from .agreement import agree
from .arena import Arenas, Where
from .interpreter import How
from .ledger import Ledger
from .life import Book, PageSet

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
    fixed: bool  # CUDA graphs are recorded for the addresses of both
    observes: bool  # the graph moves the state but multiplies in high precision; its calls are never cold
    together: bool  # no rank may run a call eagerly alone: warm calls have other collectives
    trains: bool  # the graph is for training, not for evaluation


class Call(NamedTuple):
    """A call in progress."""

    pages: PageSet | None  # its state
    look: probe.Look | None  # set if the call is measured


NO_CALL = Call(None, None)


class Calls:
    """Decides for each call of one graph which pages it gets, and how it runs."""

    def __init__(self, interface: Interface):
        self.interface = interface
        self.looking = probe.Looking()
        self.record: int | None = None  # the graph's index in the ledger
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
            where = Where(torch.device("cpu"), known.history, done.state_groups, known.fixed)
            self.book = Book(done.slots, where, not done.inference, known.observes, known.together)

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
        """Begin a call with these arguments: the `Call`, and the scales and amaxes of its page."""
        assert self.book is not None
        dry = DRY.get() or compat.process_groups.inferring_shapes()
        inside, hooked = compat.autograd.in_backward(), compat.autograd.recomputing()
        arenas = process.of(Arenas)
        moves = not hooked and arenas.move(alone=dry)
        pages = self.book.open(args, device)
        again = inside and pages.is_again(hooked)
        if not dry and not again:
            if pages.will_run_cold() and compat.autograd.capturing():
                raise Fp8CompileError(CAPTURED)
            self.agree(pages)
            notices.look()
            moves = moves or arenas.move()
            if not moves and pages.is_held_up():
                arenas.give_up()
                moves = arenas.move()
        pages.arena.ready(moves)
        if not again:
            pages.decide()
        if not again and not dry:
            if pages.runs_cold and self.record is not None:
                process.of(Ledger).ran_cold(self.record, later=pages.called)
            pages.begin()
        return Call(pages, look), *pages.state(dry)

    def agree(self, pages: PageSet | None = None) -> None:
        """Compare with other ranks, before the first all-reduce; after an error, again in the next call. The
        rows of the pages of a group have to be the same on all of its ranks."""
        if not self.agreed or (pages is not None and not pages.called and pages.arena.where.groups):
            keys = self.book.keys if self.book is not None else ()
            known = self.interface
            names = [name.removeprefix(known.prefix) for name in known.names]
            slots = ", ".join(f"{names[key.input]} {key.role} {key.use}" for key in keys)
            slots += f", rows from {pages.page.first}" if pages is not None else ""
            agree(self.groups, slots, self.decisions)
            self.agreed = True

    # -- in a call --

    def forward(self, call: Call) -> How | None:
        """How to run the forward of a call eagerly; None: run the compiled code."""
        pages, look = call
        cold = pages is not None and pages.runs_cold
        if pages is not None and pages.first:
            leftovers.before_call(pages, cold)
        return How(cold, look) if cold or look is not None else None

    def backward(self, pages: PageSet | None, marker: torch.Tensor | None) -> How | None:
        """As `forward`. `marker`: a tensor that the forward saved; its mark tells how the forward ran."""
        if marker is not None:
            how = self.marks.note(marker)
        else:
            how = How(True) if pages is not None and pages.runs_cold else None
        if pages is not None:
            pages.begin_backward()
        if how is not None and how.look is not None:
            self.looking.backward(how.look)
        return how
