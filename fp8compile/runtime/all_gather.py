"""FP8 all-gather: FSDP2 gathers weights as the FP8 values that compiled matmuls read, one byte an element.

    fully_shard(block); fully_shard(model)
    fp8compile.distributed.fp8_all_gather(model)

Modules, parameters, `state_dict()` and optimizers stay as they are: the hooks hang on the tensors of the shards, where FSDP2
looks for them. A weight is cast on each rank, in every gather, by the scale of the whole weight's current amax: to the bit what
the graph would have made of the gathered weight.

Which weights: the first training calls gather all of them in high precision, and the compiled graphs say which ones nothing but
FP8 matmuls read (`passes.gathered`). These are gathered in FP8 from the second step on. Their graphs are compiled once more
then, for another kind of input. The ranks agree on it, or would gather different things: what each rank knows travels with the
amaxes. There is one all-reduce (maximum) for all weights,

    [amax of each weight, code of each weight, -code of each weight]        code: 0 bf16, else how it is scaled

before the first forward behind an optimizer step, a backward that reduced gradients, or a loaded state: version counters of
tensors do not tell (fused optimizers do not move them). What the graphs of some rank find out later counts one step later, so
that no step waits for the device.

A forward without gradients gathers in high precision: FSDP2 has two unsharded parameters for each weight then, of which one is
in use. Backward always gathers what a forward with gradients did.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import compat
from ..devices.formats import pick
from ..errors import ShardingError, StrictError
from ..ir import ops
from ..ir.gathered import GatheredWeight
from ..ir.inputs import plain
from ..ir.records import FP8, HIGH_PRECISION, Gatherable, GatherRecord
from ..ir.scale import inverse_of, scale_to, to_power_of_2
from ..logs import get_logger, say_once
from .ledger import LEDGER
from .parameters import find, record_of, share_records

logger = get_logger(__name__)

UNREAD = "no compiled training graph has multiplied it yet"
EARLY = 3  # so many agreements are read at once, the later ones a step later
COLUMNS = 4  # of a scale's inverse, which is the first of them: each is aligned to 16 bytes, as Inductor expects of inputs
_all: weakref.WeakSet[AllGather] = weakref.WeakSet()
_hooks: list[Any] = []


@dataclass(eq=False)
class Gathered:
    """One weight. `objection`: why it is never gathered in FP8; `verdict`: what the graphs that read it say."""

    parameter: compat.ShardedParameter
    owner: AllGather
    objection: str = ""
    verdict: Gatherable | None = None
    strict: bool = False
    code: int = 0  # how all ranks gather it in training: 0 in high precision

    @property
    def own_code(self) -> int:
        """As `code`, if this rank were asked."""
        verdict = self.verdict
        if self.objection or verdict is None or verdict.reason:
            return 0
        return 1 + verdict.fnuz + 2 * verdict.power_of_2 + 4 * verdict.margin

    @property
    def reason(self) -> str:
        """Why it is not gathered in FP8."""
        said = self.verdict.reason if self.verdict is not None else UNREAD
        return self.objection or said or ("other ranks keep it" if self.owner.agreed > 1 else "from the second step on")

    def learn(self, verdict: Gatherable, strict: bool) -> None:
        """What one graph says; the first that is against it counts."""
        self.strict = self.strict or strict
        if self.verdict is None or (verdict.reason and not self.verdict.reason):
            self.verdict = verdict
        elif not verdict.reason and not self.verdict.reason and verdict != self.verdict:
            self.verdict = Gatherable("graphs cast it in different ways")

    def read(self, operator: str) -> None:
        """An operator outside of compiled graphs has read the values that FP8 left."""
        reason = f"read by {operator} outside of compiled graphs"
        message = f"{self.parameter.name} was gathered in FP8, and is {reason}: it gets the values that FP8 left of it"
        if self.strict:
            raise StrictError(f"{message} (strict=True)")
        say_once(logger, logging.WARNING, f"{message}. It is gathered in {_name(self.parameter.dtype)} from the next step on")
        self.verdict = Gatherable(reason)


def fp8_all_gather(model: nn.Module) -> None:
    """Have FSDP2 gather in FP8 what nothing but FP8 matmuls read. Behind `fully_shard(model)`, before or after compilation.

    Called again, it only has scales computed anew before the next forward: call it if you wrote into weights between two
    forwards by hand, without a backward, an optimizer step or `load_state_dict` in between.

    ShardingError, a ValueError, names the parameter and the fix where this cannot work: nothing is sharded, parameters are
    offloaded to the CPU or have an all-gather extension, `reshard_after_forward` is a number; and later, when a graph is
    compiled, for a recipe whose weights have no scale of their current amax.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fp8_all_gather() takes a torch.nn.Module, not {type(model).__name__}")
    parameters = compat.sharded_parameters(model)
    if not parameters:
        raise ShardingError(f"fp8_all_gather: nothing of this {type(model).__name__} is sharded: call fully_shard(model) first")
    known = [entry for parameter in parameters if (entry := find(parameter.sharded).gathered) is not None]
    if known:
        for entry in known:
            entry.owner.outdated = True
        return
    for parameter in parameters:
        _check(parameter)
    _all.add(AllGather(model, parameters))
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_stepped))


def _stepped(*_: Any) -> None:
    for gather in list(_all):
        gather.outdated = True


def _check(parameter: compat.ShardedParameter) -> None:
    fixes = {
        "is offloaded to the CPU": (parameter.on_cpu, "fully_shard without CPUOffloadPolicy"),
        "has an all-gather extension already": (parameter.extended, "leave one of the two out"),
        "is resharded to fewer ranks after forward": (parameter.partly_resharded, "take reshard_after_forward=True or False"),
    }
    for what, (found, fix) in fixes.items():
        if found:
            raise ShardingError(f"fp8_all_gather: {parameter.name} {what}: {fix}")


def _objection(parameter: compat.ShardedParameter) -> str:
    """Why a parameter can never be gathered in FP8."""
    if parameter.is_tensor_parallel:
        return "a tensor-parallel parameter"
    if parameter.is_replicated:
        return "not sharded"
    if parameter.shard.dim() != 2:
        return "not a matrix"
    if not parameter.shard.is_floating_point() or parameter.shard.element_size() > 4:
        return f"dtype {_name(parameter.shard.dtype)}"
    return "tied: another module has it, too" if parameter.tied else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class AllGather:
    """What is gathered for one model: hears from FSDP2 when a forward begins."""

    def __init__(self, model: nn.Module, parameters: Sequence[compat.ShardedParameter]):
        self.entries = [Gathered(parameter, self, _objection(parameter)) for parameter in parameters]
        self.possible = [entry for entry in self.entries if not entry.objection]
        groups: dict[int, list[Gathered]] = {}
        for entry in self.possible:
            groups.setdefault(id(entry.parameter.process_group), []).append(entry)
        self.scales = [_Scales(entries) for entries in groups.values()]
        self.outdated, self.evaluates, self.agreed = True, False, 0
        for entry in self.entries:
            record_of(entry.parameter.sharded).gathered = entry
        self.install()
        for module in {id(entry.parameter.module): entry.parameter.module for entry in self.possible}.values():
            module.register_load_state_dict_post_hook(_Loaded(self))
        compat.listen(model, self)

    def install(self) -> None:
        """Hang the hooks on the tensors of the shards, where they are not: new tensors have none."""
        for scales in self.scales:
            for i, entry in enumerate(scales.entries):
                if not entry.parameter.installed:
                    entry.parameter.install(partial(scales.prepare, i), partial(scales.finish, i))
                    record_of(entry.parameter.sharded).gathered = entry
                    self.outdated = True

    def begin(self, evaluates: bool) -> None:
        self.evaluates = evaluates
        self.install()
        if self.outdated and not evaluates:
            self.agreed += 1
            for scales in self.scales:
                scales.refresh(self.agreed)
            if self.agreed == EARLY:
                self.tell()
            self.outdated = False

    def tell(self) -> None:
        """Once, what became of it."""
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


class _Loaded:
    """A hook behind `load_state_dict`. An object, since a bound method would keep the model alive."""

    def __init__(self, owner: AllGather):
        self.owner = weakref.ref(owner)

    def __call__(self, *_: Any) -> None:
        owner = self.owner()
        if owner is not None:
            owner.outdated = True


class _Scales:
    """Of the weights that one group of ranks gathers, by their position in `entries`."""

    def __init__(self, entries: list[Gathered]):
        self.entries = entries
        self.scale: Tensor | None = None  # [n]
        self.inverse: Tensor | None = None  # [n, COLUMNS]; graphs read it, so it stays where it is
        self.pending: tuple[Tensor, Any] | None = None  # codes of the last agreement on their way to the host, their event

    def refresh(self, agreement: int) -> None:
        """Scales of current amaxes, and which weights are gathered in FP8: the same on all ranks."""
        self.settle()
        entries = self.entries
        codes = [entry.own_code for entry in entries]
        wanted = [i for i, entry in enumerate(entries) if entry.code or codes[i]]
        device = entries[0].parameter.shard.device
        vector = torch.zeros(3, len(entries), dtype=torch.float32, device=device)
        vector[1:] = torch.tensor([codes, [-code for code in codes]], dtype=torch.float32)
        if wanted:
            amaxes = torch._foreach_norm([entries[i].parameter.shard.detach() for i in wanted], float("inf"))
            # rounding keeps the order: the amax of the cast weight is the cast amax
            cast = [amax.to(entries[i].parameter.dtype).float() for i, amax in zip(wanted, amaxes, strict=True)]
            vector[0, wanted] = torch.stack(cast)
        dist.all_reduce(vector, dist.ReduceOp.MAX, entries[0].parameter.process_group)
        host = torch.empty(2, len(entries), pin_memory=device.type == "cuda").copy_(vector[1:], non_blocking=True)
        event = torch.cuda.Event() if device.type == "cuda" else None
        if event is not None:
            event.record()
        self.pending = host, event
        if agreement <= EARLY:
            self.settle()
        self.write(vector[0])

    def settle(self) -> None:
        """What the ranks have agreed on holds from here on."""
        if self.pending is None or any(entry.parameter.accumulates for entry in self.entries):
            return  # a gradient that is not reduced yet is one of the parameter that is in use
        (highest, lowest), event = self.pending
        if event is not None:
            event.synchronize()
        for entry, high, low in zip(self.entries, highest.tolist(), lowest.tolist(), strict=True):
            entry.code = int(high) if high == -low else 0
        self.pending = None

    def write(self, amaxes: Tensor) -> None:
        """The scales of all weights."""
        settings = [_settings(max(entry.code, 1)) for entry in self.entries]
        reach = torch.tensor([_format(fnuz).max / 2.0**margin for fnuz, _, margin in settings], dtype=torch.float64)
        scale = scale_to(amaxes, reach.to(amaxes.device))
        powers = torch.tensor([power_of_2 for _, power_of_2, _ in settings]).to(amaxes.device)
        scale = torch.where(powers, to_power_of_2(scale), scale)
        if self.scale is None or self.inverse is None:
            self.scale, self.inverse = torch.empty_like(scale), scale.new_empty(len(scale), COLUMNS)
        with torch.no_grad(), compat.no_versions(self.scale, self.inverse):
            self.scale.copy_(scale)
            self.inverse.copy_(inverse_of(scale).unsqueeze(1).expand(-1, COLUMNS))

    def prepare(self, i: int) -> Tensor:
        """What this rank sends for weight i."""
        entry, parameter = self.entries[i], self.entries[i].parameter
        value = parameter.shard.detach().to(parameter.dtype)
        code = 0 if parameter.evaluates else entry.code
        parameter.use(str(code))
        if not code:
            return value
        form = _format(_settings(code)[0])
        assert self.scale is not None
        return ops.quantize(value, self.scale[i : i + 1], form.dtype, form.max, False).view(torch.uint8)

    def finish(self, i: int, gathered: Tensor) -> Tensor:
        """The weight of what arrives, which is all in memory that FSDP2 frees and fills again."""
        entry, parameter = self.entries[i], self.entries[i].parameter
        if not parameter.kind or parameter.kind == "0":
            return gathered
        assert self.inverse is not None
        data = gathered.view(_format(_settings(int(parameter.kind))[0]).dtype)
        return GatheredWeight(data, self.inverse[i, :1], parameter.dtype, entry.read)


def _settings(code: int) -> tuple[bool, bool, int]:
    """(fnuz, power of 2, margin) of a code that is not 0."""
    return bool((code - 1) & 1), bool((code - 1) & 2), (code - 1) // 4


def _format(fnuz: bool) -> Any:
    return pick(False, fnuz)


# --- what graphs say, and what is reported ----------------------------------------------------------


def asked(tensors: Sequence[Any]) -> dict[int, str]:
    """Which inputs of a graph are weights that may be gathered in FP8, with their names."""
    if not _all:
        return {}
    share_records(tensors)
    known = [find(x).gathered if isinstance(x, nn.Parameter) else None for x in tensors]
    return {i: plain(entry.parameter.name) for i, entry in enumerate(known) if entry is not None and not entry.objection}


def of_graph(
    found: Mapping[int, Gatherable], sharded: Mapping[int, str], phases: bool, complain: Callable[[str], None]
) -> dict[int, Gatherable]:
    """What a graph says of the weights that it was `asked` about. `phases`: the policy has a schedule. Raises ShardingError for
    a recipe that the FP8 all-gather does not know."""
    said = {i: verdict for i, verdict in found.items() if i in sharded}
    for i, verdict in said.items():
        if verdict.refused:
            fix = 'take recipe "tensorwise", or "delayed" with options={"current_scaling": (False, True, False)}'
            raise ShardingError(f"fp8_all_gather: {sharded[i]} cannot be gathered in FP8: {verdict.reason}; {fix}")
        if verdict.shared:
            complain(f"fp8_all_gather: {sharded[i]} is gathered in high precision: beside FP8 matmuls, it is {verdict.reason}")
        if phases and not verdict.reason:
            said[i] = Gatherable("the policy has a schedule, with phases in high precision")
    return said


class Gathers:
    """What one graph says of the weights that it reads, by input."""

    def __init__(self, found: Mapping[int, Gatherable], strict: bool):
        self.found, self.strict = found, strict

    def learn(self, args: Sequence[Any], record: int | None) -> None:
        """The first call with these weights."""
        for i, verdict in self.found.items():
            entry = find(args[i]).gathered
            if entry is not None:
                entry.learn(verdict, self.strict)
        gathered = [args[i] for i in self.found if isinstance(args[i], GatheredWeight)]
        if gathered and record is not None:
            LEDGER.supersede(record, [x for x in args if isinstance(x, nn.Parameter)])


def forget() -> None:
    """Graphs are gone, and what they have said with them."""
    for gather in list(_all):
        for entry in gather.entries:
            entry.verdict = None


def gather_records(tensors: Iterable[Any]) -> list[GatherRecord]:
    """What is gathered for each of these parameters, where `fp8_all_gather` was asked for."""
    entries = {id(entry): entry for tensor in tensors if (entry := find(tensor).gathered) is not None}
    return [
        GatherRecord(
            parameter=plain(entry.parameter.name),
            gathered=FP8 if entry.code else HIGH_PRECISION,
            dtype=_format(_settings(entry.code)[0]).name if entry.code else _name(entry.parameter.dtype),
            reason="" if entry.code else entry.reason,
            matrix=entry.parameter.shard.dim() == 2,
        )
        for entry in entries.values()
    ]
