"""Compiles the two halves that AOTAutograd makes of a graph, and keeps their graphs for eager calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .. import compat
from ..extension import GraphFeature
from ..ir.fx_utils import is_tensor, value
from ..passes.joint import Rewritten
from . import probe
from .calls import Calls
from .inner import Inner
from .interpreter import Boxed, How, boxed
from .owners import Owners
from .warm_start import Half, Later, packed, unpacked


class Halves:
    """`joint_pass` is one of Inductor's passes over the joint graph; `compile` replaces its inner compiler.

    `rewrite` runs our passes over a joint graph; `after` hears what they did, here or in an earlier process.
    Then `rewritten` is what they did (None: Inductor saw no joint graph, because the graph has no inputs),
    and `converts` tells whether some matmul became FP8. With `keeps`, AOTAutograd's cache keeps the halves
    for later processes. Then `restore` may take the place of both, and sets the same (`restored`).
    """

    def __init__(
        self,
        inner: Inner,
        rewrite: Callable[[Graph], Rewritten],
        after: Callable[[Rewritten], None],
        calls: Calls,
        owners: Owners,
        parts: Sequence[GraphFeature] = (),
    ):
        self.inner, self.rewrite, self.after, self.calls, self.owners = inner, rewrite, after, calls, owners
        self.parts = parts
        self.rewritten: Rewritten | None = None
        self.converts = False
        self.marker: str | None = None  # name of a saved tensor; its mark tells how the forward ran
        self.keeps = self.restored = False

    def joint_pass(self, graph: Graph) -> None:
        if not compat.dynamo.is_joint_graph(graph):
            return  # a nested graph: `collect` lists the operator that contains it
        done = self.rewrite(graph)
        kept = replace(done, matmuls=[], opaque=[])  # without the joint graph
        self._know(kept, any(matmul.fp8 for matmul in done.matmuls))

    def _know(self, done: Rewritten, converts: bool) -> None:
        self.rewritten, self.converts = done, converts
        self.calls.groups = tuple(done.groups)
        self.after(done)

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Compile one half, and keep a copy of its graph as it was before."""
        done, trains, backward = self.rewritten, self.calls.interface.trains, bool(kwargs.get("is_backward"))
        if backward:
            compat.inductor.keep_saved_tensors()
        example_inputs = self._sized(gm, example_inputs)
        hears = any(part.hears for part in self.parts)
        if not self.inner.computes or done is None or not (hears or (self.converts and trains)):
            compiled = self.inner.compile(gm, example_inputs, **kwargs)
            return self._kept(compiled, compiled, Half(), None, backward)
        for part in self.parts:
            part.half(gm)
        kept = compat.dynamo.copy_graph(gm)
        warm = self.inner.compile(gm, example_inputs, **kwargs)
        half = _half(kept, backward)
        run = self._run(half, boxed(self.inner.eager(kept)), warm, backward)
        return self._kept(run, warm, half, kept, backward)

    def _sized(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Sequence[Any]:
        """The inputs of a half, with those that we have added as the passes have made them."""
        ours = self.rewritten.added if self.rewritten is not None else ()
        pairs = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
        return [value(node) if node.name in ours else given for node, given in pairs]

    def _kept(self, run: Boxed, compiled: Any, half: Half, graph: GraphModule | None, backward: bool) -> Any:
        """`run`, for AOTAutograd's cache if it is used."""
        if not self.keeps:
            return run
        whole = (self.rewritten, self.converts) if self.rewritten is not None and not backward else None
        return compat.aot_cache.saved(run, compiled, packed(half, graph, whole), backward)

    def restore(self, found: Sequence[compat.aot_cache.Saved]) -> None:
        """Make the halves that an earlier process has kept. Raises Unusable if this cannot be."""
        found = sorted(found, key=lambda one: one.backward)
        contents = [unpacked(one.content) for one in found]
        whole = next((content.whole for content in contents if content.whole is not None), None)
        if whole is not None:
            self._know(*whole)
        for one, content in zip(found, contents, strict=True):
            one.run, one.compiled, one.content = one.compiled, None, None
            if content.half.wrapped:
                later = Later(content.steps, self.inner)
                one.run = self._run(content.half, later, one.run, one.backward)
        self.restored = True

    def _run(self, half: Half, eager: Callable[..., Any], warm: Boxed, backward: bool) -> Boxed:
        self.owners.know(half.casts)
        return self._backward(half, eager, warm) if backward else self._forward(half, eager, warm)

    def _forward(self, half: Half, eager: Callable[..., Any], warm: Boxed) -> Boxed:
        calls, device = self.calls, half.device
        marker, self.marker = half.marker if half.marker is not None else (None, None)

        def run(args: list[Any]) -> Any:
            call = calls.current
            how = call.how if call is not None and _on(device, args) else None
            if how is None:
                return warm(args)
            result = eager(args, how)
            if marker is not None:
                calls.marks.add(result[marker], how)
            return result

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _backward(self, half: Half, eager: Callable[..., Any], warm: Boxed) -> Boxed:
        calls, device, names = self.calls, half.device, half.inputs
        marker_at = names.index(self.marker) if self.marker in names else None
        listeners = [heard for part in self.parts if (heard := part.backward(names)) is not None]

        def run(args: list[Any]) -> Any:
            cold = any([heard(args) for heard in listeners])
            if marker_at is not None:  # it tells how the forward ran
                how = calls.marks.note(args[marker_at])
            else:
                how = How(True) if cold else None
            if how is not None and how.measuring is not None:
                calls.measured_calls.backward(how.measuring)
            return eager(args, how) if how is not None and _on(device, args) else warm(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _half(gm: GraphModule, backward: bool) -> Half:
    """What is to know of a half whose calls may run eagerly."""
    placeholders, outputs = gm.graph.find_nodes(op="placeholder"), _outputs(gm)
    kinds = {value(node).device.type for node in gm.graph.nodes if is_tensor(node)}
    # inputs that are numbers may be on the CPU
    device = next((kind for kind in kinds if kind != "cpu"), "cpu")
    # the last outputs are saved for backward, which looks for the marker only if it is among them
    nodes = [(i, x) for i, x in enumerate(outputs) if isinstance(x, Node) and x.op != "placeholder"]
    made = [i for i, x in nodes if is_tensor(x)]
    # a view of an input has the same address in every call, and could not mark one of them
    inputs = [value(x) for x in placeholders if is_tensor(x)]
    made = [i for i in made if not any(compat.autograd.share_memory(value(outputs[i]), x) for x in inputs)]
    marker = (made[-1], outputs[made[-1]].name) if made and not backward else None
    return Half(True, device, tuple(node.name for node in placeholders), marker, probe.casts_of(gm.graph))


def _outputs(gm: GraphModule) -> list[Any]:
    return list(next(iter(gm.graph.find_nodes(op="output"))).args[0])  # type: ignore[arg-type]


def _on(device: str, args: Sequence[Any]) -> bool:
    """Are the arguments where the graph was compiled for? (One compiled for a described GPU cannot run.)"""
    return any(isinstance(x, torch.Tensor) and x.device.type == device for x in args)
