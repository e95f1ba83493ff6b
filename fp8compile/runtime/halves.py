"""Compiles the two halves that AOTAutograd makes of a graph, and keeps each graph for calls that run operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .. import compat
from ..errors import Fp8CompileError
from ..ir.fx_utils import is_tensor, value
from ..passes.pipeline import Rewritten
from . import probe
from .calls import Calls
from .inner import Inner
from .interpreter import Boxed, boxed
from .owners import Owners


class Halves:
    """`joint_pass` becomes one of Inductor's passes over the joint graph; `compile` replaces Inductor's inner compiler.

    `rewrite` runs our passes over a joint graph. Afterwards `rewritten` is what the passes did (None: Inductor saw no joint
    graph, because the graph has no inputs), and `converts` tells whether some matmul became FP8.
    """

    def __init__(self, inner: Inner, rewrite: Callable[[Graph], Rewritten], calls: Calls, owners: Owners):
        self.inner, self.rewrite, self.calls, self.owners = inner, rewrite, calls, owners
        self.rewritten: Rewritten | None = None
        self.converts = False
        self.marker: str | None = None  # name of a tensor saved for backward; its mark tells the backward how the forward ran

    def joint_pass(self, graph: Graph) -> None:
        if not compat.is_joint_graph(graph):
            return  # a nested graph: `collect` lists the operator that contains it
        done = self.rewrite(graph)
        self.rewritten = replace(done, matmuls=(), opaque=())  # matmuls would keep the whole joint graph alive
        self.converts = any(matmul.fp8 for matmul in done.matmuls)
        self.owners.multiply(done.forwards, done.inference)
        self.calls.groups = done.groups
        if done.groups:
            records = (matmul.record() for matmul in done.matmuls if matmul.weight is not None)
            decisions = [f"{r.fqn} {r.gemm} {r.decision} {r.recipe}".strip() for r in records]
            gathers = [f"{r.kind} of {r.tensor} {r.reason or 'fp8'}" for r in done.collectives]
            self.calls.decisions = (*decisions, *gathers)

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Compile one half, and keep a copy of its graph as it was before."""
        done, trains = self.rewritten, self.calls.interface.trains
        if not self.inner.computes or done is None or not (done.pages or (self.converts and trains)):
            return self.inner.compile(gm, example_inputs, **kwargs)
        backward = bool(kwargs.get("is_backward"))
        if done.pages:
            _check_update(gm, done.pages[backward], done.backward if backward else done.forward)
            self.calls.keep_state(done)
        kept = compat.copy_graph(gm)
        self.owners.know(probe.casts_of(kept.graph))
        warm = self.inner.compile(gm, example_inputs, **kwargs)
        devices = {value(node).device.type for node in kept.graph.nodes if is_tensor(node)}
        device = next((kind for kind in devices if kind != "cpu"), "cpu")  # inputs that are numbers may be on the CPU
        return self._backward(kept, warm, device, done) if backward else self._forward(kept, warm, device)

    def _forward(self, gm: GraphModule, warm: Boxed, device: str) -> Boxed:
        calls, eager, outputs = self.calls, boxed(self.inner.eager(gm)), _outputs(gm)
        # the last outputs are saved for backward; if the marker is not among them, the backward does not look for it
        inputs = [value(x) for x in gm.graph.find_nodes(op="placeholder") if is_tensor(x)]
        made = [i for i, x in enumerate(outputs) if isinstance(x, Node) and x.op != "placeholder" and is_tensor(x)]
        # a view of an input has the same address in every call, and could not mark one of them
        made = [i for i in made if not any(compat.share_memory(value(outputs[i]), x) for x in inputs)]
        marker = made[-1] if made else None
        self.marker = outputs[marker].name if marker is not None else None

        def run(args: list[Any]) -> Any:
            call = calls.current
            if (call.pages is None and call.look is None) or not _on(device, args):
                return warm(args)
            how = calls.forward(call)
            if how is None:
                result = warm(args)
            else:
                result = eager(args, how)
                if marker is not None:
                    calls.marks.add(result[marker], how)
            calls.forward_done(call)
            return result

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _backward(self, gm: GraphModule, warm: Boxed, device: str, done: Rewritten) -> Boxed:
        calls, book, eager = self.calls, self.calls.book, boxed(self.inner.eager(gm))
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        page = done.pages[1] if book is not None else None
        page_at, marker_at = (names.index(x) if x in names else None for x in (page, self.marker))

        def run(args: list[Any]) -> Any:
            pages = book.by_pointer.get(args[page_at].data_ptr()) if book is not None and page_at is not None else None
            how = calls.backward(pages, args[marker_at] if marker_at is not None else None)
            result = eager(args, how) if how is not None and _on(device, args) else warm(args)
            calls.backward_done(pages)
            return result

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _check_update(gm: GraphModule, page: str, slots: Sequence[Any]) -> None:
    """Fp8CompileError if the update of the state is missing: the partitioner silently drops a mutation that does not fit into
    its half of the graph."""
    writes = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    if slots and not any(getattr(node.args[0], "name", None) == page for node in writes):
        raise Fp8CompileError(
            'the update of the scaling state was lost in this graph; options={"recipe": "tensorwise"} does without state'
        )


def _outputs(gm: GraphModule) -> list[Any]:
    return list(next(iter(gm.graph.find_nodes(op="output"))).args[0])  # type: ignore[arg-type]


def _on(device: str, args: Sequence[Any]) -> bool:
    """Are the arguments where the graph was compiled for? (A graph compiled for a described GPU cannot run here.)"""
    return any(isinstance(x, torch.Tensor) and x.device.type == device for x in args)
