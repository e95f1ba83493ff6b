"""Compile a training step for a GPU that is not there, and read which kernels it would launch.

Dynamo and AOTAutograd trace the step on the CPU. From Inductor's joint passes on, the graph's fake tensors
are on cuda:0, and a `Gpu` description answers every question about the device (`device`). So Inductor runs
its GPU passes, partitions, schedules, fuses and writes Triton source. The source is read instead of run
(`record`). Graphs return placeholder tensors, so that a step may consist of several graphs. Each backward is
compiled with its forward, whether the step calls backward or not.

    step = trace(lambda: torch.compile(model, backend="fp8")(x).sum().backward())
    step.bytes_outside_matmuls, step.flops, step.kept_for_backward, step.code

The figures are static: bytes are counted on Inductor's schedule, each buffer once per kernel
(`plan_traffic`). docs/estimates.md has the limits.

This folder patches private names of torch. Comments say which names moved between torch 2.11 and 2.15.
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
            "this process has a CUDA device, and only a process without one can describe a GPU: "
            'run with CUDA_VISIBLE_DEVICES=""'
        )
    try:
        importlib.import_module("triton.backends.compiler")
    except ImportError:
        return "needs triton (pip install triton; it exists for Linux)"
    return None


def trace(step: Callable[[], Any], gpu: Gpu = H200) -> Step:
    """Run `step`, a forward (and backward) of a torch.compile'd callable on CPU tensors. Its graphs are
    compiled for `gpu` and compute nothing, so the gradients that they leave are meaningless. Resets Dynamo,
    before and after."""
    graphs: list[Graph] = []
    torch._dynamo.reset()
    try:
        with described_gpu(gpu), retarget_graphs(), record(graphs):
            step()
    finally:
        torch._dynamo.reset()
    # Some versions of torch lower a backward ahead of time, before its forward.
    return Step(tuple(sorted(graphs, key=lambda g: g.backward)))
