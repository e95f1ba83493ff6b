"""Hundreds of training steps in a test: graphs are rewritten and lowered as ever, then run as the Python code of their nodes.

`harness.interpreted` runs a graph node by node in an FX interpreter, a tenth of a millisecond each: fine for ten steps. Here
the same operators are called in the same order by generated code, an order of magnitude quicker. Inductor's random operators
(dropout) have no such form, so they are refused.
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
from fp8compile.runtime import halves, inner
from tests.support.harness import interpreted


def _convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """prims.convert_element_type, whose eager implementation is Python."""
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
    """Inside, what is compiled with backend="fp8" runs this way."""
    both = mock.patch.object(inner, "Eager", Straight), mock.patch.object(halves, "Eager", Straight)
    with interpreted(), both[0], both[1]:
        yield
