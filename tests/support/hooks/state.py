"""Scaling state, phases, and measured calls."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from .base import Patched, noting


@dataclass(frozen=True)
class Slot:
    """A slot of `features.delayed.state`, and what tests read of it."""

    slot: Any

    page, row = (property(lambda self, name=name: getattr(self.slot, name)) for name in ("page", "row"))
    numbers = property(lambda self: self.slot.numbers)

    def scale(self) -> float:
        return float(self.numbers.scale)

    def scale_inv(self) -> float:
        return float(self.numbers.scale_inv)

    def history(self) -> list[float]:
        """Newest first; 0 where there was none yet."""
        return self.numbers.history.tolist()


def slots_of(model: nn.Module) -> dict[tuple[str, str, int], Slot]:
    """By parameter name, role, use; none in a copy without this feature."""
    with contextlib.suppress(ModuleNotFoundError):
        from fp8compile.features.delayed.state import slots_of

        return {key: Slot(slot) for key, slot in slots_of(model).items()}
    return {}


def cold(model: nn.Module) -> dict[tuple[str, str, int], bool]:
    """For each slot, whether the next call takes the current amax of its tensor."""
    return {key: bool(slot.numbers.cold) for key, slot in slots_of(model).items()}


def keep_scale(slot: Slot, factor: float) -> None:
    """Multiply its scale, and let no move compute another one."""
    from fp8compile.features.delayed import state_page

    row = slot.page.tensor[slot.row]
    row[state_page.SCALE] *= factor
    row[state_page.SCALE_INV] /= factor
    row[state_page.INTERVAL], row[state_page.LIMIT] = 2.0**20, torch.inf


def states_of_forwards() -> Patched:
    """The scales and amaxes that each forward is given. Keeps them alive: no two share memory by chance."""
    from fp8compile.features.delayed.graph import DelayedGraph

    return noting(DelayedGraph, "arguments", lambda given, *_, **__: given)


def moving_twice() -> Patched:
    """Inside, a move adds what calls have raised to the histories twice. (On a CPU.)"""
    from fp8compile.features.delayed import arena
    from fp8compile.features.delayed.state_page import next_page

    def twice(page: torch.Tensor, *seen: torch.Tensor) -> torch.Tensor:
        return next_page(next_page(page, *seen), *seen)

    return mock.patch.object(arena, "next_page", twice)


@contextlib.contextmanager
def waiting_apart(known: dict[int, Any], key: int) -> Iterator[None]:
    """Inside, forwards wait for their backwards apart from those of other keys, as in another process."""
    from fp8compile import process
    from fp8compile.features.delayed.arena import Arenas

    values, before = process._process._values, process.of(Arenas)
    values[Arenas] = known.setdefault(key, Arenas())
    try:
        yield
    finally:
        values[Arenas] = before


@contextlib.contextmanager
def noticed_at_once() -> Iterator[None]:
    """Inside, each training call begins with a look at what slots have met; not before, in other tests."""
    from fp8compile import process
    from fp8compile.features.delayed import notices

    list(notices._met())
    process.of(notices.Pace).due = 0.0
    with mock.patch.object(notices, "PACE", 0.0):
        yield


def cold_calls() -> Patched:
    """Of each forward of compiled graphs: whether it is cold."""
    from fp8compile.runtime.calls import Calls

    return noting(Calls, "run", lambda _, __, function, args, call: call.cold)


def weight_casts() -> Patched:
    """How often `cache_weights` casts: an entry a cast, the number of its weights."""
    from fp8compile.features.weight_cache.weight_cache import WeightCache

    return noting(WeightCache, "_cast", lambda done, cache, weights, *_, **__: len(weights))


@contextlib.contextmanager
def casts_by_place() -> Iterator[list[str]]:
    """Each cast of `cache_weights`: "forward", or "update" by the step of an optimizer."""
    from fp8compile.features.weight_cache.in_step import PendingCopies
    from fp8compile.features.weight_cache.weight_cache import WeightCache

    found: list[str] = []
    forwards = noting(WeightCache, "_cast", lambda *_: found.append("forward"))
    with forwards, noting(PendingCopies, "settle", lambda *_: found.append("update")):
        yield found


def cast_in_step(rows: Any, columns: Any, inverse: Any) -> Any:
    """What a step is asked to do with a weight."""
    from fp8compile.extension import CastInStep

    return CastInStep(rows, columns, inverse, inverse.new_zeros(1, dtype=torch.int32), 448.0)


def copies_held() -> Patched:
    """How many copies a cache holds whenever it allocates new ones."""
    from fp8compile.features.weight_cache.weight_cache import WeightCache

    return noting(
        WeightCache, "empty", lambda _, cache, *__: sum(len(kept.copies) for kept in cache.kept.values())
    )


def copies_begin_with(number: float) -> Patched:
    """Inside, memory that is allocated for float32 copies holds this number."""
    from fp8compile.features.weight_cache.weight_cache import WeightCache

    def fill(made: Any, *_: Any) -> None:
        for copy in made:
            if copy.dtype == torch.float32:
                copy.fill_(number)

    return noting(WeightCache, "empty", fill)


def copies_given() -> Patched:
    """The addresses of the copies that `cache_weights` gives each call."""
    from fp8compile.features.weight_cache.weight_cache import WeightCache

    return noting(WeightCache, "copies", lambda made, *_, **__: tuple(x.data_ptr() for x in made))


def static_inputs() -> Patched:
    """For each half that is compiled, whether Inductor hears that an FP8 input keeps its address, by name."""
    from fp8compile.runtime.halves import Halves

    def noted(_: Any, __: Halves, gm: Any, *___: Any, **kwargs: Any) -> dict[str, bool]:
        inputs = enumerate(gm.graph.find_nodes(op="placeholder"))
        static = kwargs["static_input_idxs"]
        return {node.name: i in static for i, node in inputs if node.meta["val"].dtype.itemsize == 1}

    return noting(Halves, "compile", noted)


def bytes_of_copies() -> Patched:
    """The bytes of the copies that each graph compiled inside keeps between its calls."""
    from fp8compile.features.weight_cache import KeptCopies

    def size(_: Any, kept: KeptCopies, *__: Any) -> int:
        return kept.hoisted.bytes if kept.hoisted is not None else 0

    return noting(KeptCopies, "after", size)


def kept_copies() -> int:
    """For how many sets of weights `cache_weights` keeps copies."""
    from fp8compile.features.weight_cache.weight_cache import _STEPS

    return sum(len(cache.kept) for cache in _STEPS.caches.values())


def copies_in_memory() -> int:
    """How many copies `cache_weights` keeps."""
    from fp8compile.features.weight_cache.weight_cache import _STEPS

    return sum(len(kept.copies) for cache in _STEPS.caches.values() for kept in cache.kept.values())


def weights_written() -> int:
    """How many weights wait for an optimizer that casts them."""
    from fp8compile.features.weight_cache.weight_cache import _STEPS

    return len(_STEPS.written)


@contextlib.contextmanager
def weights_kept_in_fp8() -> Iterator[list[int]]:
    """For each weight that a call keeps in FP8 only: how many of them are then alive in high precision."""
    from fp8compile.features.frozen import frozen_weights

    found: list[int] = []
    before: list[weakref.ref] = []
    stock = frozen_weights._frozen

    def counting(module: nn.Module, name: str, form: Any) -> tuple[int, int]:
        before.append(weakref.ref(module._parameters[name]))  # type: ignore[arg-type]
        sizes = stock(module, name, form)
        found.append(sum(reference() is not None for reference in before))
        return sizes

    with mock.patch.object(frozen_weights, "_frozen", counting):
        yield found


def frozen_values() -> Patched:
    """The FP8 values of weights that are put into modules inside."""
    from fp8compile.runtime import held

    return noting(held, "replace", lambda _, module, name, weight: weight.data_)


def refresh_gathered_scales(parameter: Any) -> None:
    """What `fp8_all_gather` does before a forward, for the weights that are gathered with this one."""
    from fp8compile.features.fsdp_gather.all_gather import Gathered
    from fp8compile.runtime.parameters import find

    find(parameter).extras.get(Gathered).scales.refresh(False, True)


def frozen(parameter: Any) -> bool:
    """Whether this parameter is kept in FP8 only."""
    from fp8compile.ir.frozen import FrozenWeight

    return isinstance(parameter, FrozenWeight)


# -- phases --


@contextlib.contextmanager
def phases_afresh() -> Iterator[None]:
    """Inside, no optimizer has stepped and no rule, step or callback was set. After it, all is as before."""
    from fp8compile import process
    from fp8compile.features.schedule import by_hand, graph_of_sets
    from fp8compile.runtime import optimizer_steps

    steps = optimizer_steps.OptimizerSteps()
    optimizer_steps.count_steps()
    with contextlib.ExitStack() as stack:
        for module in (optimizer_steps, by_hand, graph_of_sets):
            stack.enter_context(mock.patch.object(module, "STEPS", steps))
        stack.enter_context(mock.patch.object(by_hand, "BY_HAND", by_hand.ByHand()))
        afresh = vars(by_hand.Scheduled())
        stack.enter_context(mock.patch.multiple(process.of(by_hand.Scheduled), **afresh))
        yield


def phases_of_calls() -> Patched:
    """The rules with a window that are active in each call of a graph with several sets of rules."""
    from fp8compile.features.schedule.graph_of_sets import GraphOfSets

    def active(found: Any, graph: Any, *_: Any) -> str:
        named = zip(graph.policy.names, graph.policy.timed, strict=True)
        always = {name for name, rule in named if not rule.during}
        return "+".join(label for label in found.labels if label not in always)

    return noting(GraphOfSets, "policy_of", active)


def failing_compilations() -> Any:
    """Inside, nothing can be compiled."""
    from fp8compile.compilation import Compilation

    return mock.patch.object(Compilation, "run", side_effect=RuntimeError("no memory"))


def steps_of(model: nn.Module) -> int:
    """The steps that a schedule counts for a model."""
    from fp8compile.runtime.optimizer_steps import steps_of

    return steps_of(model)


# -- measured calls --


@contextlib.contextmanager
def measured_casts() -> Iterator[list[str]]:
    """The roles of the tensors that are measured inside: an entry for each cast."""
    from fp8compile.runtime.probe import MeasuredCall

    seen: list[str] = []

    def note(_: Any, call: MeasuredCall, node: torch.fx.Node, *__: Any) -> None:
        if call.measurements and "fp8_operand" in node.meta:
            seen.append(node.meta["fp8_operand"].role)

    with noting(MeasuredCall, "__call__", note):
        yield seen


def slow_calls() -> Patched:
    """For each call of a half inside, whether it runs eagerly for a measurement."""
    from fp8compile.runtime.probe import MeasuredCalls

    return noting(MeasuredCalls, "at", lambda call, *_, **__: call is not None)


def measured(parameter: torch.Tensor) -> dict[str, dict[str, float]]:
    """What was measured of a linear with this weight: role -> numbers by name."""
    from fp8compile.runtime import parameters, probe

    vectors = parameters.find(parameter).measured
    return {
        name[0]: dict(zip(probe.COLUMNS, vector.tolist(), strict=True)) for name, vector in vectors.items()
    }


def measuring() -> bool:
    """Whether a measurement waits for a call."""
    from fp8compile import process
    from fp8compile.runtime import probe

    return bool(process.of(probe.Active))


def measured_in_parts(elements: int) -> Patched:
    """Inside, so many elements of a tensor are measured at a time."""
    from fp8compile.runtime import probe

    return mock.patch.object(probe, "CHUNK", elements)


def failing_measurements() -> dict[str, Patched]:
    """Contexts in each of which another part of a measurement fails."""
    from fp8compile.dryrun import watch
    from fp8compile.reporting import monitor
    from fp8compile.runtime import probe

    parts = [(watch, "_copied"), (watch, "rows_of"), (watch.Session, "run"), (monitor, "table")]
    parts += [(probe, "measured"), (probe.Measurement, "wants")]
    error = MemoryError("planted")
    return {
        f"{owner.__name__}.{name}": mock.patch.object(owner, name, side_effect=error) for owner, name in parts
    }


def remembered(parameter: torch.Tensor) -> tuple[int, int]:
    """Of the graph that has run with this parameter: its sets of weights, and the tensors in its report."""
    from fp8compile import process
    from fp8compile.runtime.compiled_graph import CompiledGraph
    from fp8compile.runtime.ledger import Ledger

    graphs = [x for x in gc.get_objects() if type(x) is CompiledGraph and x.owners.casts]
    (graph,) = [graph for graph in graphs if any(id(parameter) in key for key in graph.owners.known)]
    return len(graph.owners.known), len(process.of(Ledger).graphs()[graph.record][1])


def capturing() -> Patched:
    """Inside, a CUDA graph seems to be captured."""
    from fp8compile import compat

    return mock.patch.object(compat.autograd, "capturing", lambda: True)


@contextlib.contextmanager
def caching_allocator(events: list[str]) -> Iterator[list[bool]]:
    """Inside, tensors seem to be CUDA's, and memory that is given back to the device is an event. Yields [is
    a graph being captured?], to be set."""
    from fp8compile.features.delayed import leftovers

    capturing = [False]
    with (
        mock.patch.object(leftovers, "_allocates", lambda device: True),
        mock.patch.object(torch.cuda, "empty_cache", lambda: events.append("given back")),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: capturing[0]),
    ):
        yield capturing
