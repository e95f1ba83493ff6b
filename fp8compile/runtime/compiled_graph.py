"""How a compiled graph runs: which pages it gets, and whether a call is warm or cold.

A *warm* call runs what Inductor made: every scale is known before its tensor is. In the first calls some slot has seen
nothing, or zeros only (a zero-initialised projection has no gradient behind it), and a scale of 1 would flush gradients
to zero. Such a *cold* call runs the same graph operator by operator, on the reference implementations in `ops`, which
take the current amax where there is no scale. Forward and backward of one call are of one kind: what is saved between
them (layouts, random numbers) is.

A tensor that overflowed in the call before (see `watch`) makes a call a cold one, too. It may have hidden that the next layer's
grew as well, so whatever its slot's scale would saturate is scaled by its current amax there: after weights were loaded, say,
one cold call is right in all layers of the graph. The update does not know how a call ran. So what was found beyond its limit
in that call makes the next one cold, which is the last.

A call that someone wants to measure (see `measure`), with any recipe, runs operator by operator, with the scales of a warm one.

The state moves once a training call. A forward inside of a running backward is a recomputation (eager checkpointing)
if that call's forward has run before, and leaves the state as it was. With a reentrant checkpoint it is the first one: what
ran before had no gradients, and was an evaluation.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from .. import compat
from ..dryrun.placeholders import hollow
from ..errors import Fp8CompileError
from ..ir import state_page
from ..ir.fx_utils import fake_mode_of, is_tensor, value
from ..passes import Rewritten
from ..passes.base import run_pass
from ..passes.lower import lower
from . import probe, state
from .interpreter import Boxed, Eager, How, boxed
from .ledger import LEDGER
from .overflow import Overflow, say
from .state import Book, PageSet, check_unwanted

DRY: ContextVar[bool] = ContextVar("fp8compile_dry_run", default=False)

_how = "compiled"


@contextlib.contextmanager
def _as(how: str) -> Iterator[None]:
    global _how
    before, _how = _how, how
    try:
        yield
    finally:
        _how = before


def interpreted() -> contextlib.AbstractContextManager[None]:
    """Inside, graphs are rewritten and lowered as always, but run by an FX interpreter instead of being compiled.
    Inductor takes 10 to 20 s a graph; this takes none of them. For tests, and for finding out whose bug it is."""
    return _as("interpreted")


def hollowed() -> contextlib.AbstractContextManager[None]:
    """Inside, graphs are rewritten as always, and neither lowered nor compiled: what is called computes nothing (see `hollow`).
    For reports without compiling."""
    return _as("hollow")


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


def compile_inner(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Inductor's own `inner_compile`, or what takes its place inside of the above."""
    if _how == "hollow":
        return hollow(gm.graph)
    if _how == "interpreted":
        lowered(gm.graph)
        gm.recompile()
        return boxed(Eager(gm))
    return compat.compile_inner(gm, example_inputs, **kwargs)


def lowered(graph: Graph) -> None:
    """Our part of Inductor's passes over a partitioned graph: no operator of ours is left behind it."""
    run_pass("lower", graph, lambda: lower(graph))


class Call(NamedTuple):
    """A call in progress. `pages`: its state. `again`: it is a recomputation. `dry`: it leaves the state as it is."""

    pages: PageSet | None
    look: probe.Look | None  # if it is measured
    again: bool = False
    dry: bool = False


NO_CALL = Call(None, None)


class CompiledGraph:
    """One Dynamo graph: compiles the two halves that AOTAutograd makes of it, then serves as its callable."""

    def __init__(
        self,
        weights: Sequence[int],
        history: int,
        capacity: tuple[int, int] | None,
        observes: bool = False,
        trains: bool = True,
        names: Sequence[str] = (),
        parameters: int = 0,
    ):
        """`observes`: it moves the scaling state but multiplies in high precision, so that no call of it is a cold one.
        `trains`: it is no evaluation. `names`: of its inputs. `parameters`: how many of the weights are some."""
        self.weights = tuple(weights)  # positions, parameters first
        self.parameters = self.weights[:parameters]
        self.history, self.capacity, self.observes, self.trains = history, capacity, observes, trains
        self.names = tuple(names)
        self.record: int | None = None  # its entry in the ledger
        self.converts = False  # some matmul of it became FP8
        # ids of the parameters that it was called with -> all weights that came with them, by input; until one of them is gone
        self.met: dict[tuple[int, ...], dict[int, weakref.ref]] = {}
        self.casts: dict[tuple[int, probe.Name], probe.Cast] = {}  # what it quantizes
        self.rewritten: Rewritten | None = None
        self.book: Book | None = None
        self.call: Callable[..., Any] | None = None
        self.agreed = False  # on one set of slots with the other ranks, where amaxes are reduced
        self.local = threading.local()  # `call`: the one in progress on a thread
        self.idle: torch.Tensor | None = None  # a stand-in where the state inputs are unused
        self.looking = probe.Looking()
        self.marker: str | None = None  # a value saved for backward, by which a cold call's backward is known:
        self.marks = compat.TensorMarks()

    # -- compiling --

    def inner_compile(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """In the place of Inductor's own: compile, and keep the graph as it was for cold calls."""
        if _how == "hollow":  # nothing is scaled: no state
            return compile_inner(gm, example_inputs, **kwargs)
        backward = bool(kwargs.get("is_backward"))
        done = self.rewritten  # None: a graph without inputs
        cold = None
        if done is not None and done.pages:
            assert self.capacity is not None
            _check_update(gm, done.pages[backward], done.backward if backward else done.forward)
            self.book = self.book or Book(done.forward, done.backward, self.capacity, self.history)
        if done is not None and (done.pages or (self.converts and self.trains)):
            cold = compat.copy_graph(gm)
            self._know(probe.casts_of(cold.graph))
        warm = compile_inner(gm, example_inputs, **kwargs)
        if cold is None:
            return warm
        devices = {value(node).device.type for node in cold.graph.nodes if is_tensor(node)}
        device = next((kind for kind in devices if kind != "cpu"), "cpu")  # numbers may be inputs on the CPU
        return self._backward(cold, warm, device) if backward else self._forward(cold, warm, device)

    def _know(self, casts: dict[tuple[int, probe.Name], probe.Cast]) -> None:
        self.casts.update(casts)
        if self.trains:
            for owners in list(self.met.values()):
                probe.know(owners, casts)

    def _forward(self, gm: GraphModule, warm: Boxed, device: str) -> Boxed:
        eager, outputs = boxed(Eager(gm)), _outputs(gm)
        # the last ones are saved for backward; a marker that turns out to be none of them is not looked for
        inputs = [value(x) for x in gm.graph.find_nodes(op="placeholder") if is_tensor(x)]
        made = [i for i, x in enumerate(outputs) if isinstance(x, Node) and x.op != "placeholder" and is_tensor(x)]
        made = [i for i in made if not any(compat.share_memory(value(outputs[i]), x) for x in inputs)]  # always at one address
        marker = made[-1] if made else None
        self.marker = outputs[marker].name if marker is not None else None

        def run(args: list[Any]) -> Any:
            pages, look, again, dry = getattr(self.local, "call", NO_CALL)
            if (pages is None and look is None) or not _on(device, args):
                return warm(args)
            cold, eagerly = False, look is not None
            if pages is not None:
                cold = (pages.cold or (again and pages.was_cold)) and not self.observes
                eagerly = eagerly or cold or (again and pages.was_eager)
                if not dry:
                    pages.was_cold, pages.was_eager = cold, eagerly
            if eagerly:
                how = How(cold, look)
                result = eager(args, how)
                if marker is not None:
                    self.marks.add(result[marker], how)
            else:
                result = warm(args)
            if pages is not None and not (again or dry) and not pages.backward.homes:
                self._moved(pages)
            return result

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _backward(self, gm: GraphModule, warm: Boxed, device: str) -> Boxed:
        assert self.rewritten is not None
        book, eager = self.book, boxed(Eager(gm))
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        page = self.rewritten.pages[1] if book is not None else None
        page_at, marker_at = (names.index(x) if x in names else None for x in (page, self.marker))

        def run(args: list[Any]) -> Any:
            pages = book.by_pointer.get(args[page_at].data_ptr()) if book is not None and page_at is not None else None
            if marker_at is not None:
                how = self.marks.note(args[marker_at])
            else:
                how = How(True) if pages is not None and pages.cold and not self.observes else None
            if pages is not None:
                pages.pending = max(0, pages.pending - 1)
                with compat.unseen(), state.LOCK:
                    pages.backward.refresh()
            if how is not None and how.look is not None:
                self.looking.backward(how.look)
            if how is not None and _on(device, args):
                result = eager(args, how)
            else:
                result = warm(args)
            if pages is not None:
                self._moved(pages)
            return result

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    # -- running --

    def _moved(self, pages: PageSet) -> None:
        """Behind the last update of a training call."""
        with compat.unseen():
            if pages.cold and pages.was_cold:
                pages.after_cold_call()
            if pages.watch is not None and not self.observes:
                pages.watch.after_call()

    def _overflowed(self, pages: PageSet, overflows: Sequence[Overflow]) -> None:
        assert self.book is not None
        keys = self.book.keys

        def name(overflow: Overflow) -> str:
            key = keys[overflow.backward][overflow.row]
            return f"{self.names[key.input] if key.input < len(self.names) else key.input} ({key.role})"

        pages.overflowed()
        say(overflows, name)

    def __call__(self, *args: Any) -> Any:
        assert self.call is not None
        if not self.weights:
            return self.call(*args)
        first = args[self.weights[0]]
        if isinstance(first, FakeTensor):  # DDPOptimizer asks for the shapes of the outputs
            with fake_mode_of(first):
                pages = (state_page.new_page(rows, self.history, first.device) for rows in self.capacity or ())
                return self.call(*args, *pages)
        if isinstance(first, nn.Parameter):  # one piece of code may serve many layers and models, and any weight be replaced
            key = tuple([id(args[i]) for i in self.parameters])  # some microseconds for a hundred
            if key not in self.met:
                self._meet(key, args)
        if self.capacity is None:
            if not (probe.ACTIVE or self.looking.open):
                return self.call(*args)
            return self._run(args, Call(None, self._looks(args)))
        if self.book is None:  # nothing became FP8, or nothing that has a state: the state inputs are read by nobody
            if self.idle is None:
                self.idle = state_page.new_page(self.capacity[0], self.history, first.device)
            if not (probe.ACTIVE or self.looking.open):
                return self.call(*args, self.idle, self.idle)
            return self._run((*args, self.idle, self.idle), Call(None, self._looks(args)))
        look = self._looks(args) if probe.ACTIVE or self.looking.open else None
        with compat.unseen():
            call, forward, backward = self._open(self.book, args, look)
        return self._run((*args, forward, backward), call)

    def _open(self, book: Book, args: Sequence[Any], look: probe.Look | None) -> tuple[Call, torch.Tensor, torch.Tensor]:
        """The call, and the pages of forward and backward that it is given."""
        pages = book.open(args, args[self.weights[0]].device)
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
            if pages.watch is not None and not pages.cold and not self.observes:
                overflows = pages.watch.before_call()
                if overflows:
                    self._overflowed(pages, overflows)
        return Call(pages, look, again), forward, backward

    def _agree(self) -> None:
        """Before the first all-reduce: amaxes of different graphs must not be mixed up, and a hang tells nobody why."""
        assert self.rewritten is not None
        group, self.agreed = self.rewritten.group, True
        if group is None:
            return
        keys = (*self.rewritten.forward, *self.rewritten.backward)
        what = ", ".join(f"{self.names[key.input]} {key.role} {key.use}" for key in keys)
        others = compat.different(group, what)
        if others:
            raise Fp8CompileError(
                f"reduce_amax: ranks {others} of the process group {group!r} have another graph here, with other amaxes: "
                f"this one has {what[:200]}. Ranks that run different layers (stages, experts) need groups of their own: "
                "options={'reduce_amax': group}, with the group of those that run the same"
            )

    def _meet(self, key: tuple[int, ...], args: Sequence[Any]) -> None:
        """The first call with these parameters."""
        if self.trains:
            check_unwanted((args[i] for i in self.weights), [args[i] for i in self.book.inputs] if self.book else [])
        met = self.met
        owners = {i: weakref.ref(args[i]) for i in self.weights}
        for i in self.parameters:  # an id may have another tensor then
            owners[i] = weakref.ref(args[i], lambda _: met.pop(key, None))
        met[key] = owners
        if self.trains:
            probe.know(owners, self.casts)
        if self.record is not None:
            LEDGER.attach(self.record, [args[i] for i in self.weights])

    def _looks(self, args: Sequence[Any]) -> probe.Look | None:
        """Is this call measured?"""
        if not self.trains or not self.converts or self.observes or compat.compiled_autograd():
            return None
        may_begin = not compat.recomputing() and not compat.repeating()
        may_begin = may_begin and not DRY.get() and not compat.inferring_shapes()
        return self.looking.at(args, self.weights, compat.in_backward(), may_begin)

    def _run(self, args: Sequence[Any], call: Call) -> Any:
        assert self.call is not None
        before, self.local.call = getattr(self.local, "call", NO_CALL), call
        try:
            with compat.saved_as_they_are(self._is_ours):
                return self.call(*args)
        finally:
            self.local.call = before

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        return (self.book is not None and tensor.data_ptr() in self.book.by_pointer) or tensor in self.marks


def _check_update(gm: GraphModule, page: str, slots: Sequence[Any]) -> None:
    """The partitioner drops, silently, a mutation that does not fit into its half of the graph: no state may go that way."""
    writes = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    if slots and not any(getattr(node.args[0], "name", None) == page for node in writes):
        raise Fp8CompileError(
            'the update of the scaling state was lost in this graph; options={"recipe": "tensorwise"} does without state'
        )


def _outputs(gm: GraphModule) -> list[Any]:
    return list(next(iter(gm.graph.find_nodes(op="output"))).args[0])  # type: ignore[arg-type]


def _on(device: str, args: Sequence[Any]) -> bool:
    """Are the arguments where the graph was compiled for? (A graph compiled for a described GPU cannot run here.)"""
    return any(isinstance(x, torch.Tensor) and x.device.type == device for x in args)
