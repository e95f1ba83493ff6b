"""DDPOptimizer cuts a Dynamo graph where its buckets end. While a part is compiled, this finds the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.fx import Graph, GraphModule

from .dynamo import copy_graph, frames
from .inductor import decompositions


def uncut(gm: GraphModule) -> tuple[GraphModule, Sequence[Any]] | None:
    """The graph that `gm` is a part of, and its example inputs; None if it is no part. To be asked within the
    backend: the optimizer is on the stack then."""
    for frame in frames("_dynamo/backends/distributed.py"):
        if frame.f_code.co_name == "compile_fn":
            whole, inputs = frame.f_locals.get("gm"), frame.f_locals.get("example_inputs")
            if isinstance(whole, GraphModule) and inputs is not None and whole is not gm:
                return whole, inputs
            break
    return None


def forward_of(gm: GraphModule) -> Graph:
    """The forward of a Dynamo graph in ATen, as Inductor would get it. Compiles nothing, and leaves a
    compilation that is in progress as it is."""
    from torch._functorch.aot_autograd import aot_module_simplified

    examples = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    graphs: list[Graph] = []

    def compiler(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        graphs.append(gm.graph)
        return gm.forward

    mode = detect_fake_mode(examples)
    with tracing(TracingContext(mode)), torch.no_grad(), functorch_config.patch(enable_autograd_cache=False):
        aot_module_simplified(copy_graph(gm), examples, fw_compiler=compiler, decompositions=decompositions())
    return graphs[0]
