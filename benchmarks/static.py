"""The estimate without a GPU: compile a step for a described H200, count its launches, and divide by
sustained rates.

Nothing is executed and nothing is measured. The figures compare compilations of one model: kernels, bytes as
Inductor's schedule has them (each buffer once per kernel), matmul FLOPs by dtype, bytes kept for backward,
and a roofline time, in which every kernel takes the longer of its bytes and its FLOPs, plus a launch
(`dryrun.roofline`). Matmuls count in waves of tiles. `operands_once_ms` is that time if generated kernels
moved each operand once (`Graph.operands_once`): what the best casts would give. The optimizer counts by its
bytes, at the rate that was measured of torch's, also ours, whose step may write the copies of weights, too.
Autotuning is ignored. With gradient accumulation, the graphs of a micro-batch count as often as it runs. A
graph without a matmul (casts of weights that are kept, with `cache_weights`) and the optimizer count once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from fp8compile.devices import catalog
from fp8compile.dryrun import fake_gpu, roofline
from fp8compile.features.weight_cache import weight_cache

from . import arms
from .cases.base import Point, Static
from .models import unallocated

H200 = catalog.find("h200")
ADAMW = 0.69  # of a copy's rate: torch's fused AdamW on an H200 (2.19 to 2.24 ms for 436 M bf16 parameters)
DEVICE = f"described {H200.name}"


def roofline_s(kernel: Any, waves: bool = True) -> float:
    return roofline.seconds(kernel, H200, waves=waves)


def optimizer_bytes(model: nn.Module) -> int:
    """The bytes that a step of the benchmark's fused AdamW (`cases.base.Task`) moves. It reads parameter,
    gradient and both moments, and writes parameter and both moments. The gradient has the parameter's dtype,
    and so have the moments, which `torch.optim.AdamW` makes by `zeros_like`: 14 bytes a parameter in bf16, 28
    in float32."""
    return sum(7 * parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def packed_bytes(model: nn.Module) -> float:
    """The same of `fp8compile.optim.AdamW` without masters: it reads the gradient, and reads and writes the
    weight, E4M3 and FP16, and their scales (`optim.states`). 12.1 bytes a parameter in bf16."""
    states = 2 * (1 + 2 + 8 / 128)
    return sum((3 * x.itemsize + states) * x.numel() for x in model.parameters() if x.requires_grad)


@contextlib.contextmanager
def casts_in_step() -> Iterator[list[int]]:
    """The bytes of the copies that a step can write, of each graph that is compiled inside. 0: it cannot."""
    found: list[int] = []
    stock = weight_cache.WeightCache.__init__

    def noted(self: Any, hoisted: Any, *given: Any) -> None:
        stock(self, hoisted, *given)
        found.append(hoisted.bytes if self.shared else 0)

    with mock.patch.object(weight_cache.WeightCache, "__init__", noted):
        yield found


def launches(step: Any, accumulate: int = 1) -> list[Any]:
    """The kernels of an optimizer step of so many micro-batches, from a trace of one."""
    return [kernel for graph in step.graphs for kernel in graph.kernels * times(graph, accumulate)]


def times(graph: Any, accumulate: int) -> int:
    """How often a graph runs in a step of so many micro-batches."""
    return accumulate if multiplies(graph) else 1


def multiplies(graph: Any) -> bool:
    return any(kernel.matmul is not None for kernel in graph.kernels)


def figures(
    step: Any,
    optimizer: float = 0.0,
    accumulate: int = 1,
    weights: Collection[tuple[int, ...]] = (),
) -> dict[str, float]:
    """Totals of a described step, as a flat dict. All of them add up over layers. `optimizer`: the bytes
    that it moves, which count in the `.._ms` of whole steps and in `optimizer_ms` only. `weights`: shapes of
    parameters."""
    kernels = launches(step, accumulate)
    outside = [k for k in kernels if k.matmul is None]
    generated = [k for k in kernels if k.generated]
    once = sum(times(graph, accumulate) * graph.operands_once(weights) for graph in step.graphs)
    after = 1e3 * optimizer / (H200.bandwidth * ADAMW)
    roofline_ms = 1e3 * sum(map(roofline_s, kernels)) + after
    once_ms = 1e3 * (once / H200.bandwidth + len(generated) * H200.launch)
    made = {
        "kernels": len(kernels),
        "gb": sum(k.bytes for k in kernels) / 1e9,
        "gb_outside_matmuls": sum(k.bytes for k in outside) / 1e9,
        "roofline_ms": roofline_ms,
        "gb_operands_once": once / 1e9,
        "operands_once_ms": roofline_ms - 1e3 * sum(map(roofline_s, generated)) + once_ms,
        # matmuls and attention, for which a measured time may stand in (`tables.restated`)
        "extern_ms": 1e3 * sum(roofline_s(k) for k in kernels if not k.generated),
        "roofline_ms_without_waves": 1e3 * sum(roofline_s(k, waves=False) for k in kernels) + after,
        "optimizer_ms": after,
        "kept_mb": step.kept_for_backward / 1e6,
    }
    for dtype, flops in step.flops.items():
        made[f"tflop.{dtype}"] = accumulate * flops / 1e12
    return made


def compile_point(point: Point, arm: arms.Arm) -> dict[str, float]:
    """Compile one training step of `point` the way `arm` does. RuntimeError if nothing was compiled."""
    model = unallocated(point.build, point.dtype)
    arms.apply(arm, model, arms.settings(arm, 1, interpreted=False), each=False)
    given = next(point.batches("meta", torch.bfloat16))
    batch = [torch.empty(x.shape, dtype=x.dtype).requires_grad_(x.requires_grad) for x in given]

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=point.autocast):
            model(*batch)  # the backward is compiled with it

    with mock.patch.dict(os.environ, arm.env), casts_in_step() as copies:
        found = fake_gpu.trace(step, H200.gpu)
    if not found.kernels:
        raise RuntimeError("nothing was compiled")
    updated = (packed_bytes if arm.packed else optimizer_bytes)(model) if point.optimizer else 0.0
    if arm.packed and copies and all(copies):  # written in the update, and not by a graph of casts
        updated += sum(copies)
        found = replace(found, graphs=tuple(filter(multiplies, found.graphs)))
    weights = {tuple(x.shape) for x in model.parameters() if x.dim() > 1}
    frozen = sum(x.nbytes for x in model.parameters() if not x.requires_grad)
    return {**figures(found, updated, point.accumulate, weights), "frozen_gb": frozen / 1e9}


def extrapolated(one: Mapping[str, float], two: Mapping[str, float], layers: int) -> dict[str, float]:
    """Totals with `layers` layers, extrapolated from the totals with one layer and with two."""
    return {k: one.get(k, 0) + (layers - 1) * (two.get(k, 0) - one.get(k, 0)) for k in {**one, **two}}


def estimate(static: Static, arm: arms.Arm) -> dict[str, Any]:
    """The row of one arm: its `figures`, and a note that says which layers were compiled. ValueError for an
    arm that cannot be estimated."""
    if unavailable := fake_gpu.unavailable():
        raise ValueError(unavailable)
    if arm.how is None:
        raise ValueError("no estimate: eager kernels are not compiled")
    if arm.mode:
        raise ValueError(f"no estimate: {arm.mode} needs the device")
    if static.extrapolate:
        one, two = (compile_point(static.point(n), arm) for n in (1, 2))
        made = extrapolated(one, two, static.layers)
        return {"figures": made, "note": f"{static.layers} layers, carried on from 1 and 2"}
    point = static.point(static.layers)
    return {"figures": compile_point(point, arm), "note": point.note}
