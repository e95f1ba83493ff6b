"""`torch.compile(model, backend="fp8")`: from a Dynamo graph and options to a callable.

The options are validated, what only this graph tells is read (`frontend.inputs`), and the graph is compiled
with our passes (`compilation`). One with nothing to differentiate, or of a model in eval mode, takes the same
way in high precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from . import compat, extension, process
from . import features as _features  # noqa: F401  # to register them
from .compilation import Compilation, Job, lowering
from .config.options import Options, parse
from .config.policy import Policy, Rule, Site
from .config.policy.match import treatment
from .config.recipe import SETTINGS, USUAL, Recipe
from .devices import catalog, formats, support
from .errors import OptionError, Retrace, ShardingError, StrictError, Unusable
from .frontend.inputs import Inputs, capture, unchosen
from .frontend.owner import in_model, models_of, tell_apart
from .ir.records import HIGH_PRECISION, GraphReport
from .logs import get_logger
from .passes.pipeline import skipped
from .passes.whole_model import whole_kinds
from .runtime import probe, warm_start
from .runtime.compiled_graph import CompiledGraph
from .runtime.inner import INDUCTOR, Inner
from .runtime.ledger import Ledger

logger = get_logger(__name__)

FLAT = (
    "FullyShardedDataParallel (FSDP1) with use_orig_params=False: Dynamo leaves all of it to eager, so "
    "nothing becomes FP8. Wrap the model with use_orig_params=True (in Accelerate, fsdp_use_orig_params: "
    "true), or use FSDP2: fully_shard (in Accelerate, fsdp_version: 2)"
)


def fp8(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    inner: Inner = INDUCTOR,
    only: str | None = None,
    adapt: Callable[[Policy], Policy] | None = None,
) -> Callable:
    """The Dynamo backend. `mode` and `options` are those of `torch.compile`; `options.parse` validates them.
    `inner` compiles the graphs that our passes leave. `functools.partial(fp8,
    inner=runtime.inner.INTERPRETER)` is a backend without Inductor's code generation: it shows whether a
    fault comes from there. `only`: compile for "fp8" or for "high_precision" alone, whatever the policy
    says of steps, and keep no copies of weights between calls. Such a high-precision graph has no state.
    `adapt` makes the policy that decides, of the one that was given.

    Raises OptionError (a ValueError) for bad options; with `strict`, StrictError if nothing can run in FP8.
    """
    try:
        chosen = parse(options, mode)
        inputs = in_model(gm, capture(gm, example_inputs))
        if chosen.choose is not None:
            chosen = chosen.without(unchosen(models_of(gm, inputs), chosen.choose))
        if adapt is not None:
            chosen = replace(chosen, policy=adapt(chosen.policy))
        refused = support.refusal(inputs.devices)
        if refused is not None:
            refusal = f"{refused}: compiling in high precision"
            chosen.warn(refusal)
            process.of(Ledger).add(GraphReport(0, inputs.root, (), (), refusal))
            return compat.inductor.compile_fx(gm, example_inputs, inner.compile, chosen.inductor)
        # then this is a copy of backwards that our passes have rewritten and reported
        if compat.autograd.in_compiled_autograd():
            logger.info(
                "fp8: compiled autograd compiles the backwards of the graphs above in a graph of its own"
            )
            return compat.inductor.compile_fx(gm, example_inputs, inner.compile, lowering(chosen))
        _check_encoding(inputs.devices, chosen)
        _check_features(chosen)
        _check_graphs(chosen)
        compat.callbacks.when_given_up(inputs.root, functools.partial(_given_up, chosen))
        if inputs.training and inputs.grad:
            compat.regions.inline_regions(gm)
        inputs = replace(inputs, kinds=whole_kinds(gm))
        tell_apart(gm, inputs, functools.partial(_treatment, chosen.policy))
        return _compile(gm, example_inputs, inputs, chosen, inner, only)
    except (OptionError, ShardingError, StrictError) as error:
        raise compat.dynamo.shown(error) from None


def _reset() -> None:
    """Forget the reports and the casts of all graphs, which are gone."""
    process.of(Ledger).clear()
    probe.forget()
    for feature in extension.features():
        feature.reset()


def _refuse(mode: str | None = None, options: Mapping[str, Any] | None = None, **_: Any) -> None:
    try:
        parse(options, mode).warn(FLAT)
    except (OptionError, StrictError) as error:
        raise compat.dynamo.shown(error) from None


compat.flat.on_refusal("fp8", _refuse)
fp8.reset = _reset  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


def _compile(
    gm: GraphModule, given: Sequence[Any], inputs: Inputs, options: Options, inner: Inner, only: str | None
) -> Callable:
    every = extension.policies(options.policy)
    job = Job(gm, given, inputs, options, inner, only, every[:1], every[0])
    if only == HIGH_PRECISION:
        high = replace(every[0], rules=(Rule(fp8="off"),), labels=(), own=None, save="auto")
        job = replace(job, policies=(high, every[0]), policy=high)
    elif only is None and job.learns:
        job = replace(job, policies=every)
    for feature in extension.features():
        job = replace(job, inputs=feature.describe(job))
    if only is None and inner is INDUCTOR:
        job = replace(job, facts=_facts(job))
    try:
        graph = _compiled(job)
        if only is not None or not job.learns:
            return graph
        later = replace(job, record=graph.record)
        made = (feature.callable(later, graph, _compiled) for feature in extension.features())
        return next(filter(None, made), graph)
    except Retrace as again:
        after = again.then
    after()  # after the handler, because the error holds the weights
    raise compat.dynamo.restart("the model was changed")


def _compiled(job: Job) -> CompiledGraph:
    try:
        return Compilation(job).run()
    except Unusable as error:
        logger.debug("fp8: %s is compiled anew, for the cache cannot be read: %s", job.inputs.root, error)
        return Compilation(replace(job, facts=None)).run()


def _facts(job: Job) -> str | None:
    """What decides about a graph beside the policy. None if AOTAutograd's cache may not have the graph."""
    policy, theirs = job.options.policy, job.options.inductor
    passes = [name for name in theirs if "pass" in name or "partitioner" in name]
    recorded = compat.inductor.cuda_graphs(theirs)
    if passes or recorded or compat.triton.reorders():
        return None
    if policy.device is not None:
        known: Any = catalog.find(policy.device)
    else:
        known = [catalog.of(device) for device in sorted(job.inputs.devices, key=str)]
    return warm_start.facts(job.gm, job.given, job.inputs, [known, formats.fnuz(), skipped()])


def _treatment(policy: Policy, inputs: Inputs, names: Sequence[str]) -> str:
    """What the rules make of the module that `inputs` describe. `names`: of its modules and parameters."""
    order = {name: (i, len(inputs.matrices)) for i, name in enumerate(inputs.matrices)}
    none: dict[str, Any] = {"op": "", "gemm": "", "m": 0, "n": 0, "k": 0, "kind": ""}
    sites = [Site(x, x, inputs.around, block=inputs.block(x), layer=order.get(x), **none) for x in names]
    return treatment(policy, inputs.prefix, sites)


def _given_up(options: Options, name: str, function: str, cause: str, all_calls: bool) -> None:
    lost = "All its calls" if all_calls else "Calls that no compiled code fits"
    fix = 'TORCH_LOGS="recompiles,graph_breaks" shows more'
    what = f"fp8: {name}: Dynamo no longer compiles {function}: {cause}"
    options.warn(f"{what}. {lost} run in eager mode, without FP8. {fix}")


def _check_encoding(devices: frozenset[torch.device], chosen: Options) -> None:
    allowed = support.encodings(devices)
    for recipe in chosen.policy.possible:
        if recipe.fp8_encoding not in ("auto", *allowed):
            theirs = f"'auto' or {allowed[0]!r} on this GPU; a CPU emulates both"
            raise OptionError.of("fp8_encoding", recipe.fp8_encoding, theirs)


def _check_graphs(options: Options) -> None:
    """Without trees, Inductor records no CUDA graph that writes to an input, as to the scaling state (torch
    2.11 to 2.15, `check_for_mutation_ignore_cuda_graph_managed_tensor`), and says so in a debug log only."""
    trees, theirs = "triton.cudagraph_trees", options.inductor
    delayed = any(recipe.delayed for recipe in options.policy.possible)
    if delayed and compat.inductor.cuda_graphs(theirs) and not compat.triton.is_on(trees, theirs):
        fix = f"leave out {trees!r}, or write 'recipe': 'tensorwise'"
        options.warn(f"fp8: {trees}=False: no graph that keeps a scaling state is recorded: {fix}")


def _check_features(options: Options) -> None:
    """OptionError for a setting of a feature that this copy of the package does not have."""
    policy, usual = options.policy, Recipe()
    known = {"", *(feature.name for feature in extension.features())}
    missing = {key: one.feature for key, one in SETTINGS.items() if one.feature not in known}
    for key, feature in missing.items():
        default = getattr(usual, key)
        for value in (getattr(recipe, key) for recipe in policy.possible):
            if value not in (False, default):
                raise OptionError.of(key, value, f"{default!r}: features/{feature} is not here")
    for key, value, usually in (("save", policy.save, Policy().save), ("schedule", policy.schedule, None)):
        if value != usually and key not in known:
            raise OptionError.of(key, value, f"{usually!r}: features/{key} is not here")
    if policy.varies and "schedule" not in known:
        windows = next(policy.window_text(i) for i, rule in enumerate(policy.timed) if rule.during)
        raise OptionError.of("during", windows, "None: features/schedule is not here")
    if "delayed" not in known and any(recipe.delayed for recipe in policy.possible):
        raise OptionError.of("recipe", "delayed", f"{USUAL!r}: features/delayed is not here")
