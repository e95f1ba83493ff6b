"""FP8 copies of weights that are kept between calls, with `cache_weights`.

`hoist` takes the casts out of a graph. Here they are called, and their results kept as long as the weights
are certainly what they were. Copies serve a further call if

* every weight that requires gradients belongs to a `torch.optim.Optimizer` that has stepped, so that its hook
  will tell of the next step. Without one (weights that a trainer updates by itself, the sharded ones of FSDP)
  every call casts;
* no optimizer has stepped since, and none that has a weight is in its step now (LBFGS calls the model from
  there);
* no weight has other memory, or another version: what writes into a weight under `torch.no_grad()` counts its
  version up, as `load_state_dict` does. `torch.optim`'s fused updates do not, and neither does what writes to
  `weight.data`;
* `refresh_weight_cache` was not called since.

So a write to `weight.data` between two micro-batches of one step is the only one that needs
`refresh_weight_cache`. Frozen weights are cast with the others, and alone after each step of any optimizer.
While a CUDA graph is captured, each call casts, because a replay runs no code of ours. New copies are new
tensors: a backward that has not run yet keeps those of its forward.

Where Inductor records CUDA graphs (`static`), a set of weights has one set of copies, and new casts write
over it: a recorded graph reads its inputs where they were. So a forward, a step, and then the backward of
that forward is an error there, as it is with a weight that was saved for backward.

`fp8compile.optim.AdamW(.., fp8_weights=True)` writes new copies while it updates the weights (`in_step`).
They are those that the next forward would make, bitwise. The forward casts, as ever, where a step cannot
write the copies, where a graph was not called since its last cast, where another optimizer has one of its
weights or steps between, if one of its weights was not updated (no gradient, frozen) or was written since,
and if a hook after the step may write to weights. Only a write to `weight.data` after the step is not
noticed: it needs `refresh_weight_cache`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from torch.fx import GraphModule

from ... import compat
from ...extension import CastInStep
from ...ir.fx_utils import value
from ...logs import get_logger, say_once
from ...runtime import probe
from ...runtime.inner import Inner
from ...runtime.interpreter import Eager, EagerMode, boxed
from ...runtime.optimizer_steps import listen
from .hoist import Hoisted
from .in_place import into_memory
from .in_step import PendingCopies, casts_in_step

logger = get_logger(__name__)

CAPTURED = (
    "fp8: cache_weights has no effect in a CUDA graph that is captured by hand: each replay casts weights. "
    "options={'triton.cudagraphs': True, 'cache_weights': True} leaves the capture to Inductor"
)
PACKAGE = __name__.split(".")[0] + "."
WASTED = 2  # casts in a row after which a forward casts again
Mark = tuple[int, int]  # of a weight: its memory and its version


class _Steps:
    """What optimizers of this process do. Held weakly: an optimizer that is gone tells nothing."""

    def __init__(self) -> None:
        self.changes = 0  # steps of all optimizers, and calls of `refresh_weight_cache`
        self.inside: Any = WeakKeyDictionary()  # optimizer that is in its step -> ids of its parameters
        self.parameters: Any = WeakKeyDictionary()  # optimizer -> ids of its parameters, at its last step
        self.written: Any = WeakKeyDictionary()  # optimizer -> what `step_wrote` was told in this step
        self.caches: Any = WeakValueDictionary()  # of this process, numbered: an order that ranks agree on
        self.made = 0

    def add(self, cache: WeightCache) -> None:
        listen(_stepped, before=_steps_now)
        self.caches[self.made] = cache
        self.made += 1

    def will_notice(self, weights: Sequence[Tensor]) -> bool:
        """True if a step that changes one of these will be noticed."""
        stepping, stepped = list(self.inside.values()), list(self.parameters.values())
        if not stepped or any(id(weight) in its for its in stepping for weight in weights):
            return False
        return all(any(id(weight) in its for its in stepped) for weight in weights if weight.requires_grad)


_STEPS = _Steps()


def _ids(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    return frozenset(id(p) for group in optimizer.param_groups for p in group["params"])


def _steps_now(optimizer: torch.optim.Optimizer) -> None:
    _STEPS.inside[optimizer] = _ids(optimizer)
    _STEPS.written.pop(optimizer, None)  # of a step that failed


def _stepped(optimizer: torch.optim.Optimizer) -> None:
    _STEPS.inside.pop(optimizer, None)
    _STEPS.parameters[optimizer] = _ids(optimizer)
    _STEPS.changes += 1
    written = _STEPS.written.pop(optimizer, {})
    with compat.autograd.unseen():
        for cache in list(_STEPS.caches.values()):
            cache.end(written)


def refresh_weight_cache() -> None:
    """Cast all weights again at their next use, where `cache_weights` keeps copies. Only needed after a write
    to `weight.data` between two micro-batches of one optimizer step and, with `AdamW(.., fp8_weights=True)`,
    between a step and the next forward; all other changes are noticed."""
    _STEPS.changes += 1


def step_begins(optimizer: torch.optim.Optimizer, castable: Collection[int]) -> dict[int, CastInStep] | None:
    """The casts that the step of this optimizer should make for the graphs that keep copies of its weights:
    see `Feature.wanted_casts`. None if no graph that was called has copies of any of its parameters that a
    step can write, and no graph is still to be called."""
    theirs, of_all = compat.autograd.hooks_after_step(optimizer)
    if theirs or not all(getattr(x, "__module__", "").startswith(PACKAGE) for x in of_all):
        text = "fp8: AdamW's fp8_weights has no effect: a hook after the step may write to weights"
        say_once(logger, logging.WARNING, text)
        return {}
    ids, known = _ids(optimizer), False
    found: dict[int, CastInStep] = {}
    for cache in list(_STEPS.caches.values()):
        writable = cache.shared and any(i in ids for key in list(cache.kept) for i in key)
        known = known or not cache.called or bool(writable)
        for kept, weights in cache.due(castable):
            if found.keys().isdisjoint(map(id, weights)) and cache.begin(kept, weights):
                found.update({id(weights[i]): x for i, x in kept.pending.casts.items()})  # type: ignore[union-attr]
    return found if known else None


def step_wrote(optimizer: torch.optim.Optimizer, weights: Sequence[Tensor]) -> None:
    """A step has cast these weights as it was asked to. To be called in the step."""
    _STEPS.written[optimizer] = {id(weight): _mark(weight) for weight in weights}


@dataclass
class CopiesOf:
    """What was cast for a set of weights. Without a `stamp` there are no copies that could serve again."""

    references: list[weakref.ref] = field(default_factory=list)  # to the weights
    stamp: tuple | None = None
    copies: Sequence[Tensor] = ()
    cast: tuple | None = None  # what the stamp was when they were made
    used: bool = True  # by a forward, since the last cast
    wasted: int = 0  # casts of steps, the latest ones in a row, whose copies no forward could use
    pending: PendingCopies | None = None  # a step has begun that writes them

    def weights(self) -> list[Tensor]:
        """None of them, if one is gone."""
        found = [weight for reference in self.references if (weight := reference()) is not None]
        return found if len(found) == len(self.references) else []

    def old(self, static: bool) -> None:
        """A cast follows. The memory serves again: for new copies, or, if `static`, for the same ones."""
        self.stamp, self.copies = None, self.copies if static else ()


class WeightCache:
    """The copies that one graph reads, for each set of weights that it is called with (of many layers).
    `static`: they keep their addresses. `graph`: from weights to copies; `written` has the memory of the
    copies as its last inputs, and writes there."""

    def __init__(self, hoisted: Hoisted, inner: Inner, patches: Mapping[str, Any], static: bool):
        self.inputs, self.layouts, self.static = hoisted.inputs, hoisted.copies, static
        self.inner, self.patches = inner, {**patches, "triton.cudagraphs": False}
        self.graph = GraphModule({}, hoisted.graph)
        self.written = GraphModule({}, into_memory(hoisted.graph))
        self.function: Callable[..., Any] | None = None
        self.shared = casts_in_step(hoisted)
        self.shapes = [tuple(value(x).shape) for x in hoisted.graph.find_nodes(op="placeholder")]
        self.kept: dict[tuple[int, ...], CopiesOf] = {}
        self.called = False
        self.lock = threading.Lock()
        _STEPS.add(self)

    @property
    def casts(self) -> dict[tuple[int, probe.Name], probe.CastKind]:
        return probe.casts_of(self.graph.graph)

    def empty(self, device: torch.device) -> Sequence[Tensor]:
        """Stand-ins for the copies, for a call with fake tensors."""
        return [layout.empty(device) for layout in self.layouts]

    def copies(self, args: Sequence[Any], measuring: probe.MeasuredCall | None = None) -> Sequence[Tensor]:
        """The copies of these arguments of the graph; `measuring` measures their casts."""
        weights = [args[i] for i in self.inputs]
        if measuring is not None:
            return boxed(Eager(self.graph))([x.detach() for x in weights], EagerMode(False, measuring))
        self.called = True
        key, stamp = tuple(map(id, weights)), _stamp(weights)
        kept = self.kept.get(key)
        if kept is not None and kept.stamp == stamp and stamp is not None and _STEPS.will_notice(weights):
            kept.used, kept.wasted = True, 0
            return kept.copies
        if kept is None:
            entries = self.kept
            kept = CopiesOf([weakref.ref(weight, lambda _: entries.pop(key, None)) for weight in weights])
        elif not kept.used:
            kept.wasted += 1
        kept.pending = None  # of a step that failed
        kept.old(self.static)
        made, kept.used = self._cast(weights, kept, stamp), True
        if stamp is None:
            if compat.autograd.capturing():
                say_once(logger, logging.WARNING, CAPTURED)
            self.kept.pop(key, None)
            return made
        self.kept[key] = kept
        trusted = _STEPS.will_notice(weights)  # else only the weights are known, for the end of the next step
        kept.stamp, kept.copies = (stamp, made) if trusted else (None, made if self.static else ())
        return made

    def due(self, castable: Collection[int]) -> list[tuple[CopiesOf, list[Tensor]]]:
        """What a step that can cast these parameters should cast: what a forward has read since its cast."""
        found = []
        for kept in list(self.kept.values()):
            weights = kept.weights()
            theirs = bool(weights) and all(id(weight) in castable for weight in weights)
            if theirs and kept.used and kept.wasted < WASTED:
                found.append((kept, weights))
        return found

    def begin(self, kept: CopiesOf, weights: Sequence[Tensor]) -> bool:
        """A step begins that can write these copies. False if the forward has to cast: there are no copies
        yet, a step cannot write them, or a CUDA graph is captured."""
        kept.pending = None
        if not self.shared or not kept.copies or _stamp(weights) is None:
            return False
        # a parameter may have been moved, or got other data, for which there is another graph
        made_of = [mark[0] for mark in (kept.cast or (0,))[1:]]
        same = made_of == [x.data_ptr() for x in weights] and all(x.is_contiguous() for x in weights)
        if not same or any(x.device != kept.copies[0].device for x in weights):
            return False
        if [tuple(x.shape) for x in weights] != self.shapes:
            return False
        with compat.autograd.unseen():
            used = torch.cat([kept.copies[one.inverse] for one in self.shared])
            kept.old(self.static)
            if self.static:  # a backward may have saved what is there
                torch.autograd.graph.increment_version(kept.copies)
            copies = kept.copies or self.empty(used.device)
            kept.pending = PendingCopies(self.shared, weights, copies, used)
        return True

    def end(self, written: Mapping[int, Mark]) -> None:
        """A step has ended. `written`: the weights that it has cast, and their marks."""
        for kept in list(self.kept.values()):
            pending, kept.pending = kept.pending, None
            if pending is None:
                continue
            weights = kept.weights()
            stamp = _stamp(weights)
            cast = all(written.get(id(weight)) == _mark(weight) for weight in weights)
            if weights and cast and stamp is not None and _STEPS.will_notice(weights):
                kept.copies, kept.cast = pending.settle(weights), stamp
                kept.stamp, kept.used = stamp, False

    def rest(self) -> None:
        """Nothing reads the copies for now: give their memory back, unless they keep their addresses."""
        for kept in list(self.kept.values()):
            kept.old(self.static)
            kept.used = False

    def _cast(self, weights: Sequence[Tensor], kept: CopiesOf, stamp: tuple | None) -> Sequence[Tensor]:
        before, kept.cast = kept.cast, stamp
        copies = kept.copies or self.empty(weights[0].device)
        with torch.no_grad():
            inputs = [*weights, *(x.data for x in copies)]  # whose versions stay
            if self.function is None:
                with self.lock:
                    compile_fx = compat.inductor.compile_fx
                    self.function = self.function or compile_fx(
                        self.written, inputs, self.inner.compile, self.patches
                    )
            self.function(*inputs)
        if kept.copies and before != stamp:  # else the values are the same, and a backward may yet read them
            torch.autograd.graph.increment_version(copies)
        return copies


def _stamp(weights: Sequence[Tensor]) -> tuple | None:
    """Differs from an earlier one if some weight may have changed; None if nobody can tell."""
    if any(weight.is_inference() for weight in weights) or compat.autograd.capturing():
        return None
    return _STEPS.changes, *map(_mark, weights)


def _mark(weight: Tensor) -> Mark:
    return weight.data_ptr(), weight._version
