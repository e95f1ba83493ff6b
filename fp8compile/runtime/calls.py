"""How each call of a compiled graph runs: which pages it gets, and whether it is warm or cold.

A *warm* call runs the code that Inductor made: the scale of a tensor is known before the tensor is. A *cold* call runs the same
graph operator by operator, on the reference implementations in `ir.ops`. These take the current amax of a tensor whose slot has
no scale yet. The first calls of a graph are cold: some slot has seen nothing, or only zeros (a zero-initialised projection has
no gradient behind it), and a scale of 1 would flush small gradients to zero. The backward of a call runs as its forward did,
because layouts and random numbers of saved tensors differ between the two ways.

A call is also cold if a tensor overflowed in the call before (see `overflow`). That overflow may have hidden that the amax of
the next layer grew as well. So a cold call uses the current amax of every tensor that the stored scale would saturate. After
weights were loaded, for example, one cold call gives right results in all layers of the graph. The state update does not know
how a call ran: tensors beyond their limit in the cold call make the next call cold, too. That one is the last.

A measured call (see `probe`) runs operator by operator with the scales of a warm one, with any recipe.

The state moves once a training call. A forward inside of a running backward is a recomputation (eager checkpointing) if the
forward of the same call has run before; it leaves the state as it is. In a reentrant checkpoint it is the first forward: the
one before ran without gradients, as an evaluation.
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
from ..passes.pipeline import Rewritten
from . import probe, state
from .interpreter import How
from .overflow import Overflow, say
from .state import Book, PageSet

DRY: ContextVar[bool] = ContextVar("fp8compile_dry_run", default=False)


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
    """Inside, training calls on this thread leave the scaling state as it is: for batches that are no training data (a search
    for the largest batch that fits, a model that is called for the shapes of its outputs). They compute what they would, and
    their backward may come later. Pipeline stages of torch.distributed need none: their shape inference is known."""
    token = DRY.set(True)
    try:
        yield
    finally:
        DRY.reset(token)


@dataclass(frozen=True)
class Interface:
    """What is known of a graph before it is compiled."""

    weights: tuple[int, ...]  # positions among its inputs, parameters first
    parameters: tuple[int, ...]
    names: tuple[str, ...]  # of its inputs
    history: int  # amaxes a slot
    capacity: tuple[int, int] | None  # rows of the pages of forward and backward; None: no state
    observes: bool  # it moves the state but multiplies in high precision: no call of it is a cold one
    trains: bool  # it is no evaluation


class Call(NamedTuple):
    """A call in progress. `pages`: its state. `again`: it is a recomputation. `dry`: it leaves the state as it is."""

    pages: PageSet | None
    look: probe.Look | None  # if it is measured
    again: bool = False
    dry: bool = False


NO_CALL = Call(None, None)


class Calls:
    """The calls of one graph: the pages that each gets, and how it runs."""

    def __init__(self, interface: Interface):
        self.interface = interface
        self.looking = probe.Looking()
        self.book: Book | None = None  # there is none where nothing became FP8 that has a state
        self.group: str | None = None  # the process group over which amaxes are reduced
        self.agreed = False  # on one set of slots with the other ranks of that group
        self.marks = compat.TensorMarks()  # values that forwards which ran eagerly have saved, with how they ran
        self.local = threading.local()  # `call`: the one in progress on a thread

    def keep_state(self, done: Rewritten) -> None:
        """The graph has slots. Forward and backward are compiled one after the other, and share one book."""
        assert self.interface.capacity is not None
        self.group = done.group
        self.book = self.book or Book(done.forward, done.backward, self.interface.capacity, self.interface.history)

    @property
    def current(self) -> Call:
        return getattr(self.local, "call", NO_CALL)

    def run(self, function: Callable[..., Any], args: Sequence[Any], call: Call) -> Any:
        """`function(*args)`, with `call` in progress on this thread."""
        before, self.local.call = self.current, call
        try:
            with compat.saved_as_they_are(self._is_ours):
                return function(*args)
        finally:
            self.local.call = before

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        return (self.book is not None and tensor.data_ptr() in self.book.by_pointer) or tensor in self.marks

    # -- before a call --

    def open(self, args: Sequence[Any], look: probe.Look | None) -> tuple[Call, torch.Tensor, torch.Tensor]:
        """The call, and the pages of forward and backward that it is given."""
        assert self.book is not None
        pages = self.book.open(args, args[self.interface.weights[0]].device)
        forward, backward = pages.forward.tensor, pages.backward.tensor
        if DRY.get() or compat.inferring_shapes():
            return Call(pages, look, dry=True), forward.clone(), backward.clone()
        if not self.agreed:
            self._agree()
        again = (pages.pending > 0 and compat.recomputing()) or compat.repeating()
        if again:  # a recomputation: the scales of the first time, and the state stays where it is
            forward = pages.before()
            if not pages.backward.homes:  # nothing moves in its backward, which cannot be told from another's
                pages.pending = max(0, pages.pending - 1)
        else:
            pages.pending += 1
            if pages.cold and pages.pending > state.PATIENCE:  # nobody calls their backwards
                pages.after_cold_call()
            if pages.watch is not None and not pages.cold and not self.interface.observes:
                overflows = pages.watch.before_call()
                if overflows:
                    self._overflowed(pages, overflows)
        return Call(pages, look, again), forward, backward

    def _agree(self) -> None:
        """Before the first all-reduce: amaxes of different graphs must not be mixed up, and a hang tells nobody why."""
        group, self.agreed = self.group, True
        if group is None:
            return
        assert self.book is not None
        keys = (*self.book.keys[0], *self.book.keys[1])
        what = ", ".join(f"{self.interface.names[key.input]} {key.role} {key.use}" for key in keys)
        others = compat.different(group, what)
        if others:
            raise Fp8CompileError(
                f"reduce_amax: ranks {others} of the process group {group!r} have another graph here, with other amaxes: "
                f"this one has {what[:200]}. Ranks that run different layers (stages, experts) need groups of their own: "
                "options={'reduce_amax': group}, with the group of those that run the same"
            )

    def _overflowed(self, pages: PageSet, overflows: Sequence[Overflow]) -> None:
        assert self.book is not None
        keys = self.book.keys

        def name(overflow: Overflow) -> str:
            key = keys[overflow.backward][overflow.row]
            return f"{self.interface.names[key.input] if key.input < len(self.interface.names) else key.input} ({key.role})"

        pages.overflowed()
        say(overflows, name)

    # -- in a call --

    def forward(self, call: Call) -> How | None:
        """How the forward of a call runs operator by operator; None: as it was compiled."""
        pages, look, again, dry = call
        cold, eagerly = False, look is not None
        if pages is not None:
            cold = (pages.cold or (again and pages.was_cold)) and not self.interface.observes
            eagerly = eagerly or cold or (again and pages.was_eager)
            if not dry:
                pages.was_cold, pages.was_eager = cold, eagerly
        return How(cold, look) if eagerly else None

    def forward_done(self, call: Call) -> None:
        if call.pages is not None and not (call.again or call.dry) and not call.pages.backward.homes:
            self._moved(call.pages)

    def backward(self, pages: PageSet | None, marker: torch.Tensor | None) -> How | None:
        """As `forward`. `marker`: a value that the forward saved, by which is known how it ran."""
        if marker is not None:
            how = self.marks.note(marker)
        else:
            how = How(True) if pages is not None and pages.cold and not self.interface.observes else None
        if pages is not None:
            pages.pending = max(0, pages.pending - 1)
            with compat.unseen(), state.LOCK:
                pages.backward.refresh()
        if how is not None and how.look is not None:
            self.looking.backward(how.look)
        return how

    def backward_done(self, pages: PageSet | None) -> None:
        if pages is not None:
            self._moved(pages)

    def _moved(self, pages: PageSet) -> None:
        """Behind the last update of a training call."""
        with compat.unseen():
            if pages.cold and pages.was_cold:
                pages.after_cold_call()
            if pages.watch is not None and not self.interface.observes:
                pages.watch.after_call()
