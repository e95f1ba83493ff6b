"""Frozen weights that are kept in FP8 only, with `frozen="fp8"`: about 1 byte a parameter.

The first training graph that reads a frozen weight says whether nothing but FP8 matmuls reads it, which cast
it alike (`passes.gathered`). Such a weight becomes an `ir.frozen.FrozenWeight`: a parameter of the same
module, with the same name, shape and dtype. Then Dynamo traces the forward again, and the graph reads the FP8
values themselves. So the first step reads them already, and nothing is compiled twice. Plain parameters that
stand there later (restored, or loaded with `assign`) are cast when the next training call begins, before
Dynamo sees them: nothing is compiled again.

Where blocks are compiled one by one, one piece of code serves all blocks of a class. So what the graph of one
block says holds for the same parameters of the others that are compiled so.

A weight stays as it is, with the reason in the report, if it is tied, sharded, in no module of the model that
is compiled, or read by anything but FP8 matmuls. `state_dict()` gives plain tensors, `load_state_dict` casts
what it loads, `restore_frozen_weights` gives plain parameters back.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import compat, process
from ...compilation import Job
from ...config.recipe import WHOLE, Block
from ...devices.formats import pick
from ...errors import Fp8CompileError, OptionError, Retrace
from ...extension import GraphFeature
from ...frontend.inputs import plain
from ...ir import ops
from ...ir.frozen import FrozenWeight, cast
from ...ir.fx_utils import FLOATS
from ...ir.records import Gatherable, GraphReport, TableRecord
from ...logs import get_logger, say_once
from ...passes.joint import Joint, Rewritten
from ...reporting.record_tables import megabytes, sizes
from ...runtime import held
from ...runtime.named_weights import unwrapped

logger = get_logger(__name__)

SHARDED = "sharded by FSDP"
CUT = "DDP has cut the graph (torch._dynamo.config.optimize_ddp = False keeps it whole)"


class Place(NamedTuple):
    """Where a parameter is that is kept in FP8 only, and its `form`. `root`: see `Home`; `kind`: its shape,
    dtype and device; `of`: the graph's name."""

    module: weakref.ref[nn.Module]
    name: str
    root: weakref.ref[nn.Module]
    kind: tuple[torch.Size, torch.dtype, torch.device]
    form: Gatherable
    of: str

    def is_plain(self) -> bool:
        """True if there is a plain parameter again that is to be kept in FP8 only."""
        module, root = self.module(), self.root()
        parameter = module._parameters.get(self.name) if module is not None else None
        if type(parameter) is not nn.Parameter or parameter.requires_grad or root is None:
            return False
        return root.training and _kind(parameter) == self.kind


class Places(dict[tuple[weakref.ref[nn.Module], str], Place]):
    """The places of which graphs know, that one `torch.compile` has compiled. Called when a call begins."""

    def __call__(self) -> Callable[[], None]:
        if torch.is_grad_enabled() and not process.is_set_aside():
            if plain := [place for place in self.values() if place.is_plain()]:
                _keep(plain)
        return lambda: None  # there is nothing to do after the call

    def __reduce__(self) -> Any:  # a copy of what was compiled compiles anew
        return type(self), ()


class Unwritten(dict[torch.device, Tensor]):
    """In a try (`process.set_aside`) nothing is cast: the memory that all weights share, by device."""


class Home(NamedTuple):
    """Where a parameter is: `module._parameters[name]`. `root` is the module whose forward the graph is,
    `whole` the outermost one around it that is being called."""

    module: nn.Module
    name: str
    root: nn.Module
    whole: nn.Module


@dataclass(frozen=True)
class FrozenRecord(TableRecord):
    """A matrix that does not train. The bytes are those in memory, `before` without the option. `reason`: why
    it is kept in high precision, "" if it is kept in FP8 only. `sharded`: FSDP2 gathers these bytes, of which
    each rank keeps its rows."""

    key, titles, sides = "frozen", ("frozen weight", "bytes", "kept", "why"), "<>><"

    parameter: str
    before: int
    bytes: int
    reason: str = ""
    sharded: bool = field(default=False, repr=False)

    @classmethod
    def cells(cls, alike: Sequence[FrozenRecord]) -> tuple[str, ...]:
        kept = "fp8 only, in shards" if alike[0].sharded else "fp8 only"
        return (*sizes(alike), alike[0].reason or kept)

    @classmethod
    def brief(cls, records: Sequence[FrozenRecord]) -> str:
        """ "frozen weights in FP8 only: 224 of 225, 6,980 MB instead of 13,960"."""
        stored = [record for record in records if not record.reason]
        shards = ", in shards, gathered in FP8" if any(record.sharded for record in stored) else ""
        return f"frozen weights in FP8 only: {len(stored)} of {len(records)}, {megabytes(stored)}{shards}"


class FrozenMatrix(NamedTuple):
    """A frozen matrix. `block`: its scales', if it is kept in FP8 only. `before`: its bytes without that.
    `rounded`: it was cast here, and is not that of an FP8 checkpoint. `sharded`: by FSDP2."""

    before: int
    bytes: int
    block: Block | None
    rounded: bool = False
    sharded: bool = False


class FrozenInGraph(GraphFeature):
    """The frozen `matrices` among the inputs of a graph. `refused`: why some may not be kept in FP8 only;
    `homes`: where those live that may. `asked`: some rule asks for it."""

    def __init__(self, matrices: Mapping[int, FrozenMatrix], asked: bool):
        self.matrices, self.asked, self.warm = matrices, asked, not asked
        self.refused: dict[int, str] = {}
        self.homes: dict[int, Home] = {}
        self.freezable: frozenset[int] = frozenset()  # those that have had a home
        self.given: Sequence[Any] = ()

    @property
    def stored(self) -> frozenset[int]:
        """Those that are kept in FP8 only."""
        return frozenset(i for i, matrix in self.matrices.items() if matrix.block is not None)

    def before(self, job: Job, joint: Joint) -> None:
        self.freezable |= self.homes.keys()
        self.given, joint.freezable = job.given, self.freezable
        joint.extras.put(self)

    def after(self, job: Job, done: Rewritten) -> None:
        """Warn of a training graph that reads a weight that is kept in FP8 only otherwise than it was cast,
        and where the way of training leaves the option without effect."""
        self.homes, self.given = {}, ()  # this lives as long as compiled code, and keeps no module, no tensor
        names, warn = job.inputs.names, job.options.warn
        for reason in sorted({SHARDED, CUT} & {*self.refused.values()}):
            warn(f"frozen='fp8' has no effect on weights of {job.inputs.root}: {reason}")
        for i in sorted(i for i in self.stored & done.gatherable.keys() if self.matrices[i].rounded):
            if reason := done.gatherable[i].reason:
                what = f"{names[i]} is kept in FP8 only (frozen='fp8'), and here {reason}"
                fix = "A rule with frozen = 'high_precision' keeps all of them"
                warn(f"{what}: it has FP8-rounded values. {fix}")

    def report(self, job: Job, report: GraphReport, done: Rewritten) -> GraphReport:
        """What is said of a graph's frozen matrices, where some are kept in FP8 only, or were asked to be."""
        found = []
        for i, matrix in self.matrices.items():
            verdict = done.gatherable.get(i)
            reason = self.refused.get(i) or (verdict.reason if verdict is not None else "")
            if matrix.block is not None:
                record = FrozenRecord(job.inputs.names[i], matrix.before, matrix.bytes, "", matrix.sharded)
                found.append(record)
            elif self.asked and reason:
                found.append(FrozenRecord(job.inputs.names[i], matrix.before, matrix.bytes, reason))
        stored = sum(not record.reason for record in found)
        if report.note and job.options.policy.eval != "fp8" and stored:  # an evaluation in high precision
            report = replace(report, note=f"{report.note}; {stored} frozen weights have FP8-rounded values")
        return report.plus(found)


def frozen_in(job: Job) -> FrozenInGraph:
    """To be asked within the backend. What the graph says of these weights is not known yet."""
    gm, given, inputs = job.gm, job.given, job.inputs
    asked = job.learns and job.only is None and any(x.frozen == "fp8" for x in job.options.policy.possible)
    held = compat.flat.owners(given, inputs.packed)  # FSDP1's views require gradients if any of theirs does
    matrices = [
        i for i in sorted(inputs.parameters) if given[i].dim() == 2 or isinstance(given[i], FrozenWeight)
    ]
    frozen = [i for i in matrices if not held[i].requires_grad]
    sharded = {id(read): own for own, read in compat.fsdp.sharded_pairs()}
    found = FrozenInGraph({i: _matrix(given[i], sharded.get(id(given[i]))) for i in frozen}, asked)
    if not asked:
        return found
    roots = compat.dynamo.root_modules(gm, inputs.packed)
    homes: dict[tuple[nn.Module, int], list[tuple[Home, str]]] = defaultdict(list)  # of a root's parameters
    for root in dict.fromkeys(root for root, _ in roots.values()):
        whole = compat.dynamo.outermost(root)
        for path, module in whole.named_modules():
            for name, parameter in module._parameters.items():
                home = Home(module, name, root, whole), plain(f"{path}.{name}".lstrip("."))
                homes[root, id(parameter)].append(home)
    cut = compat.split.uncut(gm) is not None
    for i in (i for i, matrix in found.matrices.items() if matrix.block is None):
        parameter = given[i]
        owned = homes[roots[i][0], id(parameter)] if i in roots else []
        if id(parameter) in sharded or i in inputs.packed:
            found.refused[i] = SHARDED
        elif cut:
            found.refused[i] = CUT
        elif type(parameter) is not nn.Parameter:
            found.refused[i] = f"of another type: {type(parameter).__name__}"
        elif parameter.dtype not in FLOATS:
            found.refused[i] = f"dtype {str(parameter.dtype).removeprefix('torch.')}"
        elif not owned:
            found.refused[i] = "no module of the compiled model has it"
        elif len(owned) > 1:
            found.refused[i] = f"tied: {' and '.join(name for _, name in owned)}"
        else:
            found.homes[i] = owned[0][0]
    return found


def freeze(joint: Joint) -> int:
    """Stop where the graph reads weights that can be kept in FP8 only, and are asked to be so by each matmul
    that reads them: they become so, and the graph is traced again."""
    known = joint.extras.get(FrozenInGraph)
    if known is None:
        return 0
    asked: dict[int | None, bool] = {}
    for matmul in joint.matmuls:
        index = compat.dynamo.input_index(matmul.parameter) if matmul.parameter is not None else None
        asked[index] = asked.get(index, True) and matmul.recipe.frozen == "fp8"
    may = {i: x for i, x in joint.gatherable.items() if i in known.homes and not x.reason}
    found = {i: x for i, x in may.items() if asked.get(i, False)}
    for (_, i), verdict in joint.verdicts.items():
        if i in found and verdict != found[i]:
            why = verdict.reason or "cast in another way"
            what = f"'high_precision' for {joint.inputs.names[i]}, multiplied otherwise at some steps"
            raise OptionError.of("frozen", "fp8", f"{what}: {why}")
    if found:
        raise Retrace(partial(_freeze, found, known.homes, known.given, joint.inputs.root))
    return 0


def _matrix(x: Tensor, own: Tensor | None) -> FrozenMatrix:
    """`own`: what this rank has of it, if FSDP2 manages it."""
    block, rounded = (x.block, x.stored is None) if isinstance(x, FrozenWeight) else (None, False)
    sharded = own is not None and compat.fsdp.shard_group(own) is not None
    return FrozenMatrix(x.numel() * x.dtype.itemsize, x.nbytes, block, rounded, sharded)


def _freeze(
    found: Mapping[int, Gatherable], homes: Mapping[int, Home], example_inputs: Sequence[Any], of: str
) -> None:
    """Keep these parameters, and the same ones of modules of the same class, in FP8 only. `example_inputs`:
    those that Dynamo gave. `of`: the name of the graph."""
    compat.dynamo.let_go(example_inputs, found)
    places = [place for i, form in found.items() for place in _places(homes[i], form, of)]
    if not process.is_set_aside() and (known := compat.callbacks.when_called(Places)) is not None:
        known.update({place[:2]: place for place in places})
    _keep(places)


def _keep(places: Sequence[Place]) -> None:
    """Keep these parameters in FP8 only. The memory of each is free before the next one is cast, unless
    somebody else holds it."""
    before = after = held = 0
    for place in places:
        module: Any = place.module()
        old = weakref.ref(module._parameters[place.name])
        was, now = _frozen(module, place.name, place.form)
        before, after = before + was, after + now
        held += was if old() is not None else 0
    if process.is_set_aside():
        return
    said = "state_dict() and all other readers get the FP8-rounded values"
    sizes = f"{after / 1e6:,.4g} MB instead of {before / 1e6:,.4g}"
    if held:
        fix = "an optimizer should get only parameters that train"
        said += f". {held / 1e6:,.4g} MB are not freed: something still holds the old parameters ({fix})"
    text = f"fp8: {places[0].of}: {len(places)} frozen weights are kept in FP8 only, {sizes}: {said}"
    say_once(logger, logging.WARNING, text)


def _places(home: Home, form: Gatherable, of: str) -> list[Place]:
    """Of a parameter, and of those that its root's compiled code reads for modules like it."""
    kind = _kind(home.module._parameters[home.name])
    found = [Place(weakref.ref(home.module), home.name, weakref.ref(home.root), kind, form, of)]
    path = next((path for path, module in home.root.named_modules() if module is home.module), None)
    siblings = [x for x in home.whole.modules() if type(x) is type(home.root) and x is not home.root]
    if path is None or not siblings:
        return found
    by = dict(_compiled_by(home.whole, None))
    counts = Counter(id(other) for module in home.whole.modules() for other in module._parameters.values())
    for sibling in siblings:
        mine, theirs = by[home.root], by[sibling]
        own = (_wraps(mine, home.root), _wraps(theirs, sibling))
        if not (all(own) and type(mine) is type(theirs) if any(own) else mine is theirs is not None):
            continue  # compiled in another way, or not at all
        owner = dict(sibling.named_modules()).get(path)
        if owner is None:
            continue
        other = owner._parameters.get(home.name)
        if type(other) is nn.Parameter and not other.requires_grad and counts[id(other)] == 1:
            if _kind(other) == kind:
                found.append(Place(weakref.ref(owner), home.name, weakref.ref(sibling), kind, form, of))
    return found


def _kind(parameter: Any) -> tuple[torch.Size, torch.dtype, torch.device]:
    return parameter.shape, parameter.dtype, parameter.device


def _compiled_by(module: nn.Module, by: nn.Module | None) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """Each module with the innermost one, itself or around it, that torch.compile has compiled."""
    by = module if compat.autograd.is_compiled_itself(module) else by
    yield module, by
    for child in module.children():
        yield from _compiled_by(child, by)


def _wraps(by: nn.Module | None, module: nn.Module) -> bool:
    """True if a module is compiled by itself: what was compiled (`by`) is the module or wraps just it."""
    return by is module or (by is not None and getattr(by, "_orig_mod", None) is module)


@torch.no_grad()
def _frozen(module: nn.Module, name: str, form: Gatherable) -> tuple[int, int]:
    """Replace one parameter; returns its bytes before and after."""
    parameter: Any = module._parameters[name]
    dtype, how = pick(False, form.fnuz).dtype, (form.block, form.margin, form.power_of_2)
    if process.is_set_aside():
        shape = [1] if form.block == WHOLE else [*map(ops.blocks, parameter.shape, form.block)]
        inv = torch.ones(shape, dtype=torch.float32, device=parameter.device)
        data = _unwritten(parameter, dtype)
    else:
        data, inv = cast(parameter.detach(), dtype, *how)
    held.hold(module, name, FrozenWeight(data, inv, parameter.dtype, *how), process.is_set_aside())
    return parameter.nbytes, data.nbytes + inv.nbytes


def _unwritten(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """An FP8 tensor of a parameter's shape. The longest one so far has memory; the others lie in it."""
    memory, size = process.of(Unwritten), parameter.numel()
    known = memory.get(parameter.device)
    if known is None or known.numel() < size:
        memory[parameter.device] = known = torch.empty(size, dtype=torch.uint8, device=parameter.device)
    return known[:size].view(dtype).view(parameter.shape).detach()


@torch.no_grad()
def restore_frozen_weights(model: nn.Module) -> None:
    """Give the weights of a model that are kept in FP8 only (`frozen="fp8"`) back as plain parameters of
    their own dtype, with the FP8-rounded values. To be called before anything that writes to them or trains
    them: a merge of adapters, `requires_grad_()`, `model.to()` another dtype or device.

    A further training call of a model that was compiled with `frozen="fp8"` keeps what is still frozen in FP8
    only again. Fp8CompileError if `fully_shard` has sharded some; TypeError if `model` is no module."""
    made: dict[int, nn.Parameter] = {}
    for name, weight in unwrapped(model).named_parameters():
        if held.held_in(weight) is not None and not isinstance(weight, FrozenWeight):
            fix = "call restore_frozen_weights before fully_shard"
            raise Fp8CompileError(f"{plain(name)} is a shard of a weight that is kept in FP8 only: {fix}")
    for module in unwrapped(model).modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, FrozenWeight):
                again = nn.Parameter(parameter.dequantized(), requires_grad=False)
                again = made.setdefault(id(parameter), again)
                held.release(module, name, again)
