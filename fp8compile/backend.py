"""`torch.compile(model, backend="fp8")`: the whole story.

Dynamo hands over a graph of the user's forward. We

1. validate the options and load the policy (`config`),
2. read the facts that only this graph holds: parameters' names, whether the model is training (`ir.inputs`),
3. give the graph two more inputs, the scaling state of forward and backward (`ir.state_page`),
4. let Inductor compile it with our passes over the joint graph of forward and backward: find every matmul, decide,
   quantize, update the state, and lower our operators before code is generated (`passes.pipeline` has the order),
5. report every matmul with its decision (`reporting`), and
6. return a callable that finds the state of the parameters it is called with, and starts cold slots (`runtime`).

A graph that has nothing to differentiate, or whose model is in eval mode, takes the same way and stays in high precision.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from . import compat
from .config.options import Options, parse
from .config.policy.match import places
from .devices import catalog, formats, support
from .devices.catalog import Device
from .errors import FrozenFound, OptionError, StrictError, Unusable
from .ir import merged, ops, state_page
from .ir.inputs import Inputs, capture, roots, unchosen
from .ir.owner import in_owner
from .ir.records import FP8, HIGH_PRECISION, Gatherable, GraphReport
from .logs import get_logger, say_once
from .passes.hoist import Cache
from .passes.pipeline import Rewritten, run_early_post_grad, run_joint, run_partitioned, run_post_grad, skipped
from .passes.whole_model import whole_kinds
from .reporting.findings import findings, tell
from .reporting.kept import brief as kept_in_fp8
from .runtime import all_gather, forward_records, frozen_weights, loads, probe, warm_start
from .runtime.all_gather import Gathers
from .runtime.calls import Calls, Interface
from .runtime.compiled_graph import CompiledGraph
from .runtime.frozen_weights import Candidates
from .runtime.halves import Halves
from .runtime.inner import INDUCTOR, Inner
from .runtime.ledger import LEDGER
from .runtime.owners import Owners
from .runtime.phases import ScheduledGraph
from .runtime.weight_cache import WeightCache

logger = get_logger(__name__)

RECOMPUTABLE = (ops.quantize, ops.quantize_both, ops.amax_blocks, ops.transposed, merged.side_by_side, merged.both_sides)
FLAT = (
    "FullyShardedDataParallel (FSDP1) with use_orig_params=False: Dynamo leaves all of it to eager, so nothing becomes FP8. "
    "Wrap the model with use_orig_params=True (in Accelerate, fsdp_use_orig_params: true), or use FSDP2: fully_shard (in "
    "Accelerate, fsdp_version: 2)"
)
INLINED = (
    "compiled autograd takes over the backward, in which delayed scaling cannot keep its state: every tensor is scaled by its "
    "current amax, as with recipe 'tensorwise'"
)


def fp8(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    inner: Inner = INDUCTOR,
    phase: str | None = None,
) -> Callable:
    """The Dynamo backend. `mode` and `options` are those of `torch.compile`; `options.parse` validates them. `inner` compiles
    the graphs that our passes leave. `functools.partial(fp8, inner=runtime.inner.INTERPRETER)` is a backend without Inductor's
    code generation: it shows whether a fault comes from there. `phase`: compile for "fp8" or for "high_precision" alone,
    whatever the schedule says, and keep no copies of weights between calls. Such a high-precision graph has no state.

    Raises OptionError (a ValueError) for bad options and, with `strict`, StrictError if nothing can run in FP8.
    """
    try:
        chosen = parse(options, mode)
        inputs = capture(gm, example_inputs)
        if chosen.choose is not None:
            chosen = chosen.without(unchosen(gm, inputs, chosen.choose))
        refused = support.refusal(inputs.devices)
        if refused is not None:
            refusal = f"{refused}: compiling in high precision"
            _complain(chosen, refusal)
            LEDGER.add(GraphReport(0, inputs.root, (), (), refusal))
            return compat.compile_fx(gm, example_inputs, inner.compile, chosen.inductor)
        if compat.in_compiled_autograd():  # a copy of backwards that our passes have rewritten and reported
            logger.info("fp8: compiled autograd compiles the backwards of the graphs above in a graph of its own")
            return compat.compile_fx(gm, example_inputs, inner.compile, _lowering(chosen))
        _check_encoding(inputs.devices, chosen)
        if inputs.training and inputs.grad:
            compat.inline_regions(gm)
        inputs = dataclasses.replace(inputs, kinds=whole_kinds(gm))
        if any(rule.counts for rule in chosen.policy.rules):
            inputs = in_owner(gm, inputs, functools.partial(places, chosen.policy))
        return _compile(gm, example_inputs, inputs, chosen, inner, phase)
    except (OptionError, StrictError) as error:
        raise compat.shown(error) from None


def _reset() -> None:
    """Forget the reports and the casts of all graphs, which are gone."""
    LEDGER.clear()
    probe.forget()
    forward_records.forget()
    all_gather.forget()


def _refuse(mode: str | None = None, options: Mapping[str, Any] | None = None, **_: Any) -> None:
    try:
        _complain(parse(options, mode), FLAT)
    except (OptionError, StrictError) as error:
        raise compat.shown(error) from None


compat.on_refusal("fp8", _refuse)
fp8.reset = _reset  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


@dataclass(frozen=True)
class Job:
    """A graph to compile, and what a compilation has to know of it before. `history`: the longest of its recipes. `stateful`:
    it gets inputs for the scaling state. `facts`: see `runtime.warm_start`; None: without the
    cache."""

    gm: GraphModule
    example_inputs: list[Any]
    inputs: Inputs
    chosen: Options
    inner: Inner
    candidates: Candidates
    history: int
    stateful: bool
    facts: str | None


def _compile(
    gm: GraphModule, given: Sequence[Any], inputs: Inputs, chosen: Options, inner: Inner, only: str | None
) -> Callable:
    example_inputs = list(given)
    learning = inputs.training and inputs.grad and bool(inputs.weights)
    histories = [recipe.amax_history_len for recipe in chosen.policy.possible if recipe.delayed]
    if inputs.inlined and learning and histories:
        say_once(logger, logging.WARNING, f"fp8: {INLINED}")
    stateful = learning and bool(histories) and not inputs.inlined and only != HIGH_PRECISION
    if stateful:
        loads.listen(roots(gm, inputs.packed))
    may_move = _cacheable(example_inputs, inputs, chosen) if learning and only is None else frozenset()
    asked = learning and only is None and any(recipe.frozen == "fp8" for recipe in chosen.policy.possible)
    candidates, homes = frozen_weights.candidates(gm, example_inputs, inputs, asked)
    inputs = dataclasses.replace(inputs, frozen=candidates.stored | candidates.possible)
    plain = only is None and not may_move and not asked and inner is INDUCTOR
    facts = _facts(gm, example_inputs, inputs, chosen) if plain else None
    history = max(histories, default=1)
    job = Job(gm, example_inputs, inputs, chosen, inner, candidates, history, stateful, facts)

    def compiled(phase: str, record: int | None = None) -> CompiledGraph:
        nonlocal job
        first = len(inputs.names) + 2 * job.stateful
        cache = Cache(may_move, first)
        while True:
            found: Mapping[int, Gatherable] = {}
            try:
                return _compile_once(job, phase, cache, record)
            except FrozenFound as error:
                found = error.found
            except Unusable as error:
                logger.debug("fp8: %s is compiled anew, for the cache cannot be read: %s", inputs.root, error)
                job = dataclasses.replace(job, facts=None)
            if found:  # after the handler, because the error holds the weights; the next trace of this frame reads them in FP8
                example_inputs.clear()
                frozen_weights.freeze(found, homes, given, inputs.root)
                raise compat.restart("frozen weights are kept in FP8 only")

    if only is not None:
        return compiled(only)
    fp8_graph = compiled(FP8)
    if chosen.policy.schedule is None or not learning or not fp8_graph.converts:
        return fp8_graph
    observing = fp8_graph
    if not all_gather.arrived(example_inputs):  # weights that were gathered in FP8 are for FP8 phases
        logger.info("fp8: %s is compiled twice, for the FP8 and the high-precision phases of the schedule", inputs.root)
        observing = compiled(HIGH_PRECISION, fp8_graph.record)  # one entry in the ledger for both, whichever is called first
        observing.gathers = fp8_graph.gathers  # what FSDP2 may gather is known before the first FP8 phase
    weights = fp8_graph.interface.weights
    first = next((i for i in weights if example_inputs[i].requires_grad), weights[0])
    return ScheduledGraph({FP8: fp8_graph, HIGH_PRECISION: observing}, chosen.policy.schedule, first)


def _compile_once(job: Job, phase: str, cache: Cache, record: int | None) -> CompiledGraph:
    """`record`: the graph's index in the ledger, if it is there."""
    example_inputs, inputs, chosen = job.example_inputs, job.inputs, job.chosen
    policy, candidates, observes = chosen.policy, job.candidates, phase == HIGH_PRECISION
    weights = tuple(sorted(inputs.weights, key=lambda i: (i not in inputs.parameters, i)))
    interface = Interface(
        weights=weights,
        parameters=weights[: len(inputs.parameters)],
        packed=tuple(sorted(inputs.packed)),
        names=tuple(inputs.names),
        history=job.history,
        stateful=job.stateful,
        spare=cache.room,
        observes=observes,
        trains=inputs.training and inputs.grad,
    )
    sharded = all_gather.asked(example_inputs)
    inputs = dataclasses.replace(inputs, gathered=frozenset(sharded))
    if sharded and any(recipe.name not in ("tensorwise", "blockwise") for recipe in policy.possible):
        text = "gathered weights are scaled by their current amax (mxfp8, rowwise: with weight_tiles)"
        say_once(logger, logging.INFO, f"fp8: all-gather: {text}")
    gatherable: dict[int, Gatherable] = {}
    gm = compat.copy_graph(job.gm)  # compile_fx takes ownership, and Dynamo still reads the original's placeholders
    if job.stateful:
        for direction in ("forward", "backward"):
            page = state_page.new_page(1, interface.history, example_inputs[weights[0]].device)
            example_inputs = [*example_inputs, compat.add_input(gm, f"fp8_{direction}_state", page)]
    for i in range(cache.room):
        copy = torch.empty(1, device=example_inputs[weights[0]].device)
        example_inputs = [*example_inputs, compat.add_input(gm, f"fp8_copy_{i}", copy, stable=False)]

    def rewrite(graph: Graph) -> Rewritten:
        nonlocal record
        device = _description(chosen, graph)
        done = run_joint(graph, inputs, policy, device, formats.fnuz(), job.stateful, observes, cache, candidates.possible)
        if not observes:
            gatherable.update(all_gather.of_graph(done.gatherable, sharded, partial(_complain, chosen)))
            frozen_weights.check(inputs, candidates, done.gatherable, partial(_complain, chosen))
        if phase == FP8:
            stored = frozen_weights.records(inputs, candidates, done.gatherable)
            found = findings(done, inputs, policy.eval, device, stored)
            done, record = dataclasses.replace(done, findings=found), tell(found, partial(_complain, chosen))
        return done

    def keep(forward: GraphModule, backward: GraphModule, visible: int) -> None:
        kept = run_partitioned(forward, backward, visible, formats.fnuz())
        if kept:
            logger.info("fp8: %s: %s", inputs.root, kept_in_fp8(kept))
        if record is not None:
            LEDGER.keeps(record, kept)

    saves = policy.save == "fp8" and inputs.training and not observes
    if saves and chosen.inductor.get("custom_partitioner_fn"):
        _complain(chosen, "save='fp8' has no effect beside a custom_partitioner_fn, which decides what is kept")
    calls, owners = Calls(interface), Owners(interface)
    calls.together = compat.changes_collectives(chosen.inductor)
    halves = Halves(job.inner, rewrite, calls, owners)
    halves.keeps = job.facts is not None
    patches = {
        **_lowering(chosen),
        "joint_custom_pre_pass": compat.GraphPass(
            halves.joint_pass,
            f"{policy.key}-{job.stateful}-{phase}-{inputs.inlined}-{sorted(sharded)}-{skipped()}",
            chosen.inductor.get("joint_custom_pre_pass"),
            job.facts or "",
        ),
        "custom_partitioner_fn": chosen.inductor.get("custom_partitioner_fn")
        or compat.Partitioner(
            [op.name() for op in RECOMPUTABLE], keep if saves else None, f"-{saves}-{skipped()}", inputs.packed
        ),
    }
    # DDPOptimizer expects one lazy backward for each graph, but with a schedule each graph is compiled twice
    at_once = policy.schedule is not None
    restore = halves.restore if job.facts is not None else None
    function = compat.compile_fx(gm, example_inputs, halves.compile, patches, at_once, restore)
    if halves.restored:
        logger.debug("fp8: %s comes from AOTAutograd's cache", inputs.root)
        if halves.rewritten is not None and halves.rewritten.findings is not None:
            record = tell(halves.rewritten.findings, partial(_complain, chosen))
    gathers = Gathers(gatherable, chosen.strict, policy.schedule)
    hoisted = halves.rewritten.hoisted if halves.rewritten is not None else None
    outside = WeightCache(hoisted, job.inner, _lowering(chosen)) if hoisted is not None else None
    if outside is not None:
        owners.know(outside.casts)
    return CompiledGraph(function, interface, calls, owners, record, halves.converts, gathers, outside, chosen)


def _cacheable(example_inputs: Sequence[Any], inputs: Inputs, chosen: Options) -> frozenset[int]:
    """The parameters whose FP8 copies may be kept between calls, with `cache_weights`. Not those that FSDP frees. And none
    where CUDA graphs would copy the copies in each call, or where compiled autograd makes the calls."""
    if not any(recipe.cache_weights for recipe in chosen.policy.possible) or inputs.inlined:
        return frozenset()
    if compat.cuda_graphs(chosen.inductor):
        say_once(logger, logging.WARNING, "fp8: cache_weights has no effect with CUDA graphs, which copy what they read")
        return frozenset()
    freed = {id(read) for _, read in compat.sharded_pairs()}
    return frozenset(i for i in inputs.parameters if id(example_inputs[i]) not in freed and i not in inputs.packed)


def _lowering(chosen: Options) -> dict[str, Any]:
    """The user's Inductor options, and our passes over each partitioned graph."""
    key, theirs = f"{chosen.policy.key}-{skipped()}", chosen.inductor
    ours = {"post_grad_custom_post_pass": run_post_grad}
    if compat.async_tensor_parallel(theirs):
        ours["post_grad_custom_pre_pass"] = run_early_post_grad
    return {**theirs, **{name: compat.GraphPass(run, key, theirs.get(name)) for name, run in ours.items()}}


def _description(chosen: Options, graph: Graph) -> Device | None:
    """The device for which the cost model weighs FP8: the policy's, else the graph's own, if that is described."""
    if chosen.policy.device is not None:
        return catalog.find(chosen.policy.device)
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    used = dict.fromkeys(value.device for value in values if isinstance(value, torch.Tensor))
    return next((found for device in used if (found := catalog.of(device)) is not None), None)


def _facts(gm: GraphModule, example_inputs: Sequence[Any], inputs: Inputs, chosen: Options) -> str | None:
    """What decides about a graph beside the policy, if a later process may have it from AOTAutograd's cache, else None."""
    policy, theirs = chosen.policy, chosen.inductor
    passes = [name for name in theirs if "pass" in name or "partitioner" in name]
    if policy.schedule is not None or policy.save == "fp8" or passes or compat.cuda_graphs(theirs) or compat.reorders():
        return None
    if all_gather.asked(example_inputs):
        return None
    devices = sorted(inputs.devices, key=str)
    described = catalog.find(policy.device) if policy.device is not None else [catalog.of(device) for device in devices]
    return warm_start.facts(gm, example_inputs, inputs, [described, formats.fnuz(), skipped()])


def _check_encoding(devices: frozenset[torch.device], chosen: Options) -> None:
    allowed = support.encodings(devices)
    for recipe in chosen.policy.possible:
        if recipe.fp8_encoding not in ("auto", *allowed):
            theirs = f"'auto' or {allowed[0]!r} on this GPU; a CPU emulates both"
            raise OptionError.of("fp8_encoding", recipe.fp8_encoding, theirs)


def _complain(chosen: Options, message: str) -> None:
    if chosen.strict:
        raise StrictError(f"{message} (strict=True)")
    say_once(logger, logging.WARNING, message)
