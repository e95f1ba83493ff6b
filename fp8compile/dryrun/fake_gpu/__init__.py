"""Compile a training step for a GPU that is not there, and read what it would launch.

Dynamo and AOTAutograd trace the step on the CPU. From Inductor's joint passes on, the graph's fake tensors say cuda:0 and every
question about the device is answered from a `Gpu` description (`device`), so Inductor runs its GPU passes, partitions,
schedules, fuses and writes Triton source, which is read instead of run (`record`). What a graph returns are tensors that
nobody computed, so a step may be several graphs; their backwards are compiled with them, whether it calls backward or not.

    step = trace(lambda: torch.compile(model, backend="fp8")(x).sum().backward())
    step.bytes_outside_matmuls, step.flops, step.kept_for_backward, step.code

The figures are static, as Inductor's scheduler counts bytes (each buffer once a kernel): they compare two compilations of one
model and are no measurement. Limits: code between graphs runs, on the CPU, and is not counted; a tensor that one graph hands
to the next is not counted as kept for backward; no autotuning; and a process without a CUDA device.

Private names of torch are patched here; where they moved between 2.11 and 2.15 the code says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ...devices.gpu import H200, Gpu
from .device import described_gpu
from .record import record, retarget_graphs
from .step import Attention, Graph, Launch, MatmulLaunch, Step, TensorLayout

__all__ = ["Attention", "Graph", "Launch", "MatmulLaunch", "Step", "TensorLayout", "trace", "unavailable"]


def unavailable() -> str | None:
    """Why this process cannot describe a GPU, or None."""
    if torch.cuda.is_available():
        return (
            "this process has a CUDA device, and a described one takes its place only where there is none: "
            'run with CUDA_VISIBLE_DEVICES=""'
        )
    try:
        importlib.import_module("triton.backends.compiler")
    except ImportError:
        return "needs triton (pip install triton; it exists for Linux)"
    return None


def trace(step: Callable[[], Any], gpu: Gpu = H200) -> Step:
    """Run `step`, a forward (and backward) of a torch.compile'd callable on CPU tensors, with graphs that are compiled for
    `gpu` and compute nothing: gradients that it leaves are meaningless. Resets Dynamo, before and after."""
    graphs: list[Graph] = []
    torch._dynamo.reset()
    try:
        with described_gpu(gpu), retarget_graphs(), record(graphs):
            step()
    finally:
        torch._dynamo.reset()
    # A backward that is lowered ahead of time comes before its forward's in some versions.
    return Step(tuple(sorted(graphs, key=lambda g: g.backward)))
