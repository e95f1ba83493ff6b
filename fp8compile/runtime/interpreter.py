"""Runs a graph eagerly, on the reference implementations in `ops`: for cold calls, measured calls, and tests.

Autograd and the user's dispatch modes (selective checkpointing, counters) see such a run as they see a
compiled one: as one opaque call. Its outputs are no views, and what it writes does not change a tensor's
version counter.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Interpreter, Node

from .. import compat
from . import probe

Boxed = Callable[[list[Any]], Any]

WHETHER_COLD: set[Any] = set()  # operators of features that the interpreter tells whether its call is cold
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # eager torch has no arange for these dtypes


class EagerMode(NamedTuple):
    """How a call runs eagerly, forward and backward. `cold`: since a feature does not know yet what the
    compiled code needs, such as a scale. `measuring`: measures every cast."""

    cold: bool
    measuring: probe.MeasuredCall | None = None


AS_COMPILED = EagerMode(False)


class Eager(Interpreter):
    """Draws Inductor's random operators by their seed, as compiled code does, so that backward recomputes the
    same dropout mask. `measuring` sees every cast."""

    mode = AS_COMPILED

    def _set_current_node(self, node: Node) -> Any:
        """Do nothing: fx stores the node in a global, where a trace on another thread reads it."""
        return contextlib.nullcontext()

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if self.mode.measuring is not None and n.target in probe.CASTS:
            self.mode.measuring(n, self.fetch_args_kwargs_from_env(n)[0], result)
        return result

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        # a large torch.eye has one
        if target is torch.ops.prims.iota.default and kwargs["dtype"] in UNSIGNED:
            return super().call_function(target, args, {**kwargs, "dtype": torch.int64}).to(kwargs["dtype"])
        if target in WHETHER_COLD:
            args = (*args, self.mode.cold)
        kind = compat.inductor.random_prims().get(target)
        return super().call_function(target, args, kwargs) if kind is None else _draw(kind, *args)


def _draw(kind: str, *args: Any) -> torch.Tensor:
    seed = args[1] if kind == "random" else args[3]
    generator = torch.Generator(seed.device).manual_seed(int(seed))
    if kind == "randint":
        low, high, size = args[:3]
        return torch.randint(low, high, size, device=seed.device, generator=generator)
    size, _, mode = args[:3]
    return getattr(torch, mode)(size, device=seed.device, dtype=torch.float32, generator=generator)


def boxed(interpreter: Any) -> Callable[..., Any]:
    """A function `run(args, mode=AS_COMPILED)` that empties the list `args`. Threads may call it at once."""

    def run(args: list[Any], mode: EagerMode = AS_COMPILED) -> Any:
        one = copy.copy(interpreter)  # with its own `env`, so that values are freed with the copy
        one.env, one.mode = {}, mode
        with compat.autograd.unseen(args):
            return one.boxed_run(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
