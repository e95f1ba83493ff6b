"""Hundreds of training steps in a test: graphs are lowered as usual, then run as the Python code of their
nodes.

`hooks.interpreted` runs a graph in an FX interpreter, at 0.1 ms a node: fine for ten steps. Here generated
Python code calls the operators of the lowered graph in the same order, ten times faster. Inductor's random
operators (dropout) cannot be called from such code, so a graph with them is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.support import hooks


def _convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Replaces prims.convert_element_type, whose eager implementation is slow Python."""
    return x.to(dtype)


class Straight:
    """Stands for the interpreter of graphs."""

    def __init__(self, gm: GraphModule):
        drawn = [node.name for node in gm.graph.nodes if "inductor_rand" in str(node.target)]
        assert not drawn, f"{drawn} draw random numbers: use interpreted()"
        for node in gm.graph.find_nodes(
            op="call_function", target=torch.ops.prims.convert_element_type.default
        ):
            node.target = _convert
        gm.recompile()
        self.gm, self.env = gm, {}

    def boxed_run(self, args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        return self.gm.forward(*given)


@contextlib.contextmanager
def straight() -> Iterator[None]:
    """Inside, graphs compiled with backend="fp8" run this way."""
    with hooks.lowered(), hooks.run_by(Straight):
        yield
