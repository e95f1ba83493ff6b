"""The scaling state of one graph: which page each of its calls gets, and whether the call is cold.

| call | its forward runs | with the scales of | amaxes |
|---|---|---|---|
| training, warm | the code that Inductor made | the state | kept |
| training, cold | eagerly | the current amax, where a slot has no scale yet | kept |
| measured (`runtime.probe`) | eagerly | the state | kept |
| dry: `freeze_scaling_state`, shape inference | as a training call | the state | lost |

A tensor that other graphs cast (`Operand.cast`) has its amax kept, and makes no call cold. When a call is
cold: see `life`. When the state moves: see `arena`.

A forward inside of a running backward is a recomputation (eager checkpointing) if a forward of its weights
waits for a backward. It runs as that one did, since the state has not moved, and raises no amax further. In a
reentrant checkpoint, the forward in the backward is the first one: the forward before it ran without
gradients, as an evaluation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ... import compat, process
from ...compilation import Job
from ...errors import Fp8CompileError
from ...extension import GraphFeature
from ...passes.joint import Joint, Rewritten
from ...runtime.calls import Call, is_dry
from ...runtime.compiled_graph import CompiledGraph
from ...runtime.ledger import Ledger
from . import leftovers, loads, notices
from .arena import Arenas, Where
from .life import PageSet, PageSets
from .state import check_unwanted
from .state_page import new_amaxes, new_scales, rows_for
from .store import Slots, StateInputs

CAPTURED = (
    "a CUDA graph is being captured, and scales of this graph are not known yet: finding them waits for the "
    "device. Train some steps before, or leave the capture to Inductor: options={'triton.cudagraphs': True}"
)
LOST = (
    "the update of the scaling state was lost in this graph; options={'recipe': 'tensorwise'} does without "
    "state"
)


class DelayedGraph(GraphFeature):
    """Of a graph for training. `history`: how many amaxes its slots keep; 0: no scale is stored, but a state
    may have been loaded."""

    def __init__(self, job: Job, history: int):
        self.inputs, self.history = 2 if history else 0, history
        fixed = compat.inductor.cuda_graphs(job.options.inductor)  # they are recorded for addresses
        self.stable, self.fixed = (fixed, True), fixed
        # no rank may run a call eagerly alone: warm calls have other collectives
        self.together = compat.inductor.changes_collectives(job.options.inductor)
        self.first = 0
        self.slots = Slots()
        self.page_sets: PageSets | None = None  # None if no tensor of the graph has a slot
        self.graph: CompiledGraph | None = None

    def place(self, first: int) -> None:
        self.first = first

    def before(self, job: Job, joint: Joint) -> None:
        if self.inputs:
            joint.extras.put(StateInputs(self.first))

    def after(self, job: Job, done: Rewritten) -> None:
        self.slots = done.results.of(Slots)
        self.hears = bool(self.slots.keys)
        if self.hears:
            where = Where(torch.device("cpu"), self.history, self.slots.groups, self.fixed)
            self.page_sets = PageSets(self.slots, where, not done.inference, self.together)

    def half(self, graph: GraphModule) -> None:
        """Fp8CompileError if the state would learn nothing: the partitioner drops what fits no half."""
        writes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        written = [getattr(node.args[0], "name", None) for node in writes]
        if self.hears and self.slots.inputs[1] not in written:
            raise Fp8CompileError(LOST)

    def backward(self, names: Sequence[str]) -> Callable[[Sequence[Any]], bool] | None:
        page_sets = self.page_sets
        if page_sets is None or self.slots.inputs[1] not in names:
            return None
        position = names.index(self.slots.inputs[1])

        def heard(args: Sequence[Any]) -> bool:
            pages = page_sets.by_pointer.get(args[position].data_ptr())
            if pages is not None:
                pages.begin_backward()
            return pages is not None and pages.runs_cold

        return heard

    def compiled(self, job: Job, graph: CompiledGraph) -> None:
        self.graph = graph

    def first_call(self, args: Sequence[Any], owners: Mapping[int, weakref.ref], record: int | None) -> None:
        if self.page_sets is not None:
            loads.listen_to_callers()
        wanted = self.page_sets.inputs if self.page_sets is not None else ()
        check_unwanted([args[i] for i in owners], [args[i] for i in wanted])

    def forget(self) -> None:
        if self.page_sets is not None:
            self.page_sets.forget()

    def stand_ins(self, device: torch.device) -> Sequence[torch.Tensor]:
        rows = rows_for(len(self.slots.keys))
        return (new_scales(rows, device), new_amaxes(rows, device)) if self.page_sets is not None else ()

    def arguments(self, args: Sequence[Any], call: Call) -> Sequence[torch.Tensor]:
        """The scales and amaxes of the page for these arguments. Makes the call cold, or a recomputation of
        one that was."""
        if self.page_sets is None:
            return ()
        assert self.graph is not None
        device, dry = args[self.graph.interface.weights[0]].device, is_dry()
        inside, hooked = compat.autograd.in_backward(), compat.autograd.recomputing()
        arenas = process.of(Arenas)
        moves = not hooked and arenas.move(alone=dry)
        pages = self.page_sets.at(args, device)
        again = inside and pages.is_again(hooked)
        if not dry and not again:
            if pages.cold and not self.together and compat.autograd.capturing():
                raise Fp8CompileError(CAPTURED)
            self._agree(pages)
            notices.look()
            moves = moves or arenas.move()
            if not moves and pages.is_held_up():
                for pending in list(arenas.waiting):
                    pending.give_up()
                moves = arenas.move()
        pages.arena.ready(moves)
        if not again:
            pages.decide()
        if not again and not dry:
            if pages.runs_cold and self.graph.record is not None:
                process.of(Ledger).ran_cold(self.graph.record, later=pages.called)
            pages.begin()
        call.state, call.cold = pages, pages.runs_cold
        if pages.first:
            leftovers.before_call(pages, call.cold)
        scales, amaxes = pages.state(dry)
        call.own = (amaxes.data_ptr(),)
        return scales, amaxes

    def _agree(self, pages: PageSet) -> None:
        """Compare with other ranks. The rows of the pages of a group have to be the same on all of them."""
        assert self.graph is not None
        calls, known = self.graph.calls, self.graph.interface
        if not calls.agreed or (not pages.called and pages.arena.where.groups):
            names = [name.removeprefix(known.prefix) for name in known.names]
            slots = ", ".join(f"{names[key.input]} {key.role} {key.use}" for key in self.slots.keys)
            calls.agree(f"{slots}, rows from {pages.page.first}")
