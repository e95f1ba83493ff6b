"""`fp8compile.monitor(model, compare_every=500)`: compare FP8 with high precision while a model trains.

The monitor (`reporting.monitor`) counts optimizer steps. This file remembers what the model has seen in the
step that ends with such a comparison: the arguments of its first call, the autocast that it was called in,
and the gradients that came back to its outputs. So no loss has to be given: the comparison goes backward from
the same gradients (for a model that returns its loss, that is the loss itself). Copies of the batch and of
these gradients are kept from that call to the end of the step.

The call is seen from outside of what Dynamo compiles: nothing is compiled anew, training is bitwise the same.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from .. import compat
from ..config.settings import integer
from ..errors import OptionError
from ..logs import get_logger, say_once
from ..reporting import monitor as reporting
from ..reporting.monitor import Monitor
from ..runtime.probe import ending
from .compare import Session
from .comparison import Comparison

logger = get_logger(__name__)
T = TypeVar("T")

SHOWN = 3  # rows that a warning names


def monitor(
    model: nn.Module, every: int = 100, to: Any = "fp8compile.jsonl", compare_every: int | None = None
) -> Monitor:
    """Write the numbers of all quantized tensors of `model` (`Stats.rows`) each `every`-th optimizer step.

    `to` is one of:

    * a path or a file object: JSON lines are appended, {"step": 100, "name": "layers.0.up.weight", "role":
      "input", ...};
    * a SummaryWriter (any object with `add_scalar`), or "tensorboard:DIR" to make one: it gets the scalars
      fp8/layers.0.up.weight/input.0/overflows%, ...;
    * a function, which is called with a list of such dicts.

    `compare_every`: also compare FP8 with high precision after every so many steps, on the batch that the
    model has just seen, and warn of what is out of range (see `Comparison`). Its rows have "compare" instead
    of "role": "step" for the whole step, "layer" and "parameter" as in `Comparison.rows`. A comparison takes
    three steps, run eagerly, and at the first time the tracing of two graphs. `model` has to be the object
    that the training loop calls.

    In a distributed job, each process measures. Only rank 0 writes to a path or to "tensorboard:DIR"; each
    process uses the object or function that it was given.

    `model` is the module that was compiled, or the wrapper that torch.compile made of it. A call of
    `optimizer.step()` of its optimizer counts as a step. With gradient accumulation, the first call of the
    step is measured. Returns a `Monitor`: close it, or use it in a `with`.

    OptionError (a ValueError) for an `every` or a `compare_every` below 1, an unusable `to`, and a model that
    is not compiled; TypeError if `model` is not a module.
    """
    if compare_every is not None:
        integer("compare_every", compare_every, 1)
        if isinstance(model, nn.Module) and not compat.autograd.is_compiled(model):
            raise OptionError(
                "monitor(compare_every=...): the model must be the object that the training loop calls, to "
                "see its batches: what torch.compile(model, backend='fp8') returned; got a "
                f"{type(model).__name__}"
            )
    made = reporting.monitor(model, every, to)
    if compare_every is not None:
        made.add(Comparing(model, compare_every))
    return made


class Comparing:
    """Compares a model after every `every`-th step, as an addition to a `Monitor`; or after each step before
    which it was `waiting` (`every` 0)."""

    def __init__(self, model: nn.Module, every: int = 0):
        self.every = every
        self.model, self.session = weakref.ref(model), Session(model)
        self.ends = f"the monitor no longer compares {self.session.name}"
        self.seen: Seen | None = None
        self.waiting = False  # for the first call of a step that ends with a comparison
        self.closed = False
        self.stop = _listen(model, self._called)

    def arm(self, step: int) -> None:
        """After `step` steps: wait for the first call of the next one, if that is to be compared."""
        self.waiting = (step + 1) % self.every == 0 and not self.closed
        self.seen = None

    def rows(self, step: int) -> list[dict[str, Any]]:
        """The rows of a comparison, if one is due after this step. Its error is a warning, and ends all."""
        if step % self.every:
            self.seen = None
            return []
        run = self.session.run
        found = self.of_seen(step, lambda seen: run(seen.args, seen.kwargs, seen.loss, repeat=False))
        if found is None:
            return []
        _warn(step, found)
        return rows_of(step, found)

    def of_seen(self, step: int, take: Callable[[Seen], T]) -> T | None:
        """What `take` makes of the call that was waited for. Its error is a warning, and ends all."""
        seen, self.seen = self.seen, None
        if self.closed:
            return None
        if seen is None or not seen.gradients:
            what = "no gradient came back to its outputs"
            if seen is None:
                what = "no call of the model was seen in this step"
            say_once(logger, logging.WARNING, f"monitor: nothing to compare at step {step}: {what}")
            return None
        self.stop()  # the comparison calls the model, too
        found = None
        with ending(self.ends, self.close):
            with seen.autocast():
                found = take(seen)
            if (model := self.model()) is not None:
                self.stop = _listen(model, self._called)
        return found

    def close(self) -> None:
        self.stop()
        self.waiting, self.seen, self.closed = False, None, True

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
        """A call of the model begins. Returns what to do with its output."""
        if not self.waiting or not torch.is_grad_enabled() or compat.autograd.in_backward():
            return None
        self.waiting = False
        with ending(self.ends, self.close):
            self.seen = seen = Seen(_copied(args), _copied(kwargs))
            return functools.partial(self._watch, seen)
        return None

    def _watch(self, seen: Seen, output: Any) -> None:
        """Note the gradients that come back to an output."""
        with ending(self.ends, self.close):
            for i, leaf in enumerate(pytree.tree_leaves(output)):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(functools.partial(self._came_back, seen, i))

    def _came_back(self, seen: Seen, i: int, grad: Tensor | None) -> None:
        with ending(self.ends, self.close):
            if grad is not None:  # of one of several outputs, which the loss does not read
                seen.gradients[i] = grad.detach().clone()


class Seen:
    """One call of the model: its arguments, its autocast, and the gradients of its outputs, by position."""

    def __init__(self, args: Any, kwargs: Any):
        self.args, self.kwargs = args, kwargs
        self.gradients: dict[int, Tensor] = {}
        on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        self.autocasts = {device: torch.get_autocast_dtype(device) for device in on}

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        for device, dtype in self.autocasts.items():
            stack.enter_context(torch.autocast(device, dtype))
        return stack

    def loss(self, output: Any) -> Tensor:
        """A number whose gradients by the outputs are those that came back; a finite sum in float64."""
        leaves = pytree.tree_leaves(output)
        pairs = [(leaves[i], grad) for i, grad in self.gradients.items()]
        products = [(leaf.to(torch.float64) * grad.to(torch.float64)).sum() for leaf, grad in pairs]
        return torch.stack(products).sum()


def _copied(values: Any) -> Any:
    """Copies: the loop may write the next batch into the same memory."""
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, values)


def _listen(model: nn.Module, called: Callable[[Any, Any], Any]) -> Callable[[], None]:
    """Call `called(args, kwargs)` at each call of a model, and its result with the output. Returns `stop`."""
    before = model.__dict__.get("_compiled_call_impl")  # of model.compile(), which compiles hooks, too
    inner, name = (model._call_impl, "_call_impl") if before is None else (before, "_compiled_call_impl")

    def call(*args: Any, **kwargs: Any) -> Any:
        watch = called(args, kwargs)
        output = inner(*args, **kwargs)
        if watch is not None:
            watch(output)
        return output

    def stop() -> None:
        if model.__dict__.get(name) is call:
            del model.__dict__[name]
            if before is not None:
                model.__dict__[name] = before

    model.__dict__[name] = call
    return stop


def _warn(step: int, found: Comparison) -> None:
    flagged = found.flagged
    if not flagged:
        return
    shown = "; ".join(f"{row['name']}: {row['flag']}" for row in flagged[:SHOWN])
    more = f"; and {len(flagged) - SHOWN} more" if len(flagged) > SHOWN else ""
    where = "" if found.rank is None else f" on rank {found.rank}"
    logger.warning("fp8: step %d%s: out of range in FP8: %s%s", step, where, shown, more)


def rows_of(step: int, found: Comparison) -> list[dict[str, Any]]:
    """The rows of a comparison, as a monitor writes them: the whole step, then layers and parameters."""
    whole = found.to_dict()
    first = {key: whole[key] for key in ("loss", "loss_bf16", "loss_fp8")}
    like = whole["gradient"]
    first |= {"gradient": like["sqnr"], "cosine": like["cosine"], "norm": like["norm"]}
    first["gradient_bf16"] = whole["gradient_bf16"]["sqnr"]
    first = {"name": whole["model"], "kind": "step", **first, "flag": ", ".join(whole["flagged"])}
    return [{"step": step, "compare": row.pop("kind"), **row} for row in (first, *found.rows())]
