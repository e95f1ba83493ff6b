"""What a model would gain from `backend="fp8"` on a GPU that is not here: compile its step for it, and count.

    print(fp8compile.estimate(model, tokens, labels=labels, device="h100"))

The step is compiled twice for the described device (see `fake_gpu`): by Inductor alone, and with our passes.
The compilations give the bytes, the FLOPs and the module of each kernel; a roofline gives its time (see
`roofline`). docs/estimates.md says what that leaves out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import compat
from ..config.options import parse
from ..devices import catalog
from ..devices.catalog import Device
from ..devices.gpu import H200, Gpu
from ..errors import Fp8CompileError, OptionError
from ..logs import quiet
from ..reporting.layer_rows import alike, joined, parts
from ..reporting.report import Report, report
from ..runtime.inner import INDUCTOR
from . import fake_gpu, roofline
from .autocast import autocast as under
from .estimate_result import Cost, Estimate, LayerCost
from .explain import traced
from .extrapolate import Choices, Costs, Order, Repeated, carried_on, judged, repeated, samples
from .fake_gpu import Step
from .sandbox import entry, fuse_attention, inputs, modules_of, taken, untouched

NOWHERE, OPTIMIZER = "(elsewhere)", "(optimizer)"


def estimate(
    model: Callable[..., Any],
    *args: Any,
    device: str | None = None,
    options: Mapping[str, Any] | None = None,
    autocast: bool | None = None,
    attention: float | None = None,
    waves: bool = True,
    optimizer: float = 0.0,
    extrapolate: bool = False,
    **kwargs: Any,
) -> Estimate:
    """Estimate a step, forward and backward, of `model(*args, **kwargs)` on `device`, in bf16 and in FP8.

    `device`: None takes the device of the options or of their policy, else "h200".

    `model` is a module, a compiled module, or any function that calls modules. Model and inputs are on the
    CPU or the meta device. `options` are those of the backend. `autocast` compiles under bf16 autocast; None
    does so if a parameter is float32 and no autocast is active. `attention` is the rate of fused attention as
    a share of the bf16 matmul rate (`roofline` defines the default). `waves`: matmuls take whole waves of
    tiles; False counts their FLOPs at the device's full rate. `optimizer` is how many bytes the optimizer
    moves for each parameter in a step: 14 for AdamW on bf16 parameters, 28 on float32; 0 leaves it out.
    `extrapolate`, for deep models, compiles with a few of the repeated blocks, and extrapolates to all.

    Takes 5 to 60 s a graph, twice, and resets Dynamo: other compiled models compile again at their next call.

    Raises OptionError for an unknown device, a device without FP8, or bad options; Fp8CompileError if no GPU
    can be described (in a process with a CUDA device, or without Triton); and any error of the model.
    """
    if attention is not None and not 0 < attention <= 1:
        raise OptionError.of("attention", attention, "a share of the bf16 matmul rate, above 0 and at most 1")
    if optimizer < 0:
        raise OptionError.of("optimizer", optimizer, "bytes per parameter, at least 0")
    chosen = {name: value for name, value in (options or {}).items() if name != "strict"}
    found = device_for(device or parse(chosen).policy.device)
    chosen["device"] = found.key
    inductor = parse(chosen).inductor
    if any(inductor.get(name) for name in ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise")):
        raise OptionError("autotuning needs the device: estimate without max_autotune")
    model = taken(model)
    modules = modules_of((model, args, kwargs))
    blocks = repeated(modules) if extrapolate else None
    if extrapolate and blocks is None:
        raise OptionError(
            "extrapolate: the model has no ModuleList or Sequential of three or more equal blocks"
        )
    compiler = Compiler(model, modules, args, kwargs, found, chosen, blocks, attention, waves)
    with under(modules, autocast) as how:
        notes = [how] if how else []
        if found.gfx:
            why = "Inductor's HIP path cannot be described"
            notes.append(f"compiled as for an NVIDIA GPU, at this device's rates: {why}")
        bf16, (fp8, decided) = compiler.bf16(), compiler.fp8()
        if blocks is not None:
            notes.append(blocks.note(decided.matmuls))
    if not waves:
        notes.append("matmuls at the full rate, without waves of tiles")
    if optimizer:
        moved = optimizer * sum(p.numel() for p in {p for module in modules for p in module.parameters()})
        step = {OPTIMIZER: Cost(bytes=moved, bytes_outside_matmuls=moved, seconds=moved / found.bandwidth)}
        bf16, fp8 = {**bf16, **step}, {**fp8, **step}
        notes.append(f"with an optimizer that moves {optimizer:g} bytes per parameter")
    rate = roofline.attention_rate(found) if attention is None else roofline.AttentionRate("given", attention)
    return Estimate(found.name, tuple(_layers(bf16, fp8)), decided, tuple(notes), rate)


def device_for(name: str | None) -> Device:
    """The description of the device to estimate for. OptionError if it has no FP8."""
    found = catalog.find(name or "h200")
    if not found.has_fp8:
        raise OptionError.of("device", found.key, "a device with FP8 tensor cores", ("h100", "h200"))
    return found


@dataclass(frozen=True)
class Compiler:
    """Compiles a step for a device. Of `blocks`, if they are given, a few are compiled, and the costs are
    extrapolated to all."""

    model: Callable[..., Any]
    modules: list[nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: Device
    options: dict[str, Any]
    blocks: Repeated | None = None
    attention: float | None = None
    waves: bool = True

    def __post_init__(self) -> None:
        if (why := fake_gpu.unavailable()) is not None:
            raise Fp8CompileError(f"no GPU can be described here: {why}")

    def bf16(self) -> Costs:
        """The costs without FP8."""
        chosen = parse(self.options).inductor

        def inductor(gm: Any, example_inputs: Any) -> Any:
            return compat.inductor.compile_fx(gm, example_inputs, INDUCTOR.compile, chosen)

        return self._costs(lambda adapt: inductor, decided=False)[0]

    def fp8(self) -> tuple[Costs, Report]:
        """The costs in FP8, and the report."""
        from ..backend import fp8

        backend = functools.partial(fp8, options=self.options)
        return self._costs(lambda adapt: functools.partial(backend, adapt=adapt), decided=True)

    def _costs(self, backend: Callable[[Any], Callable], decided: bool) -> tuple[Costs, Report]:
        """`backend`: for what `adapt` of `backend.fp8` is. `decided`: see `Repeated.kinds`. Raises
        Fp8CompileError if costs of a part of the model come out negative."""
        if self.blocks is None:
            step, report = self._compiled(backend(None))
            return self._by_module(step), report
        report, choices = self.whole
        made = []
        for order, times in samples(self.blocks.kinds(report.matmuls, decided)):
            step, _ = self._compiled(backend(judged(choices.repeat(order))), order)
            made.append((self._by_module(step), times))
        costs, name = carried_on(made, self.blocks), self.blocks.name or "the blocks"
        for layer in _layers(costs, {}):
            if layer.bf16.negative:
                why = f"extrapolated from a few of {name}, which differ in more than their matmuls"
                raise Fp8CompileError(
                    f"the costs of {layer.name} come out negative, {why}: estimate without extrapolate"
                )
        return costs, report

    @functools.cached_property
    def whole(self) -> tuple[Report, Choices]:
        """The report of the whole model, and what the policy chooses in it."""
        assert self.blocks is not None
        choices = Choices(self.blocks)
        return traced(self.model, self.args, self.kwargs, self.options, judged(choices.note)), choices

    def _compiled(self, backend: Callable, order: Order | None = None) -> tuple[Step, Report]:
        """`order`: the blocks that are compiled, if not all are. What there is to warn of was said of all."""
        decided = Report()

        def compiled(gm: Any, example_inputs: Any) -> Any:
            fuse_attention(gm)
            return backend(gm, example_inputs)

        def step() -> None:
            nonlocal decided
            args, kwargs = inputs(self.args), inputs(self.kwargs)
            torch.compile(entry(self.model), backend=compiled)(*args, **kwargs)
            decided = report()  # here, because trace() clears the ledger at its end

        with contextlib.ExitStack() as inside:
            inside.enter_context(untouched(self.modules))
            inside.enter_context(torch.enable_grad())
            if self.blocks is not None and order is not None:
                inside.enter_context(self.blocks.only(order))
                inside.enter_context(quiet(logging.ERROR))
            found = fake_gpu.trace(step, _described(self.device))
        if not found.kernels:
            raise Fp8CompileError("nothing was compiled: Dynamo found no graph in this model")
        return found, decided

    def _by_module(self, step: Step) -> Costs:
        costs: Costs = {}
        for kernel in step.kernels:
            cost = Cost.of(kernel, self.device, self.attention, self.waves)
            costs[kernel.fqn] = costs.get(kernel.fqn, Cost()) + cost
        for fqn, kept in step.kept.items():
            costs[fqn] = costs.get(fqn, Cost()) + Cost(kept_for_backward=kept)
        return costs


def _described(device: Device) -> Gpu:
    """The GPU to compile for: the device, or for an AMD device an H200 with its name and sizes."""
    gpu = device.gpu
    if not device.gfx:
        return gpu
    sizes = ("name", "multi_processor_count", "total_memory", "L2_cache_size")
    return dataclasses.replace(H200, **{name: getattr(gpu, name) for name in sizes})


# -- layers --


def _sum(costs: Costs, names: Iterable[str]) -> Cost:
    return sum((costs[name] for name in names if name in costs), Cost())


def _part(fqn: str) -> str:
    """The part that a module belongs to, a child of a numbered block: "layers.0.mlp" of "layers.0.mlp.up"."""
    found = re.match(r"((?:[^.]+\.)*?\d+(?:\.[^.]+)?)(?:\.|$)", fqn)
    return found[1] if found else fqn or NOWHERE


def _layers(bf16: Costs, fp8: Costs) -> Iterator[LayerCost]:
    names = {**bf16, **fp8}
    # `0` and `2` of a Sequential are layers and stay apart; `layers.0` and `layers.1` are blocks of layers
    leaves = {name for name in names if not any(other.startswith(f"{name}.") for other in names)}
    apart = {name for name in leaves if parts(name)[2:] == [""]}  # each a group of its own
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(_part(name), []).append(name)
    ordered = sorted(modules, key=lambda name: (name == NOWHERE, name))
    for _, group in alike(ordered, str, lambda name: name if name in apart else tuple(parts(name)[2:])):
        within = [name for part in group for name in modules[part]]
        yield LayerCost(joined(group), _sum(bf16, within), _sum(fp8, within))
