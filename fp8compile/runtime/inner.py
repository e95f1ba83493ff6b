"""Compilers of one half of a graph: Inductor, or in its place an interpreter of the same graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from .. import compat
from ..passes.pipeline import run_post_grad
from .interpreter import Boxed, Eager, boxed


@dataclass(frozen=True)
class Inner:
    """`compile` has the signature of Inductor's own `inner_compile`. `computes`: the callables that it makes
    compute something; if they do not, nothing is scaled, and a graph needs no state. `eager` makes the
    interpreter of cold and measured calls. `slow`: it generates code."""

    compile: Callable[..., Any]
    computes: bool = True
    eager: Callable[[GraphModule], Eager] = Eager
    slow: bool = False


def _interpret(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Boxed:
    run_post_grad(gm.graph)
    gm.recompile()
    return boxed(Eager(gm))


INDUCTOR = Inner(compat.inductor.compile_inner, slow=True)
# Our passes rewrite and lower a graph as usual; then it runs node by node. That saves 10 to 20 s a graph.
INTERPRETER = Inner(_interpret)
