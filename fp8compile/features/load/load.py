"""`fp8compile.load_fp8(model, "dir")`: a released FP8 checkpoint into a vanilla model, its bytes as they are.

    up.weight            float8_e4m3fn [out, in]  ->  `FrozenWeight`, which looks like a parameter
    up.weight_scale_inv  [out / 128, in / 128], rounded up, [out, 1] or one number; also called weight_scale
    everything else                               ->  parameters and buffers, as with load_state_dict

A stored scale multiplies the FP8 values, whatever it is called. Graphs get it in float32; `export` writes it
in the dtype that it came in.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...codegen.scaled_mm_kind import SQUARE
from ...config.recipe import ROW, WHOLE, Block
from ...errors import LoadError, at_most
from ...frontend.inputs import plain
from ...ir import ops
from ...ir.frozen import FrozenWeight
from ...logs import get_logger
from ...runtime.held import hold, release
from ...runtime.named_weights import unwrapped
from .files import Entry, entries, tensors

logger = get_logger(__name__)

FP8, WEIGHT = "F8_E4M3", "weight"
SCALES = ("weight_scale_inv", "weight_scale")
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E8M0": torch.float8_e8m0fnu}
UNREAD = ("input_scale",)  # static scales of inputs: recipes scale inputs themselves
Place = tuple[nn.Module, str]


@dataclass(frozen=True)
class Loaded:
    """What was read. `layers`: the elements that share a scale, by the name of each layer that is held in
    FP8. `others`: how many tensors are not FP8. `unread`: names of tensors that training has no use for.
    `bytes`: of the weights in FP8 and their scales."""

    directory: Path
    layers: dict[str, str]
    others: int
    unread: tuple[str, ...]
    bytes: int

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} with scales of {x}" for x, count in Counter(self.layers.values()).items())
        held = f"{len(self.layers)} layers held in FP8 ({kinds}), {self.bytes / 1e6:,.4g} MB"
        return f"{self.directory}: {held}; {self.others} other tensors"


class _Scales(NamedTuple):
    """The scales of a weight in float32, their dtype in the file, and the elements that share one."""

    inverse: Tensor
    stored: torch.dtype
    block: Block


@dataclass
class _Plan:
    """What is to be done, after all checks. By name: places in modules, entries, scales of weights in FP8."""

    places: dict[str, list[Place]]
    entries: dict[str, Entry]
    scales: dict[str, _Scales] = field(default_factory=dict)


def load_fp8(
    model: nn.Module, path: str | os.PathLike[str], device: torch.device | str | None = None
) -> Loaded:
    """Load a checkpoint with FP8 weights into a vanilla model, and hold these as they are: float8_e4m3fn
    ``[out, in]`` of Linears, with one scale for a weight, each of its rows, or each 128 x 128 elements. They
    do not train; adapters beside them do. A model that is compiled with `backend="fp8"` multiplies by these
    bytes, whatever its recipe, and the report says so. All other readers get values of the parameter's own
    dtype.

    `path`: a directory with `model.safetensors`, or with several files and their index; or one file. Names
    are those of `model.state_dict()`. Tensors that are not FP8 are copied into their parameters and buffers,
    whose dtype stays. Parameters on the meta device get memory on `device` (None: the CPU), with the dtype of
    the file. One tensor is read at a time.

    Before `fully_shard`: `ignored_params=fp8_parameters(model)` leaves these weights whole on each rank.

    Returns a `Loaded`. Raises LoadError (a ValueError) for a checkpoint that cannot be read or does not fit,
    before anything is changed; ImportError without safetensors; TypeError for no module."""
    model = unwrapped(model)
    plan = _planned(model, path)
    _read(plan, torch.device(device or "cpu"))
    layers = {name.removesuffix(".weight"): KINDS[x.block] for name, x in plan.scales.items()}
    size = sum(_at(plan.places[name][0]).nbytes for name in plan.scales)
    unread = tuple(name for name in plan.entries if name.rpartition(".")[2] in UNREAD)
    others = len(plan.entries) - 2 * len(plan.scales) - len(unread)
    made = Loaded(Path(path), layers, others, unread, size)
    logger.info("fp8: loaded %s", made)
    return made


def fp8_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of a model that are held in FP8 only. For `fully_shard(.., ignored_params=..)`: shards
    of them would be in high precision."""
    return {x for x in unwrapped(model).parameters() if isinstance(x, FrozenWeight)}


KINDS = {SQUARE: "128 x 128", ROW: "a row", WHOLE: "a tensor"}


# -- checks: nothing is changed --


def _planned(model: nn.Module, path: str | os.PathLike[str]) -> _Plan:
    plan = _Plan(_places(model), entries(path))
    if not any(entry.dtype == FP8 for entry in plan.entries.values()):
        raise LoadError(f"{path}: no tensor is in FP8 ({FP8}): load it with model.load_state_dict")
    scale_of = {name: _scale_of(name, plan.entries) for name, x in plan.entries.items() if x.dtype == FP8}
    used = {*scale_of.values()}
    for name, entry in plan.entries.items():
        if name in used or name.rpartition(".")[2] in UNREAD:
            continue
        if entry.dtype.startswith("F8") and entry.dtype != FP8:
            raise LoadError(f"{entry.file}: {name} is {entry.dtype}; {FP8} can be held")
        if name.rpartition(".")[2] in SCALES:
            raise LoadError(f"{entry.file}: {name} is the scale of a weight that is not in FP8")
        _check_place(name, entry, plan.places)
    _check_missing(model, path, plan)
    wanted = {scale: plan.entries[scale] for scale in used}
    values = dict(tensors(wanted))
    for name, scale in scale_of.items():
        plan.scales[name] = _scales(name, plan.entries[name], plan.entries[scale], values[scale])
    return plan


def _places(model: nn.Module) -> dict[str, list[Place]]:
    """Where each tensor of the state dict is: of tied ones, all places under each name."""
    by_name: dict[str, Place] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        kept = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        for name in (*module._parameters, *kept):
            if _at((module, name)) is not None:
                by_name[plain(f"{prefix}.{name}".lstrip("."))] = module, name
    same: dict[int, list[Place]] = {}
    for place in by_name.values():
        places = same.setdefault(id(_at(place)), [])
        if not any(other[0] is place[0] and other[1] == place[1] for other in places):
            places.append(place)
    return {name: same[id(_at(place))] for name, place in by_name.items()}


def _at(place: Place) -> Any:
    module, name = place
    return module._parameters[name] if name in module._parameters else module._buffers[name]


def _scale_of(name: str, found: Mapping[str, Entry]) -> str:
    """The name of the scale of a weight in FP8."""
    stem, _, last = name.rpartition(".")
    names = [f"{stem}.{scale}".lstrip(".") for scale in SCALES]
    scale = next((x for x in names if x in found), None)
    if last != WEIGHT or scale is None:
        raise LoadError(f"{found[name].file}: {name} is in FP8 without a scale ({' or '.join(names)})")
    return scale


def _check_place(name: str, entry: Entry, places: Mapping[str, list[Place]]) -> None:
    if name not in places:
        raise LoadError(f"{entry.file}: the model has no {name}")
    tensor = _at(places[name][0])
    if tuple(tensor.shape) != entry.shape:
        raise LoadError(f"{entry.file}: {name} is {list(entry.shape)}, and {list(tensor.shape)} in the model")
    if entry.dtype != FP8:
        return
    for module, last in places[name]:
        if not isinstance(module, nn.Linear) or last != WEIGHT:
            what = f"{entry.file}: {name} is in FP8, and in the model that of a {type(module).__name__}"
            raise LoadError(f"{what}: only weights of Linears can be held")
        if not tensor.is_floating_point():
            raise LoadError(f"{entry.file}: {name} is {tensor.dtype} in the model: it has to be of floats")


def _check_missing(model: nn.Module, path: Any, plan: _Plan) -> None:
    filled = {id(_at(plan.places[name][0])) for name in plan.entries if name in plan.places}
    missing = [name for name, places in plan.places.items() if id(_at(places[0])) not in filled]
    if missing:
        raise LoadError(f"{path}: it does not have {', '.join(at_most(3, missing))}")
    known = {id(_at(place)) for places in plan.places.values() for place in places}
    empty = [name for name, x in model.named_buffers() if x.is_meta and id(x) not in known]
    if empty:
        what = f"{', '.join(at_most(3, empty))} is on the meta device, and no part of a checkpoint"
        raise LoadError(f"{what}: build the model with such buffers on a device")


def _scales(name: str, entry: Entry, own: Entry, scale: Tensor) -> _Scales:
    """What is read of the `scale` of a weight. `own`: its entry."""
    if own.dtype not in STORED:
        raise LoadError(f"{own.file}: the scale of {name} is {own.dtype}; {', '.join(STORED)} can be read")
    shape = tuple(scale.shape)
    if shape == tuple(map(ops.blocks, entry.shape, SQUARE)):
        block = SQUARE
    elif scale.numel() == 1:
        block = WHOLE
    elif shape in ((entry.shape[0],), (entry.shape[0], 1)):
        block = ROW
    else:
        what = f"{own.file}: scales of {name} are {list(shape)} for {list(entry.shape)}"
        raise LoadError(f"{what}; one scale, one a row, or one for each 128 x 128 elements, can be held")
    wide = scale.to(torch.float32)
    if not bool((wide.isfinite() & (wide > 0)).all()):
        raise LoadError(f"{own.file}: a scale of {name} is not above zero, or not finite")
    wide = wide.reshape({WHOLE: (1,), ROW: (-1, 1)}.get(block, shape))
    return _Scales(wide, STORED[own.dtype], block)


# -- changes --


@torch.no_grad()
def _read(plan: _Plan, device: torch.device) -> None:
    wanted = {name: entry for name, entry in plan.entries.items() if name in plan.places}
    for name, tensor in tensors(wanted):
        places = plan.places[name]
        was = _at(places[0])
        where = device if was.is_meta else was.device
        if name in plan.scales:
            inverse, stored, block = plan.scales[name]
            made = FrozenWeight(tensor.to(where), inverse.to(where), was.dtype, block, stored=stored)
            for module, last in places:
                hold(module, last, made)
        elif was.is_meta or isinstance(was, FrozenWeight):
            _put(places, tensor.to(where))
        else:
            was.copy_(tensor)


def _put(places: Iterable[Place], tensor: Tensor) -> None:
    """New memory: for what was on the meta device, or held in FP8 by an earlier load."""
    made: nn.Parameter | None = None
    for module, name in places:
        if name in module._buffers:
            module._buffers[name] = tensor
            continue
        made = made if made is not None else nn.Parameter(tensor, _at((module, name)).requires_grad)
        release(module, name, made)
