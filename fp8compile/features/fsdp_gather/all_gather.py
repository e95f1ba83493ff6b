"""FP8 all-gather: FSDP2 gathers weights as the FP8 values that compiled matmuls read, one byte an element.

    fully_shard(block); fully_shard(model)
    fp8compile.distributed.fp8_all_gather(model)

Modules, parameters, `state_dict()` and optimizers stay as they are: the hooks hang on the tensors of the
shards, where FSDP2 looks for them. A weight is cast on each rank, in every gather, by the scale of the whole
weight's current amax, or by those of its blocks' current amaxes: bitwise what the graph would have made of
the gathered weight (`gathered_scales`).

Which weights: the first training calls gather all of them in high precision, and the compiled graphs say
which ones nothing but FP8 matmuls read (`passes.gathered`). These are gathered in FP8 from the second step
on. Their graphs are compiled once more then, for another kind of input. The ranks agree on it, or would
gather different things: what each rank knows travels with the amaxes, in one all-reduce for all weights
before the first forward after an optimizer step, a backward that reduced gradients, or a loaded state:
version counters of tensors do not tell (fused optimizers do not move them). What the graphs of some rank find
out later counts one step later, so that no step waits for the device.

A forward without gradients gathers in high precision: FSDP2 has two unsharded parameters for each weight
then, of which one is in use. Backward gathers what a forward with gradients did: what is gathered only
changes while no backward is due.

With rules that decide at some steps only, graphs say it for each set of rules. Agreements hold from the next
step on, so a rank is for FP8 if this step and the next cast the weight alike. A rule that is switched by hand
is not foreseen: where weights have arrived in FP8, the call runs as before, and the switch is a step late.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ... import compat, process
from ...codegen.text import dtype_name
from ...compilation import Job
from ...config.options import Options
from ...config.policy import Policy
from ...config.recipe import WHOLE, recipe_of
from ...errors import ShardingError, StrictError
from ...extension import GraphFeature, active
from ...frontend.inputs import plain
from ...ir.gathered_weight import GatheredWeight
from ...ir.records import Gatherable
from ...logs import get_logger, say_once
from ...passes.joint import Rewritten
from ...runtime import probe
from ...runtime.held import held_in
from ...runtime.ledger import Ledger
from ...runtime.optimizer_steps import listen
from ...runtime.parameters import find, record_of, share_records
from .gathered_scales import IN_HIGH_PRECISION, Scales, code_of, form_of, format_of, misfit

logger = get_logger(__name__)

UNREAD = "no compiled training graph has multiplied it yet"
EARLY = 3  # so many agreements are read at once, the later ones a step later
WEIGHT = ("weight", 0, "")  # a weight among statistics
_all: weakref.WeakSet[GatheredParameter] = weakref.WeakSet()


@dataclass(eq=False)
class Gathered:
    """One weight. `objection`: why it is never gathered in FP8; `verdict`: what graphs that read it say, by
    their policy; `policy`: the one that was given for all of them."""

    parameter: compat.fsdp.ShardedParameter
    owner: GatheredParameter
    objection: str = ""
    verdicts: dict[Policy, Gatherable] = field(default_factory=dict)
    policy: Policy | None = None
    strict: bool = False
    code: int = IN_HIGH_PRECISION  # how all ranks gather it in training
    scales: Scales | None = None  # those of its group, in which it has this position
    position: int = 0

    @property
    def own_code(self) -> int:
        """As `code`, if this rank were asked."""
        now, following = (self.verdict_at(ahead) for ahead in (0, 1))
        if self.objection or now is None or now.reason or now != following:
            return IN_HIGH_PRECISION
        return code_of(now)

    def verdict_at(self, ahead: int) -> Gatherable | None:
        """What holds so many optimizer steps from now; None while no graph has said it."""
        policy = self.policy
        if policy is not None and policy not in self.verdicts:  # its rules decide at some steps only
            policy = active(self.parameter.sharded, policy, ahead)
        return self.verdicts.get(policy) if policy is not None else None

    @property
    def waits(self) -> bool:
        """True if it is gathered in high precision for the time being only."""
        able = not self.objection and any(not verdict.reason for verdict in self.verdicts.values())
        return able and not self.own_code

    @property
    def reason(self) -> str:
        """Why it is not gathered in FP8."""
        now, following = (self.verdict_at(ahead) for ahead in (0, 1))
        said = UNREAD if now is None else now.reason
        said = said or ("its matmuls cast it otherwise from the next step on" if now != following else "")
        if self.owner.put_off:
            said = said or "since a forward, no optimizer has taken a step, and no backward has run"
        later = "other ranks keep it" if self.owner.agreed > 1 else "from the second step on"
        return self.objection or said or later

    def learn(self, verdicts: Mapping[Policy, Gatherable], strict: bool, given: Policy) -> None:
        """What graphs say; for each policy, the first that is against it counts."""
        self.strict, self.policy = self.strict or strict, given
        for policy, verdict in verdicts.items():
            known = self.verdicts.get(policy)
            if not verdict.reason and not self.objection and (reason := misfit(self, verdict)):
                verdict = Gatherable(reason)
            if known is None or (verdict.reason and not known.reason):
                self.verdicts[policy] = verdict
            elif not verdict.reason and not known.reason and verdict != known:
                self.verdicts[policy] = Gatherable("graphs cast it in different ways")

    def read(self, operator: str) -> None:
        """An operator outside of compiled graphs has read the values that FP8 left."""
        reason = f"read by {operator} outside of compiled graphs"
        message = f"{self.parameter.name} was gathered in FP8, and is {reason}: it gets FP8-rounded values"
        if self.strict:
            raise StrictError(f"{message} (strict=True)")
        dtype = dtype_name(self.parameter.dtype)
        say_once(logger, logging.WARNING, f"{message}. It is gathered in {dtype} from the next step on")
        self.verdicts = dict.fromkeys(self.verdicts, Gatherable(reason))

    @property
    def cast(self) -> probe.CastKind | None:
        """As statistics show it; None if it is gathered in high precision."""
        if not self.code:
            return None
        form = form_of(self.code)
        return probe.CastKind.of(recipe_of(False, form.block), format_of(form).dtype)

    def numbers(self) -> dict[str, float]:
        """amax, scale and its inverse of the last forward, by the names of statistics. Waits for the device.
        Empty where it has several scales, or none yet."""
        scales, i = self.scales, self.position
        if scales is None or scales.amax is None or not self.code or form_of(self.code).block != WHOLE:
            return {}
        assert scales.scale is not None and scales.inverse is not None
        amax, scale, inverse = torch.stack((scales.amax[i], scales.scale[i], scales.inverse[i, 0])).tolist()
        inverses = dict.fromkeys(("scale_inv", "scale_inv_min", "scale_inv_max"), inverse)
        return {"amax": amax, "scale": scale, **inverses}


def gather_in_fp8(model: nn.Module) -> None:
    """See `fp8compile.distributed.fp8_all_gather`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"fp8_all_gather() takes a torch.nn.Module, not {type(model).__name__}")
    # what is held in FP8 is gathered so in any case
    parameters = [x for x in compat.fsdp.sharded_parameters(model) if held_in(x.sharded) is None]
    if not parameters:
        fix = "call fully_shard(model) first"
        raise ShardingError(f"fp8_all_gather: nothing of this {type(model).__name__} is sharded: {fix}")
    found = [find(parameter.sharded).extras.get(Gathered) for parameter in parameters]
    known = [entry for entry in found if entry is not None]
    if known:
        for entry in known:
            entry.owner.written()
        return
    for parameter in parameters:
        _check(parameter)
    _all.add(GatheredParameter(model, parameters))
    listen(_stepped)


def _stepped(_: torch.optim.Optimizer) -> None:
    for gather in list(_all):
        gather.written()


def _loaded(module: nn.Module, _: Any) -> None:
    for gather in list(_all):
        if any(entry.parameter.module is module for entry in gather.possible):
            gather.written()


def _check(parameter: compat.fsdp.ShardedParameter) -> None:
    reshard = "use reshard_after_forward=True or False"
    fixes = {
        "is offloaded to the CPU": (parameter.on_cpu, "fully_shard without CPUOffloadPolicy"),
        "has an all-gather extension already": (parameter.extended, "leave one of the two out"),
        "is resharded to fewer ranks after forward": (parameter.partly_resharded, reshard),
    }
    for what, (found, fix) in fixes.items():
        if found:
            raise ShardingError(f"fp8_all_gather: {parameter.name} {what}: {fix}")


def _objection(parameter: compat.fsdp.ShardedParameter) -> str:
    """Why a parameter can never be gathered in FP8."""
    if parameter.is_tensor_parallel:
        return "a tensor-parallel parameter"
    if parameter.is_replicated:
        return "not sharded"
    if parameter.shard.dim() != 2:
        return "not a matrix"
    if not parameter.shard.is_floating_point() or parameter.shard.element_size() > 4:
        return f"dtype {dtype_name(parameter.shard.dtype)}"
    return "tied: another module has it, too" if parameter.tied else ""


class GatheredParameter:
    """What is gathered for one model: hears from FSDP2 when a forward begins."""

    def __init__(self, model: nn.Module, parameters: Sequence[compat.fsdp.ShardedParameter]):
        self.entries = [Gathered(parameter, self, _objection(parameter)) for parameter in parameters]
        self.possible = [entry for entry in self.entries if not entry.objection]
        groups: dict[int, list[Gathered]] = {}
        for entry in self.possible:
            groups.setdefault(id(entry.parameter.process_group), []).append(entry)
        self.scales = [Scales(entries) for entries in groups.values()]
        self.outdated, self.evaluates, self.told = True, False, False
        self.agreed = 0  # how often
        self.codes: tuple[int, ...] = ()  # what this rank wanted at the last agreement
        self.due = 0  # backwards of forwards
        self.put_off = False  # the last agreement, because a backward is due
        for entry in self.entries:
            record_of(entry.parameter.sharded).extras.put(entry)
        self.install()
        for module in {entry.parameter.module for entry in self.possible}:
            module.register_load_state_dict_post_hook(_loaded)
        compat.fsdp.listen(model, self)

    def install(self) -> None:
        """Hang the hooks on the tensors of the shards, where they are not: new tensors have none."""
        for scales in self.scales:
            for i, entry in enumerate(scales.entries):
                if not entry.parameter.installed:
                    entry.parameter.install(partial(scales.prepare, i), partial(scales.finish, i))
                    record_of(entry.parameter.sharded).extras.put(entry)
                    self.outdated = True

    def begin(self, evaluates: bool) -> None:
        self.evaluates = evaluates
        self.install()
        if self.outdated and not evaluates:
            self.agreed += 1
            self.put_off = self.due > 0
            for scales in self.scales:
                scales.refresh(self.agreed <= EARLY, not self.put_off)
            codes = tuple(entry.own_code for entry in self.possible)
            # what changes now, the ranks agree on at the next step
            known = codes == self.codes or any(entry.code for entry in self.possible)
            self.codes = codes
            ready = self.agreed >= EARLY and known and not self.told
            if ready and not any(entry.waits for entry in self.possible):
                self.log_once()
            self.outdated = False
        self.due += not evaluates

    def end(self) -> None:
        self.due = max(0, self.due - 1)

    def written(self) -> None:
        """Somebody has written into weights, so no backward of an earlier forward is due."""
        self.outdated, self.due = True, 0

    def log_once(self) -> None:
        """Once, what became of it."""
        self.told = True
        fp8 = sum(entry.code > 0 for entry in self.entries)
        logger.info("fp8: all-gather: %d of %d matrices in FP8", fp8, len(self.possible))
        if fp8:
            return
        why = Counter(entry.reason for entry in self.possible)
        reasons = ", ".join(f"{count} {reason}" for reason, count in why.most_common())
        message = f"fp8_all_gather: no weight is gathered in FP8: {reasons}"
        if any(entry.strict for entry in self.entries):
            raise StrictError(f"{message} (strict=True)")
        say_once(logger, logging.WARNING, message)

    def differs(self, group: Any) -> bool:
        return any(entry.code for entry in self.entries if entry.parameter.group is group)

    def reduces(self) -> None:
        self.outdated = True


# -- what graphs say, and what is reported --


def asked(tensors: Sequence[Any]) -> dict[int, str]:
    """Which inputs of a graph are weights that may be gathered in FP8, with their names."""
    if not _all:
        return {}
    share_records(tensors)
    known = [find(x).extras.get(Gathered) if isinstance(x, nn.Parameter) else None for x in tensors]
    entries = [(i, entry) for i, entry in enumerate(known) if entry is not None and not entry.objection]
    return {i: plain(entry.parameter.name) for i, entry in entries}


@dataclass(eq=False)
class Gathers(GraphFeature):
    """What graphs say of the weights that one of them reads, by input and policy. `sharded`: names of those
    that may be gathered in FP8."""

    sharded: Mapping[int, str]
    options: Options
    found: dict[int, dict[Policy, Gatherable]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.warm = not self.sharded

    def after(self, job: Job, done: Rewritten) -> None:
        self.found = {i: {} for i in done.gatherable if i in self.sharded}
        for (policy, i), verdict in done.verdicts.items():
            if i in self.found:
                self.found[i][job.policies[policy]] = verdict
        for i in (i for i in self.found if job.record is None and done.gatherable[i].shared):
            why = f"gathered in high precision: beside FP8 matmuls, it is {done.gatherable[i].reason}"
            self.options.warn(f"fp8_all_gather: {self.sharded[i]} is {why}")

    def first_call(self, args: Sequence[Any], owners: Mapping[int, weakref.ref], record: int | None) -> None:
        for i, verdicts in self.found.items():
            entry = find(args[i]).extras.get(Gathered)
            if entry is not None:
                entry.learn(verdicts, self.options.strict, self.options.policy)
        gathered = [args[i] for i in self.found if isinstance(args[i], GatheredWeight)]
        if gathered and record is not None:
            process.of(Ledger).supersede(record, [x for x in args if isinstance(x, nn.Parameter)])

    def measure(self, args: Sequence[Any], measuring: probe.MeasuredCall) -> None:
        """Measure the weights that have arrived in FP8: no cast in the graph does."""
        for i in self.found if measuring.measurements else ():
            entry = find(args[i]).extras.get(Gathered)
            if isinstance(args[i], GatheredWeight) and entry is not None and entry.code:
                assert entry.scales is not None
                measuring.note(args[i], WEIGHT, entry.scales.measured(entry.position))


def forget() -> None:
    """Graphs are gone, and what they have said with them."""
    for gather in list(_all):
        for entry in gather.entries:
            entry.verdicts = {}
