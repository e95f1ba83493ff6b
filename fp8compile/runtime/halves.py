"""Compiles the two halves that AOTAutograd makes of a graph, and keeps their graphs for eager calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .. import compat
from ..extension import GraphFeature
from ..ir.fx_utils import arg, is_tensor, value
from ..passes.joint import Rewritten
from . import probe
from .calls import Calls
from .inner import Inner
from .interpreter import Boxed, EagerMode, boxed
from .owners import Owners
from .warm_start import Half, later, packed, unpacked


@dataclass(eq=False, repr=False)
class Halves:
    """`joint_pass` is one of Inductor's passes over the joint graph; `compile` replaces its inner compiler.

    `rewrite` runs our passes over a joint graph; `after` hears what they did, here or in an earlier process.
    Then `rewritten` is what they did (None: Inductor saw no joint graph, because the graph has no inputs).
    With `keeps`, AOTAutograd's cache keeps the halves for later processes. Then `restore` may take the place
    of both, and sets the same (`restored`)."""

    inner: Inner
    rewrite: Callable[[Graph], Rewritten]
    after: Callable[[Rewritten], None]
    calls: Calls
    owners: Owners
    parts: Sequence[GraphFeature]
    rewritten: Rewritten | None = None
    marker: str | None = None  # name of a saved tensor; its mark tells how the forward ran
    keeps: bool = False
    restored: bool = False

    def joint_pass(self, graph: Graph) -> None:
        if not compat.dynamo.is_joint_graph(graph):
            return  # a nested graph: `collect` lists the operator that contains it
        done = self.rewrite(graph)
        converts = any(matmul.fp8 for matmul in done.matmuls)
        self._know(replace(done, converts=converts, matmuls=[], opaque=[]))  # without the joint graph

    def _know(self, done: Rewritten) -> None:
        self.rewritten = done
        self.calls.groups = tuple(done.groups)
        self.after(done)

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Compile one half, and keep a copy of its graph as it was before."""
        done, trains, backward = self.rewritten, self.calls.interface.trains, bool(kwargs.get("is_backward"))
        if backward:
            compat.inductor.keep_saved_tensors()
        example_inputs = self._sized(gm, example_inputs)
        hears = any(part.hears for part in self.parts)
        if not self.inner.computes or done is None or not (hears or (done.converts and trains)):
            compiled = self.inner.compile(gm, example_inputs, **kwargs)
            return self._kept(compiled, compiled, None, None, backward)
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

    def _kept(
        self, run: Boxed, compiled: Any, half: Half | None, graph: GraphModule | None, backward: bool
    ) -> Any:
        """`run`, for AOTAutograd's cache if it is used."""
        if not self.keeps:
            return run
        content = packed(half, graph, None if backward else self.rewritten)
        return compat.aot_cache.saved(run, compiled, content, backward)

    def restore(self, found: Sequence[compat.aot_cache.Saved]) -> None:
        """Make the halves that an earlier process has kept. Raises Unusable if this cannot be."""
        found = sorted(found, key=lambda one: one.backward)
        contents = [unpacked(one.content) for one in found]
        whole = next((content.whole for content in contents if content.whole is not None), None)
        if whole is not None:
            self._know(whole)
        for one, content in zip(found, contents, strict=True):
            one.run, one.compiled, one.content = one.compiled, None, None
            if content.half is not None:
                eager = later(content.steps, self.inner)
                one.run = self._run(content.half, eager, one.run, one.backward)
        self.restored = True

    def _run(self, half: Half, eager: Callable[..., Any], warm: Boxed, backward: bool) -> Boxed:
        self.owners.know(half.casts)
        run = self._backward(half, eager, warm) if backward else self._forward(half, eager, warm)
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _forward(self, half: Half, eager: Callable[..., Any], warm: Boxed) -> Boxed:
        calls, device = self.calls, half.device
        marker, self.marker = half.marker if half.marker is not None else (None, None)

        def run(args: list[Any]) -> Any:
            call = calls.current
            mode = call.mode if call is not None and _on(device, args) else None
            if mode is None:
                return warm(args)
            result = eager(args, mode)
            if marker is not None:
                calls.marks.add(result[marker], mode)
            return result

        return run

    def _backward(self, half: Half, eager: Callable[..., Any], warm: Boxed) -> Boxed:
        calls, device, names = self.calls, half.device, half.inputs
        marker_at = names.index(self.marker) if self.marker in names else None
        listeners = [heard for part in self.parts if (heard := part.backward(names)) is not None]

        def run(args: list[Any]) -> Any:
            cold = any([heard(args) for heard in listeners])
            if marker_at is not None:  # it tells how the forward ran
                mode = calls.marks.note(args[marker_at])
            else:
                mode = EagerMode(True) if cold else None
            if mode is not None and mode.measuring is not None:
                calls.measured_calls.backward(mode.measuring)
            return eager(args, mode) if mode is not None and _on(device, args) else warm(args)

        return run


def _half(gm: GraphModule, backward: bool) -> Half:
    """What is to know of a half whose calls may run eagerly."""
    placeholders, outputs = gm.graph.find_nodes(op="placeholder"), arg(gm.graph.output_node(), 0)
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
    return Half(device, tuple(node.name for node in placeholders), marker, probe.casts_of(gm.graph))


def _on(device: str, args: Sequence[Any]) -> bool:
    """True if an argument is where the graph was compiled for. (A graph for a described GPU cannot run.)"""
    return any(isinstance(x, torch.Tensor) and x.device.type == device for x in args)
