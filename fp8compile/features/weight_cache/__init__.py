"""FP8 copies of weights that are kept between calls: the option `cache_weights`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ... import compat
from ...compilation import lowering
from ...extension import Feature, GraphFeature, Pass
from ...passes.joint import Joint, Rewritten
from .hoist import ROOM, Cache, Hoisted
from .hoist import hoist as run_hoist
from .in_place import write_in_place
from .weight_cache import WeightCache, step_begins, step_wrote

if TYPE_CHECKING:
    import torch

    from ...compilation import Job
    from ...runtime.calls import Call
    from ...runtime.compiled_graph import CompiledGraph


class KeptCopies(GraphFeature):
    """The copies of one graph. `weights`: the parameters whose copies may be kept, by input."""

    warm = False

    def __init__(self, weights: frozenset[int], inputs: int, stable: bool):
        self.weights, self.inputs, self.stable = weights, inputs, (stable,) * inputs
        self.first = 0
        self.hoisted: Hoisted | None = None
        self.cache: WeightCache | None = None

    def place(self, first: int) -> None:
        self.first = first

    def before(self, job: Job, joint: Joint) -> None:
        joint.cached = self.weights
        joint.extras.put(Cache(self.first, self.inputs))

    def after(self, job: Job, done: Rewritten) -> None:
        self.hoisted = done.results.get(Hoisted)

    def compiled(self, job: Job, graph: CompiledGraph) -> None:
        if self.hoisted is not None:
            self.cache = WeightCache(self.hoisted, job.inner, lowering(job.options), any(self.stable))
            graph.owners.know(self.cache.casts)

    def rest(self) -> None:
        if self.cache is not None:
            self.cache.rest()

    def stand_ins(self, device: torch.device) -> Sequence[torch.Tensor]:
        return self.cache.empty(device) if self.cache is not None else ()

    def arguments(self, args: Sequence[Any], call: Call) -> Sequence[torch.Tensor]:
        with compat.autograd.unseen():
            return self.cache.copies(args, call.measuring) if self.cache is not None else ()


class CachedWeights(Feature):
    name = "weight_cache"
    passes = {
        "reduce_current": (Pass("hoist", run_hoist),),  # casts of weights leave the graph
        "lower": (Pass("write_in_place", write_in_place, optional=True),),  # and write to given memory
    }

    def of_graph(self, job: Job) -> GraphFeature | None:
        weights = _cacheable(job) if job.learns and job.only is None else frozenset()
        if not weights:
            return None
        nodes = job.gm.graph.find_nodes(op="placeholder")
        room = ROOM * sum(max(1, len(nodes[i].users)) for i in weights)
        return KeptCopies(weights, room, compat.inductor.cuda_graphs(job.options.inductor))

    wanted_casts = staticmethod(step_begins)
    step_wrote = staticmethod(step_wrote)


def _cacheable(job: Job) -> frozenset[int]:
    """The parameters whose FP8 copies may be kept between calls. Not those that FSDP frees. And none where
    compiled autograd makes the calls."""
    inputs, options = job.inputs, job.options
    if not any(recipe.cache_weights for recipe in options.policy.possible) or inputs.inlined:
        return frozenset()
    freed = {id(read) for _, read in compat.fsdp.sharded_pairs()}
    return frozenset(i for i in inputs.parameters if id(job.given[i]) not in freed and i not in inputs.packed)
