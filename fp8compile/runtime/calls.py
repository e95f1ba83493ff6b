"""How each call of a compiled graph runs: which pages it gets, and whether it is warm or cold.

| call | its forward runs | with the scales of | the state |
|---|---|---|---|
| training, warm | the code that Inductor made | the state | moves |
| training, cold | eagerly (`ir.ops`) | the current amax, where a slot has no scale, or one that would saturate | moves |
| measured (see `probe`) | eagerly | the state | moves |
| observed: a phase of high precision | the code | none: nothing is cast, and it is never cold | moves |
| recomputation (see `repeats`) | as its original did | that call, from a copy of its page | stays |
| dry: `freeze_scaling_state`, shape inference | as a training call | the state, from a copy | stays |

A backward runs as its forward did: layouts and random numbers of saved tensors differ between the two ways.

| event | the next training calls |
|---|---|
| the first call of these parameters | cold until every slot has seen an amax above 0, at most `PATIENCE` times |
| an overflow or an underflow (see `overflow`) | one cold; two, if the first one is beyond its limit, too |
| `load_state_dict` of weights (see `loads`) | one cold |
| a loaded scaling state | cold where its slots are |
| another graph has taken the slots over | as there: the values come back |

A slot that has seen nothing, or only zeros (after a zero-initialised projection all gradients are zero), has a scale of 1,
which would flush small gradients to zero. An overflow may have hidden that the amax of the next layer grew as well: hence a
cold call uses the current amax of every tensor that the stored scale would saturate. The state update does not know how a
call ran.

Where Inductor fuses, merges or reorders collectives (`together`), a rank that runs eagerly would wait for collectives that the
others do not call. There, only the first call is cold, and an overflow saturates for one call more.

A forward inside of a running backward is a recomputation (eager checkpointing) if the forward of the same call has run before.
In a reentrant checkpoint, the forward in the backward counts as the first one: the forward before it ran without gradients, as
an evaluation.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from .. import compat
from ..errors import Fp8CompileError
from ..logs import get_logger
from ..passes.pipeline import Rewritten
from . import leftovers, probe, state
from .interpreter import How
from .overflow import Overflow, say, say_not_finite, watch_of
from .repeats import Ran
from .state import Book, PageSet

logger = get_logger(__name__)

DRY: ContextVar[bool] = ContextVar("fp8compile_dry_run", default=False)


@contextlib.contextmanager
def freeze_scaling_state() -> Iterator[None]:
    """Inside, training calls on this thread leave the scaling state as it is. Use it for batches that are no training data: a
    search for the largest batch that fits, a call that only asks for the shapes of the outputs. Results are the usual ones, and
    the backward of such a call may run outside. Pipeline stages of torch.distributed do not need this: fp8compile recognises
    their shape inference."""
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
    names: tuple[str, ...]  # of its inputs
    history: int  # amaxes that a slot keeps
    stateful: bool  # it has two inputs for its state
    observes: bool  # the graph moves the state but multiplies in high precision; its calls are never cold
    trains: bool  # the graph is for training, not for evaluation


class Call(NamedTuple):
    """A call in progress. `pages`: its state. `again`: it is a recomputation. `dry`: it leaves the state as it is. `ran`: how
    its forward runs."""

    pages: PageSet | None
    look: probe.Look | None  # set if the call is measured
    again: bool = False
    dry: bool = False
    ran: Ran | None = None


NO_CALL = Call(None, None)


class Calls:
    """Decides for each call of one graph which pages it gets, and how it runs."""

    def __init__(self, interface: Interface):
        self.interface = interface
        self.looking = probe.Looking()
        self.book: Book | None = None  # None if no tensor of the graph has a slot
        self.groups: tuple[str, ...] = ()  # process groups over which amaxes are reduced
        self.decisions: tuple[str, ...] = ()  # about each matmul of a weight
        self.together = False  # no rank may run a call eagerly alone: warm calls have other collectives
        self.agreed = False  # the ranks of those groups have compared their slots and decisions
        self.marks = compat.autograd.TensorMarks()  # tensors that forwards run eagerly have saved, each with its How
        self.local = threading.local()  # `call`: the call in progress on this thread

    def keep_state(self, done: Rewritten) -> None:
        """Make the book of a graph with slots. Forward and backward are compiled one after the other, and share one book."""
        self.book = self.book or Book(done.forward, done.backward, self.interface.history)

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
        return (self.book is not None and tensor.data_ptr() in self.book.by_pointer) or self.marks.note(tensor) is not None

    # -- before a call --

    def open(
        self, args: Sequence[Any], device: torch.device, look: probe.Look | None
    ) -> tuple[Call, torch.Tensor, torch.Tensor]:
        """Begin a call with these weights among its arguments: the `Call`, and the pages of forward and backward to pass to the
        graph."""
        assert self.book is not None
        pages = self.book.open(args, device)
        forward, backward = pages.forward.tensor, pages.backward.tensor
        if DRY.get() or compat.process_groups.inferring_shapes():
            with compat.autograd.unseen():
                return Call(pages, look, dry=True), forward.clone(), backward.clone()
        if not self.agreed:
            self.agree()
        again = compat.autograd.hooked() and self._again(pages)
        if again:  # a recomputation uses the scales of its original, and leaves the state as it is
            ran = pages.repeats.original()
            with compat.autograd.unseen():
                forward = pages.before(ran)
            if not pages.backward.homes:  # no slots in backward, so it has no page by which `backward` could count it
                pages.pending = max(0, pages.pending - 1)
        else:
            ran = pages.begin()
            if pages.cold and pages.pending > state.PATIENCE:  # the backwards of these forwards do not come
                pages.after_cold_call()
            if pages.watched:
                self._watch(pages)
        return Call(pages, look, again, False, ran), forward, backward

    def _again(self, pages: PageSet) -> bool:
        """Is this forward a recomputation?"""
        return (pages.pending > 0 and compat.autograd.recomputing()) or compat.autograd.repeating()

    def _watch(self, pages: PageSet) -> None:
        """Before a call that moves these pages."""
        if self.interface.observes:  # nothing is cast: nothing saturates
            pages.forward.moves()
            return
        watch = pages.watch
        if watch is None or not watch.here:
            watch = pages.watch = watch_of(pages.forward.tensor.device)
        if not pages.cold:
            watch.look(pages.forward, pages.backward)
        if pages.forward.found or pages.backward.found:
            self._overflowed(pages, pages.overflows())
        watch.begins(pages.forward)

    def agree(self) -> None:
        """Fp8CompileError if ranks of the groups have other slots, or decided otherwise, or do not come to compare. Checked
        before the first all-reduce, which would mix up the amaxes of different graphs, or hang without saying why. After an
        error the next call compares again."""
        keys = (*self.book.keys[0], *self.book.keys[1]) if self.book is not None else ()
        slots = ", ".join(f"{self.interface.names[key.input]} {key.role} {key.use}" for key in keys)
        lines = (slots, *self.decisions)
        # with each group before an error: others wait for this rank
        found = {group: self._different(group, slots) for group in self.groups}
        for group, others in ((group, others) for group, others in found.items() if others):
            rank, text = next(iter(others.items()))
            theirs = text.split("\n")
            pairs = zip_longest(theirs[1:], lines[1:], fillvalue="nothing")
            differs = next((f"rank {rank} has {a}, this one {b}" for a, b in pairs if a != b), f"this one has {slots[:200]}")
            raise Fp8CompileError(
                f"ranks {list(others)} of the process group {group!r}, with which this rank shares amaxes (reduce_amax, "
                f"amax_group) or FP8 all-gathers, have another graph here, with other slots or decisions: {differs}. Ranks "
                "that run different layers (stages, experts) need groups of their own: options={'reduce_amax': group}, with "
                "the group of those that run the same. Where ranks see other sizes, write fp8 = 'on' or 'off' in rules "
                "instead of 'auto'"
            )
        self.agreed = True

    def _different(self, group: str, slots: str) -> dict[int, str]:
        """As `process_groups.different`. Fp8CompileError names the ranks that this one has waited for, and the graph."""
        rank, graph = torch.distributed.get_rank(), slots[:200] or "no tensor with a history"

        def waiting(missing: list[int], seconds: float) -> None:
            logger.warning(
                "fp8: rank %d waits for ranks %s of the process group %r to compile a graph with %s; gives up in %.0f s",
                *(rank, missing, group, graph, seconds),
            )

        try:
            return compat.process_groups.different(group, slots, "\n".join(self.decisions), waiting)
        except compat.process_groups.Alone as alone:
            missing, seconds = alone.args
            raise Fp8CompileError(
                f"reduce_amax, amax_group: rank {rank} has compiled a graph that ranks {missing} of the process group "
                f"{group!r} have not compiled within {seconds:.0f} s, half of the group's timeout: {graph}. No rank may "
                "compile a graph with other slots alone: all have to go the same way through the model, with inputs of the "
                'same sizes (drop the last batch, or pad it). Where sizes differ, write fp8 = "on" or "off" in rules instead '
                'of "auto". If the others only compile for longer, give the group a longer timeout'
            ) from None

    def _overflowed(self, pages: PageSet, overflows: Sequence[Overflow]) -> None:
        assert self.book is not None
        keys = self.book.keys

        def name(overflow: Overflow) -> str:
            key = keys[overflow.backward][overflow.row]
            return f"{self.interface.names[key.input] if key.input < len(self.interface.names) else key.input} ({key.role})"

        for bad in [overflow for overflow in overflows if overflow.amax == math.inf][:1]:
            say_not_finite(bad, name)
        overflows = [overflow for overflow in overflows if overflow.amax < math.inf]
        if overflows and not pages.cold:
            if not self.together:
                pages.overflowed()
            say(overflows, name)

    # -- in a call --

    def forward(self, call: Call) -> How | None:
        """How to run the forward of a call eagerly; None: run the compiled code."""
        pages, look, again, _, ran = call
        cold, eagerly = False, look is not None
        if again and ran is not None:
            cold, eagerly = ran.cold, eagerly or ran.eager
        elif pages is not None:
            cold = self._cold(pages) and not self.interface.observes
            if pages.first:
                leftovers.before_call(pages, cold)
            eagerly = eagerly or cold
            if ran is not None:
                ran.cold, ran.eager, pages.was_cold = cold, eagerly, cold
        return How(cold, look) if eagerly else None

    def forward_done(self, call: Call) -> None:
        if call.pages is not None and not (call.again or call.dry) and not call.pages.backward.homes:
            self._moved(call.pages)

    def backward(self, pages: PageSet | None, marker: torch.Tensor | None) -> How | None:
        """As `forward`. `marker`: a tensor that the forward saved; its mark tells how the forward ran."""
        if marker is not None:
            how = self.marks.note(marker)
        else:
            cold = pages is not None and (pages.was_cold if self.together else pages.cold)
            how = How(True) if cold and not self.interface.observes else None
        if pages is not None:
            pages.pending = max(0, pages.pending - 1)
            if pages.backward.stale:
                with compat.autograd.unseen(), state.LOCK:
                    pages.backward.refresh()
        if how is not None and how.look is not None:
            self.looking.backward(how.look)
        return how

    def backward_done(self, pages: PageSet | None) -> None:
        if pages is not None:
            self._moved(pages)

    def _cold(self, pages: PageSet) -> bool:
        """Is a call cold? `together`: only the first one is, for then it is on all ranks."""
        return pages.cold and not (self.together and pages.begun())

    def _moved(self, pages: PageSet) -> None:
        """Called after the last update of a training call."""
        if pages.cold and (pages.was_cold or self.together):
            pages.after_cold_call()
        if pages.watch is not None:
            pages.watch.ended(pages.backward)
        elif pages.watched:
            pages.backward.moves()
