"""Hundreds of training steps in a test: graphs are rewritten and lowered as usual, then run as the Python code of their nodes.

`harness.interpreted` runs a graph in an FX interpreter, at 0.1 ms a node: fine for ten steps. Here generated Python code
calls the same operators in the same order, ten times faster. Inductor's random operators (dropout) cannot be called from
such code, so a graph with them is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule

from fp8compile import compat
from fp8compile.runtime import inner
from tests.support.harness import interpreted


def _convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Replaces prims.convert_element_type, whose eager implementation is slow Python."""
    return x.to(dtype)


class Straight:
    """Stands for `runtime.interpreter.Eager`."""

    def __init__(self, gm: GraphModule):
        drawn = [node.name for node in gm.graph.nodes if node.target in compat.random_prims()]
        assert not drawn, f"{drawn} draw random numbers: use interpreted()"
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default):
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
    with interpreted(), mock.patch.object(inner, "Eager", Straight):
        yield
