"""FP8 copies of weights that are kept between calls, with `cache_weights`.

`passes.hoist` takes the casts out of a graph. Here they are called, and their results kept as long as the weights are certainly
what they were. Copies serve a further call if

* every weight that requires gradients belongs to a `torch.optim.Optimizer` that has stepped, so that its hook will tell of the
  next step. Without one (weights that a trainer updates by itself, the sharded ones of FSDP) every call casts;
* no optimizer has stepped since, and none that has a weight is in its step now (LBFGS calls the model from there);
* no weight has other memory, or another version: what writes into a weight under `torch.no_grad()` counts its version up, as
  `load_state_dict` does. `torch.optim`'s fused updates do not, and neither does what writes to `weight.data`;
* `refresh` was not called since.

So a write to `weight.data` between two micro-batches of one step is the only one that needs `refresh`. Frozen weights are cast
with the others, and alone after each step of any optimizer. While a CUDA graph is captured, each call casts, because a replay
runs no code of ours. New copies are new tensors: a backward that has not run yet keeps those of its forward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import compat
from ..errors import Fp8CompileError
from ..passes.hoist import Hoisted, Layout
from . import probe
from .inner import Inner
from .interpreter import Eager, How, boxed


class _Steps:
    """What optimizers of this process do. Held weakly: an optimizer that is gone tells nothing."""

    def __init__(self) -> None:
        self.changes = 0  # steps of all optimizers, and calls of `refresh`
        self.inside: Any = WeakKeyDictionary()  # optimizer that is in its step -> ids of its parameters
        self.parameters: Any = WeakKeyDictionary()  # optimizer -> ids of its parameters, at its last step
        self.listening = False

    def listen(self) -> None:
        if not self.listening:
            register_optimizer_step_pre_hook(_steps_now)
            register_optimizer_step_post_hook(_stepped)
            self.listening = True

    def tell_of(self, weights: Sequence[Tensor]) -> bool:
        """Will a step that changes one of these be noticed?"""
        stepping, stepped = list(self.inside.values()), list(self.parameters.values())
        if not stepped or any(id(weight) in its for its in stepping for weight in weights):
            return False
        return all(any(id(weight) in its for its in stepped) for weight in weights if weight.requires_grad)


_STEPS = _Steps()


def _ids(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    return frozenset(id(p) for group in optimizer.param_groups for p in group["params"])


@torch._disable_dynamo
def _steps_now(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _STEPS.inside[optimizer] = _ids(optimizer)


@torch._disable_dynamo
def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _STEPS.inside.pop(optimizer, None)
    _STEPS.parameters[optimizer] = _ids(optimizer)
    _STEPS.changes += 1


def refresh() -> None:
    """Cast all weights anew at their next use, where `cache_weights` keeps copies. Only needed after a write to `weight.data`
    between two micro-batches of one optimizer step; all other changes are noticed."""
    _STEPS.changes += 1


@dataclass
class _Kept:
    stamp: tuple
    copies: Sequence[Tensor]
    references: list[weakref.ref]  # to the weights


class WeightCache:
    """The copies that one graph reads, for each set of weights that it is called with (a graph may serve many layers)."""

    def __init__(self, hoisted: Hoisted, inner: Inner, patches: Mapping[str, Any]):
        self.inputs, self.layouts = hoisted.inputs, hoisted.copies
        self.inner, self.patches = inner, dict(patches)
        self.graph = GraphModule({}, hoisted.graph)
        self.kept: dict[tuple[int, ...], _Kept] = {}
        self.function: Callable[..., Any] | None = None
        self.lock = threading.Lock()
        _STEPS.listen()

    @property
    def casts(self) -> dict[tuple[int, probe.Name], probe.Cast]:
        return probe.casts_of(self.graph.graph)

    def empty(self, device: torch.device) -> Sequence[Tensor]:
        """Stand-ins for the copies, for a call with fake tensors."""
        return [layout.empty(device) for layout in self.layouts]

    def copies(self, args: Sequence[Any], look: probe.Look | None = None) -> Sequence[Tensor]:
        """The copies of these arguments of the graph; `look` measures their casts."""
        weights = [args[i] for i in self.inputs]
        if look is not None:
            return boxed(Eager(self.graph))([x.detach() for x in weights], How(False, look))
        key = tuple(map(id, weights))
        stamp = _stamp(weights)
        kept = self.kept.get(key)
        if kept is not None and kept.stamp == stamp and _STEPS.tell_of(weights):
            return kept.copies
        self.kept.pop(key, None)
        kept = None  # before new ones are made: the memory serves again
        made = self._cast(weights)
        if stamp is not None and _STEPS.tell_of(weights):
            entries = self.kept
            gone = [weakref.ref(weight, lambda _: entries.pop(key, None)) for weight in weights]
            self.kept[key] = _Kept(stamp, made, gone)
        return made

    def _cast(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        with torch.no_grad():
            if self.function is None:
                with self.lock:
                    self.function = self.function or compat.compile_fx(self.graph, weights, self.inner.compile, self.patches)
            made = self.function(*weights)
        for copy, layout in zip(made, self.layouts, strict=True):
            if Layout(copy.dtype, tuple(copy.shape), tuple(copy.stride())) != layout:
                raise Fp8CompileError(f"cache_weights: a cast made {copy.dtype} {list(copy.shape)}; please report this")
        return made


def _stamp(weights: Sequence[Tensor]) -> tuple | None:
    """Differs from an earlier one if some weight may have changed; None if nobody can tell."""
    if any(weight.is_inference() for weight in weights) or compat.capturing():
        return None
    return _STEPS.changes, *((weight.data_ptr(), weight._version) for weight in weights)
