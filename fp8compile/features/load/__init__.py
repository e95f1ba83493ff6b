"""Weights of a released FP8 checkpoint, held as they are: `fp8compile.load_fp8`."""

from __future__ import annotations

from ... import compat
from ...compilation import Job
from ...errors import ShardingError
from ...extension import Feature, Pass
from ...frontend.inputs import Inputs
from ...ir.frozen import FrozenWeight
from ...runtime.held import all_held
from .fold import fold


class LoadedWeights(Feature):
    name = "load"
    passes = {"gather": (Pass("fold", fold),)}  # all decisions are made, and nothing is planned

    def describe(self, job: Job) -> Inputs:
        """ShardingError where shards of weights that were held in FP8 are so no more, or cannot be."""
        now = [(module, name, module._parameters.get(name)) for module, name in all_held()]
        lost = [one for one in now if not isinstance(one[2], FrozenWeight)]
        given = {id(x) for x in job.given}
        sharded = {id(x): pair for pair in compat.fsdp.sharded_pairs() for x in pair} if lost else {}
        for module, name, parameter in lost:
            if given.isdisjoint(map(id, sharded.get(id(parameter), ()))):
                continue
            what = f"{type(module).__name__}.{name} was held in FP8, and its shards are in high precision now"
            fix = "call model.to() before load_fp8, and load_fp8 before fully_shard"
            raise ShardingError(f"{what}: {fix}")
        held = frozenset(i for i, x in enumerate(job.given) if isinstance(x, FrozenWeight))
        for i in held and held & compat.fsdp.resharded(job.given, to_fewer=True):
            what = f"{job.inputs.names[i]} is held in FP8, and resharded to fewer ranks after forward"
            raise ShardingError(f"{what}: use reshard_after_forward=True or False")
        return job.inputs
