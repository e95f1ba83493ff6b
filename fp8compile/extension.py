"""What a feature may add to the core, which calls features through this file alone. `features` lists them.

A `Feature` is one object of the process: its passes, and what it knows between graphs. For each graph that is
compiled it may make a `GraphFeature`, which gives the graph more inputs, tells the passes what they need, and
hears of calls. Each method here adds nothing: a feature overrides those that it needs.

What is called in the life of a graph, in this order:

    describe, of_graph, place                     before it is traced
    before, passes, decisions, report, after      while it is traced; from AOTAutograd's cache, `after` alone
    partitioned                                   after the partitioner, with `partitions`; not from the cache
    half, backward                                each half; from the cache, `backward` alone
    compiled, callable                            before it serves calls
    first_call                                    with each set of parameters
    measure                                       at calls that are measured
    arguments                                     at each call, with `inputs`

So what a later process needs of the passes is in `joint.results`: plain data, for the cache and the report.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.fx import GraphModule
    from torch.nn import Module

    from .compilation import Job
    from .config.policy import Policy
    from .frontend.inputs import Inputs
    from .ir.records import GraphReport, TableRecord
    from .passes.joint import Joint, Partitioned, Rewritten
    from .runtime.calls import Call
    from .runtime.compiled_graph import CompiledGraph
    from .runtime.probe import CastKind, MeasuredCall


@dataclass(frozen=True)
class Pass:
    """`run` changes its argument and returns a result for the log, such as a count. `optional`: the graph is
    right without this pass, and FP8COMPILE_SKIP may name it. A name is that of one pass."""

    name: str
    run: Callable[[Any], object]
    optional: bool = False


class StoredScale(NamedTuple):
    """The scale of a tensor that is kept between calls, its inverse, and the last amax. `cold`: there is no
    scale yet. `counts`: by the names of statistics."""

    amax: float
    scale: float
    scale_inv: float
    cold: bool
    counts: Mapping[str, int]


class CastInStep(NamedTuple):
    """How a step casts a weight that it updates, seen as rows of its last dimension, [R, C]: by the scale
    with this `inverse` (float32 [1], a power of two as a rule), into `rows`, FP8 [R, C], and `columns`, FP8
    [C, R], whose rows may be apart; None: not in this layout. `amax`, int32 [1], is raised to the bits of the
    largest magnitude of the new weight."""

    rows: Tensor | None
    columns: Tensor | None
    inverse: Tensor
    amax: Tensor
    fp8_max: float

    @property
    def dtype(self) -> torch.dtype:
        """Of the copies: there is one at least."""
        return next(copy.dtype for copy in (self.rows, self.columns) if copy is not None)

    @property
    def apart(self) -> int:
        """How many elements the rows of `columns` are apart."""
        return self.columns.stride(0) if self.columns is not None else 0


class GraphFeature:
    """A feature's part in one compiled graph. It lives as long as the compiled code, and must not keep the
    `Job`, which holds the inputs of the first call."""

    partitions: bool = False  # its passes after the partitioner are to run
    warm: bool = True  # AOTAutograd's cache may keep the graph for later processes
    inputs: int = 0  # how many tensors the graph gets from `arguments`; a pass gives each its dtype and sizes
    stable: Sequence[bool] = ()  # which of them keep their addresses, so that CUDA graphs need not copy them
    hears: bool = False  # of each backward, and of what runs eagerly, so these have to come to us

    def place(self, first: int) -> None:
        """The position of the first of its inputs among those of the graph."""

    def before(self, job: Job, joint: Joint) -> None:
        """Tell the passes what they need."""

    def decisions(self, done: Rewritten) -> Sequence[str]:
        """Those that all ranks have to make alike, a line each."""
        return ()

    def report(self, job: Job, report: GraphReport, done: Rewritten) -> GraphReport:
        """Add to the report: records of its own to `added`, or a line to `remarks` (as `joint.remarks`)."""
        return report

    def after(self, job: Job, done: Rewritten) -> None:
        """The passes have run, in this process or in the one that has filled AOTAutograd's cache."""

    def partitioned(self, job: Job, halves: Partitioned, record: int | None) -> None:
        """The passes have run over both halves. `record`: the graph's index in the ledger."""

    def half(self, graph: GraphModule) -> None:
        """Forward or backward is about to be compiled. Fp8CompileError if it cannot be."""

    def backward(self, names: Sequence[str]) -> Callable[[Sequence[Any]], bool] | None:
        """A backward with inputs of these names was compiled, or comes from the cache. What is returned is
        called before each of its calls, with its arguments; true if its forward was cold."""
        return None

    def compiled(self, job: Job, graph: CompiledGraph) -> None:
        """The graph is about to serve calls. What has to see every call wraps `graph.function`; DDPOptimizer
        calls it with fake tensors, too."""

    def first_call(self, args: Sequence[Any], owners: Mapping[int, weakref.ref], record: int | None) -> None:
        """The first call with these weights. `args`: as the user holds them; `owners`: weights, by input."""

    def measure(self, args: Sequence[Any], measuring: MeasuredCall) -> None:
        """A call that is measured begins."""

    def arguments(self, args: Sequence[Any], call: Call) -> Sequence[Tensor]:
        """The tensors for its inputs in this call; fewer than `inputs` if the last ones are not read. It may
        make the call cold."""
        return ()

    def stand_ins(self, device: torch.device) -> Sequence[Tensor]:
        """As `arguments`, for a call with fake tensors."""
        return ()

    def rest(self) -> None:
        """Another graph has taken over the calls, perhaps for good."""

    def forget(self) -> None:
        """Forget every call: the next one is the first."""


class Feature:
    """A feature, once a process. `passes` says after which pass of the core its own stand: in their order,
    after those of the features before it. `joint`, `partitioned`, `early_post_grad` and `post_grad` stand for
    the beginning."""

    name: str = ""
    passes: Mapping[str, Sequence[Pass]] = {}

    def describe(self, job: Job) -> Inputs:
        """What is known of a graph's inputs before it is traced, and more."""
        return job.inputs

    def policies(self, policy: Policy) -> Sequence[Policy]:
        """Those under which a graph for training is compiled, once each, instead of this policy, which has
        rules that decide at some steps only. The first one is that of reports. Empty: this policy alone."""
        return ()

    def of_graph(self, job: Job) -> GraphFeature | None:
        """Its part in a graph that is about to be traced, under `job.policy`."""
        return None

    def callable(
        self, job: Job, graph: CompiledGraph, compiled: Callable[[Job], CompiledGraph]
    ) -> Callable[..., Any] | None:
        """What Dynamo gets instead of `graph`, where there are several policies. Only the first feature that
        wants this has its way. `graph` was compiled under the first policy; `compiled` compiles it under that
        of another job."""
        return None

    def active(self, parameter: Tensor, policy: Policy, ahead: int) -> Policy | None:
        """Which of `policies` decides about the model with this parameter, so many optimizer steps from now,
        as far as is known."""
        return None

    def statistics(self, model: Module) -> Sequence[Mapping[str, Any]]:
        """Rows of statistics of a model, beside those of its tensors. A row has a "name", "role", "recipe"
        and "format", and those of the other columns (`Stats.rows`) that it knows."""
        return ()

    def stored_scales(self, weights: Iterable[Tensor]) -> Mapping[tuple[int, str, int], StoredScale]:
        """The scales that it keeps, by the id of the weight, role and use."""
        return {}

    def keep(self, model: Module) -> Callable[[], None] | None:
        """What brings back all that it knows of a model now."""
        return None

    def cast_outside(self, weight: Tensor) -> tuple[CastKind, Callable[[], Mapping[str, float]]] | None:
        """How a weight is cast before graphs read it; amax, scale and inverse, by the names of statistics."""
        return None

    def records(self, tensors: Sequence[Tensor]) -> Sequence[TableRecord]:
        """Records of these parameters for the report of a model."""
        return ()

    def wanted_casts(
        self, optimizer: torch.optim.Optimizer, castable: Collection[int]
    ) -> Mapping[int, CastInStep] | None:
        """The casts that this optimizer's step should make, which begins now. It can cast these (ids).
        None if it needs nothing of this optimizer, and expects nothing."""
        return None

    def step_wrote(self, optimizer: torch.optim.Optimizer, weights: Sequence[Tensor]) -> None:
        """A step has cast these weights so."""

    def reset(self) -> None:
        """torch._dynamo.reset() was called: all graphs are gone."""


_features: list[Feature] = []


def register(features: Iterable[Feature]) -> None:
    """Add these features to the core, in this order."""
    _features.extend(feature for feature in features if feature not in _features)


def features() -> Sequence[Feature]:
    return tuple(_features)


def stored_scales(weights: Iterable[Tensor]) -> dict[tuple[int, str, int], StoredScale]:
    """See `Feature.stored_scales`."""
    known = list(weights)
    return {key: x for feature in _features for key, x in feature.stored_scales(known).items()}


def policies(policy: Policy) -> tuple[Policy, ...]:
    """See `Feature.policies`."""
    found = (feature.policies(policy) for feature in _features)
    return tuple(next(filter(None, found), (policy,)))


def active(parameter: Tensor, policy: Policy, ahead: int) -> Policy:
    """See `Feature.active`."""
    found = (feature.active(parameter, policy, ahead) for feature in _features)
    return next((one for one in found if one is not None), policy)


def with_passes(start: str, core: Sequence[Pass]) -> tuple[Pass, ...]:
    """The passes of the core, and those of all features at their places. `start` stands for the beginning."""

    def after(name: str) -> list[Pass]:
        return [step for feature in _features for step in feature.passes.get(name, ())]

    return (*after(start), *(step for one in core for step in (one, *after(one.name))))
