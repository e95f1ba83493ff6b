"""`torch.compile(model, backend="fp8")`: the whole story.

Dynamo hands over a graph of the user's forward. We

1. validate the options and load the policy (`options`, `policy`),
2. read what only this graph knows: parameters' names, whether the model is training (`capture`),
3. give the graph two more inputs, the scaling state of forward and backward (`state`),
4. let Inductor compile it with our passes over the joint graph of forward and backward: find every matmul, decide,
   quantize, rewrite, update the state (`passes`), and with our operators lowered to ATen before code is generated,
5. report every matmul with its decision (`reports`), and
6. return a callable that finds the state of the parameters it is called with, and starts cold slots (`runtime`).

A graph that has nothing to differentiate, or whose model is in eval mode, takes the same way and stays in high precision.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from . import compat, passes
from .config.options import Options, parse
from .devices import catalog, formats
from .devices.catalog import Device
from .errors import CapacityExceeded, OptionError, StrictError
from .ir import ops, state_page
from .ir.inputs import Inputs, capture
from .ir.records import FP8, HIGH_PRECISION, GraphReport
from .logs import get_logger, say_once
from .passes import Rewritten, legality
from .reporting.report import Report
from .runtime import probe
from .runtime.compiled_graph import CompiledGraph, compile_inner, lowered
from .runtime.ledger import LEDGER
from .runtime.phases import ScheduledGraph

logger = get_logger(__name__)

OLDEST_GPU = (8, 9)  # compute capability: the first tensor cores that multiply FP8
RESHARDED = "weights are cast again in backward: FSDP2 reshards them after forward"
AMD_GPUS = ("gfx94", "gfx95", "gfx12")
INLINED = (
    "compiled autograd takes over the backward, in which delayed scaling cannot keep its state: every tensor is scaled by its "
    "current amax, as with recipe 'tensorwise'"
)


def fp8(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable:
    """The Dynamo backend. `mode` and `options` are those of `torch.compile`; see `options.parse` for what is allowed.

    Raises OptionError (a ValueError) for bad options and, with `strict`, StrictError if nothing can run in FP8.
    """
    try:
        chosen = parse(options, mode)
        inputs = dataclasses.replace(capture(gm, example_inputs), kinds=passes.whole_kinds(gm))
        refusal = _refusal(inputs.devices)
        if refusal is not None:
            _complain(chosen, refusal)
            LEDGER.add(GraphReport(0, inputs.root, (), (), refusal))
            return compat.compile_fx(gm, example_inputs, compile_inner, chosen.inductor)
        if compat.in_compiled_autograd():  # a copy of backwards that went through our passes: theirs is done, and reported
            logger.info("fp8: compiled autograd compiles the backwards of the graphs above in a graph of its own")
            return compat.compile_fx(gm, example_inputs, compile_inner, _lowering(chosen))
        _check_encoding(inputs.devices, chosen)
        return _compile(gm, list(example_inputs), inputs, chosen)
    except (OptionError, StrictError) as error:
        raise compat.shown(error) from None


def _reset() -> None:
    """Forget what graphs have said of themselves: they are gone."""
    LEDGER.clear()
    probe.forget()


compat.register_again("fp8")
compat.ask_by_thread()
fp8.reset = _reset  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


def _compile(gm: GraphModule, example_inputs: list[Any], inputs: Inputs, chosen: Options) -> Callable:
    learning = inputs.training and inputs.grad and bool(inputs.weights)
    if inputs.inlined and learning and chosen.policy.delayed:
        say_once(logger, logging.WARNING, f"fp8: {INLINED}")
    guess = 16 * -(-3 * len(inputs.weights) // 16)
    capacity = (guess, guess) if learning and chosen.policy.delayed and not inputs.inlined else None

    def compiled(phase: str) -> CompiledGraph:
        nonlocal capacity
        try:
            return _compile_once(gm, example_inputs, inputs, chosen, capacity, phase)
        except CapacityExceeded as error:  # a weight that is used many times: now we know how many
            capacity = (error.needed["forward"], max(1, error.needed["backward"]))
            return _compile_once(gm, example_inputs, inputs, chosen, capacity, phase)

    fp8_graph = compiled(FP8)
    if chosen.policy.schedule is None or not learning or not fp8_graph.converts:
        return fp8_graph
    logger.info("fp8: %s is compiled twice, for the FP8 and the high-precision phases of the schedule", inputs.root)
    observing = compiled(HIGH_PRECISION)
    observing.record = fp8_graph.record  # one entry for both, whichever is called first
    first = next((i for i in fp8_graph.weights if example_inputs[i].requires_grad), fp8_graph.weights[0])
    return ScheduledGraph({FP8: fp8_graph, HIGH_PRECISION: observing}, chosen.policy.schedule, first)


def _compile_once(
    gm: GraphModule,
    example_inputs: list[Any],
    inputs: Inputs,
    chosen: Options,
    capacity: tuple[int, int] | None,
    phase: str,
) -> CompiledGraph:
    policy = chosen.policy
    history = max([recipe.amax_history_len for recipe in policy.possible if recipe.delayed], default=1)
    weights = sorted(inputs.weights, key=lambda i: (i not in inputs.parameters, i))
    trains = inputs.training and inputs.grad
    observes, parameters = phase == HIGH_PRECISION, len(inputs.parameters)
    compiled = CompiledGraph(weights, history, capacity, observes, trains, inputs.names, parameters)
    gm = compat.copy_graph(gm)  # compile_fx takes ownership, and Dynamo still reads the placeholders of its own
    if capacity is not None:
        for direction, slots in zip(("forward", "backward"), capacity, strict=True):
            page = state_page.new_page(slots, history, example_inputs[weights[0]].device)
            example_inputs = [*example_inputs, compat.add_input(gm, f"fp8_{direction}_state", page)]

    def rewrite(graph: Graph) -> None:
        if not compat.is_joint_graph(graph):
            return  # of a nested graph: `collect` lists the operator that contains it
        device = _description(chosen, graph)
        done = passes.run(graph, inputs, policy, device, formats.fnuz(), capacity, phase == HIGH_PRECISION)
        compiled.rewritten = dataclasses.replace(done, matmuls=(), opaque=())  # they hold the whole joint graph
        compiled.converts = any(matmul.fp8 for matmul in done.matmuls)
        if phase == FP8:
            compiled.record = _report(done, inputs, chosen, device)

    patches = {
        **_lowering(chosen),
        "joint_custom_pre_pass": compat.GraphPass(
            rewrite, f"{policy.key}-{capacity}-{phase}-{inputs.inlined}", chosen.inductor.get("joint_custom_pre_pass")
        ),
        "custom_partitioner_fn": chosen.inductor.get("custom_partitioner_fn")
        or compat.Partitioner([op.name() for op in (ops.quantize, ops.quantize_both, ops.amax_blocks)]),
    }
    # DDPOptimizer expects as many lazy backwards as there are graphs, and there are two of each
    at_once = policy.schedule is not None
    compiled.call = compat.compile_fx(gm, example_inputs, compiled.inner_compile, patches, at_once)
    return compiled


def _lowering(chosen: Options) -> dict[str, Any]:
    """Inductor's options with our part of its passes over a partitioned graph."""
    name = "post_grad_custom_post_pass"
    return {**chosen.inductor, name: compat.GraphPass(lowered, chosen.policy.key, chosen.inductor.get(name))}


def _description(chosen: Options, graph: Graph) -> Device | None:
    """The device that decides what pays: the policy's, else the one that the graph is for, if it is described."""
    if chosen.policy.device is not None:
        return catalog.find(chosen.policy.device)
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    used = dict.fromkeys(value.device for value in values if isinstance(value, torch.Tensor))
    return next((found for device in used if (found := catalog.of(device)) is not None), None)


def _report(done: Rewritten, inputs: Inputs, chosen: Options, device: Device | None) -> int:
    """Add a graph to the ledger, and say in a line what became of it. In strict mode, insist that something became FP8, and
    that the policy's rules do something. Returns its index in the ledger."""
    training = inputs.training and not done.inference
    name = f"{inputs.root}, {'training' if training else 'evaluation'}"
    why = "inference" if inputs.training else "the model is in eval mode"
    how = "FP8, scaled by current amaxes" if chosen.policy.eval == "fp8" else "high precision"
    note = "" if training else f"compiled in {how}: {why}"
    records = tuple(matmul.record() for matmul in done.matmuls)
    described = device.name if device else ""
    remarks = (RESHARDED,) if training and any(m.fp8 and m.resharded(inputs.resharded) for m in done.matmuls) else ()
    index = LEDGER.add(GraphReport(0, name, records, done.opaque, note, done.edges, described, remarks))
    report = Report([LEDGER.graph(index)])
    if not training:
        logger.info("fp8: %s: %s", name, note)
        return index
    for complaint in done.complaints:
        _complain(chosen, complaint)
    logger.info("fp8: %s", report.summary())
    emulated = {matmul.recipe.name for matmul in done.matmuls if matmul.fp8 and matmul.emulated}
    if emulated:
        where = device.name if device is not None else "this device"
        what = f"{', '.join(sorted(emulated))} is emulated in bf16 on {where}, exact and not faster: it is Blackwell's."
        _complain(chosen, f"{what} For FP8's speed take 'delayed', 'tensorwise', 'rowwise' or 'blockwise'")
    wanted = not inputs.part and any(x.wanted and x.weight is None and legality.fits(x) for x in done.matmuls)
    # a part of a model may well be nothing but an embedding, a norm, convolutions, an output head, or an expert without tokens
    # in this step: that is as it should be
    kept = [matmul.on_purpose or matmul.reason == legality.NO_ROWS for matmul in done.matmuls if matmul.weight is not None]
    nothing = not all(kept) if kept else bool(done.opaque) and inputs.whole and not inputs.part
    if (nothing or wanted) and not any(matmul.fp8 for matmul in done.matmuls):
        _complain(chosen, f"no matmul of {inputs.root} becomes FP8: {report.summary()}")
    return index


def _refusal(devices: frozenset[torch.device]) -> str | None:
    """Why these devices cannot multiply FP8, None if they can."""
    for device in devices:
        if device.type not in ("cpu", "cuda"):
            return f"{device.type} devices have no FP8 matmuls here: compiling in high precision"
        if device.type == "cuda" and torch.version.hip is not None:
            arch = torch.cuda.get_device_properties(device).gcnArchName
            if not arch.startswith(AMD_GPUS):
                return f"{arch} has no FP8 matmuls (gfx94, gfx95 and gfx12 do): compiling in high precision"
        elif device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if capability < OLDEST_GPU:
                return (
                    f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; FP8 matmuls "
                    f"need {OLDEST_GPU[0]}.{OLDEST_GPU[1]} (RTX 40, L4, H100 or later): compiling in high precision"
                )
    return None


def _check_encoding(devices_used: frozenset[torch.device], chosen: Options) -> None:
    """A GPU multiplies its own FP8 encodings only; a CPU emulates both."""
    theirs = "fnuz" if formats.fnuz() else "ocp"
    for recipe in chosen.policy.possible:
        if recipe.fp8_encoding not in ("auto", theirs) and any(device.type == "cuda" for device in devices_used):
            raise OptionError.of("fp8_encoding", recipe.fp8_encoding, f"'auto' or {theirs!r} on this GPU; a CPU emulates both")


def _complain(chosen: Options, message: str) -> None:
    if chosen.strict:
        raise StrictError(f"{message} (strict=True)")
    say_once(logger, logging.WARNING, message)
