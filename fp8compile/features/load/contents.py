"""What of a checkpoint goes where, and all checks: nothing is changed here.

up.weight, up.weight_scale_inv      ->  one parameter, with its scales
experts.0.up.weight, experts.1. ..  ->  the matrices of one parameter (`Stack`)
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...codegen.scaled_mm_kind import SQUARE
from ...config.recipe import ROW, WHOLE, Block
from ...errors import LoadError, at_most
from ...frontend.inputs import plain
from ...ir import ops
from ...ir.frozen import Stored
from ...runtime.held import StackPart
from .files import Entry, entries, tensors

FP8, WEIGHT = "F8_E4M3", "weight"
SCALES = ("scale_inv", "scale")
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E8M0": torch.float8_e8m0fnu}
UNREAD = r"(^|\.)input_scale$"  # static scales of inputs: recipes scale inputs themselves
Place = tuple[nn.Module, str]


@dataclass(frozen=True)
class Stack:
    """Where the matrices of a stack of weights ``[E, out, in]`` are in a checkpoint: for each of them the
    names of the tensors ``[.., in]`` whose rows stand below each other in it. `transposed`: the stack is
    ``[E, in, out]``."""

    names: Sequence[Sequence[str]]
    transposed: bool = False


class Spot(NamedTuple):
    """Where a tensor of the checkpoint goes: the name of a tensor of the model, and the part of a stack."""

    name: str
    part: StackPart | None = None


class WeightScales(NamedTuple):
    """The scales of a weight in float32, what they are in the file, and the elements that share one."""

    inverse: Tensor
    stored: Stored
    block: Block


@dataclass
class Contents:
    """What is to be done. By name in the model: places in modules, and the parts of stacks. By name in the
    checkpoint: entries, their spots, and the scales of weights in FP8."""

    places: dict[str, list[Place]]
    entries: dict[str, Entry]
    parts: dict[str, tuple[StackPart, ...]] = field(default_factory=dict)
    spots: dict[str, Spot] = field(default_factory=dict)
    scales: dict[str, WeightScales] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    def held(self) -> dict[str, Block]:
        """The tensors of the model that are held in FP8, and the elements that share a scale."""
        return {self.spots[name].name: scales.block for name, scales in self.scales.items()}


def contents_of(
    model: nn.Module, path: str | os.PathLike[str], stacks: Mapping[str, Stack], unread: Iterable[str] = ()
) -> Contents:
    """`stacks`: by name in the model; those that the checkpoint has under this name are left out. `unread`:
    patterns of names in the checkpoint that the model has no use for. LoadError for what does not fit."""
    found = entries(path)
    contents = Contents(_places(model), found)
    if not any(entry.dtype == FP8 for entry in found.values()):
        raise LoadError(f"{path}: no tensor is in FP8 ({FP8}): load it with model.load_state_dict")
    for name, stack in stacks.items():
        if name not in found:
            made = contents.parts[name] = tuple(_parts(path, name, stack, contents))
            contents.spots.update({part.name: Spot(name, part) for part in made})
    scale_of = {name: _scale_of(name, found) for name, x in found.items() if x.dtype == FP8}
    used, ignored = {*scale_of.values()}, re.compile("|".join((UNREAD, *unread)))
    contents.unread = tuple(name for name in found if name not in contents.spots and ignored.search(name))
    for name, entry in found.items():
        if name in used or name in contents.unread:
            continue
        if entry.dtype.startswith("F8") and entry.dtype != FP8:
            raise LoadError(f"{entry.file}: {name} is {entry.dtype}; {FP8} can be held")
        if name.endswith(tuple(f"{WEIGHT}_{last}" for last in SCALES)):
            raise LoadError(f"{entry.file}: {name} is the scale of a weight that is not in FP8")
        _check_place(name, entry, contents.spots.setdefault(name, Spot(name)), contents)
    _check_missing(model, path, contents)
    values = dict(tensors({scale: found[scale] for scale in used}))
    for name, scale in scale_of.items():
        if name not in contents.unread:
            contents.scales[name] = _scales(name, found[name], scale, found[scale], values[scale])
            if contents.spots[name].part is not None or len(found[name].shape) == 3:
                _check_blocks(name, found[name], contents.scales[name])
    return contents


def _places(model: nn.Module) -> dict[str, list[Place]]:
    """Where each tensor of the state dict is: of tied ones, all places under each name."""
    by_name: dict[str, Place] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        kept = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        for name in (*module._parameters, *kept):
            if at((module, name)) is not None:
                by_name[plain(f"{prefix}.{name}".lstrip("."))] = module, name
    same: dict[int, list[Place]] = {}
    for place in by_name.values():
        places = same.setdefault(id(at(place)), [])
        if not any(other[0] is place[0] and other[1] == place[1] for other in places):
            places.append(place)
    return {name: same[id(at(place))] for name, place in by_name.items()}


def at(place: Place) -> Any:
    module, name = place
    return module._parameters[name] if name in module._parameters else module._buffers[name]


def _parts(path: Any, name: str, stack: Stack, contents: Contents) -> Iterator[StackPart]:
    """The parts of a stack of the model, matrix by matrix."""
    if name not in contents.places:
        raise LoadError(f"{path}: stacks names {name}, which the model has not")
    shape = tuple(at(contents.places[name][0]).shape)
    if len(shape) != 3 or len(stack.names) != shape[0]:
        what = f"stacks has {len(stack.names)} matrices for {name}, which is {list(shape)}"
        raise LoadError(f"{path}: {what}")
    rows, columns = shape[:0:-1] if stack.transposed else shape[1:]
    first: Entry | None = None
    for matrix, parts in enumerate(stack.names):
        row = 0
        for part in parts:
            if part not in contents.entries:
                raise LoadError(f"{path}: it does not have {part}, which is a part of {name}")
            entry = contents.entries[part]
            first = first or entry
            if len(entry.shape) != 2 or entry.shape[1] != columns:
                what = f"{part} is {list(entry.shape)}, and a part of {name}"
                raise LoadError(f"{entry.file}: {what}, whose matrices are {[rows, columns]}")
            if entry.dtype != first.dtype:
                raise LoadError(f"{entry.file}: {part} is {entry.dtype}, unlike other parts of {name}")
            yield StackPart(part, matrix, row, entry.shape[0], stack.transposed)
            row += entry.shape[0]
        if row != rows:
            raise LoadError(f"{path}: the parts of {name} have {row} rows for matrix {matrix}, not {rows}")


def _scale_of(name: str, found: Mapping[str, Entry]) -> str:
    """The name of the scale of a weight in FP8."""
    names = [f"{name}_{last}" for last in SCALES]
    scale = next((x for x in names if x in found), None)
    if scale is None:
        raise LoadError(f"{found[name].file}: {name} is in FP8 without a scale ({' or '.join(names)})")
    return scale


def _check_place(name: str, entry: Entry, spot: Spot, contents: Contents) -> None:
    if spot.name not in contents.places:
        raise LoadError(f"{entry.file}: the model has no {name}")
    places = contents.places[spot.name]
    tensor = at(places[0])
    if hasattr(tensor, "placements"):
        raise LoadError(f"{entry.file}: {spot.name} is a DTensor: call load_fp8 before fully_shard")
    if spot.part is None and tuple(tensor.shape) != entry.shape:
        raise LoadError(f"{entry.file}: {name} is {list(entry.shape)}, and {list(tensor.shape)} in the model")
    if entry.dtype != FP8:
        return
    for module, last in places:
        linear = isinstance(module, nn.Linear) and last == WEIGHT
        if not linear and not (isinstance(tensor, nn.Parameter) and tensor.dim() == 3):
            what = f"{entry.file}: {name} is in FP8, and in the model that of a {type(module).__name__}"
            raise LoadError(f"{what}: only weights of Linears and stacks of experts can be held")
        if not tensor.is_floating_point():
            raise LoadError(f"{entry.file}: {name} is {tensor.dtype} in the model: it has to be of floats")


def _check_missing(model: nn.Module, path: Any, contents: Contents) -> None:
    filled = {id(at(contents.places[spot.name][0])) for spot in contents.spots.values()}
    missing = [name for name, places in contents.places.items() if id(at(places[0])) not in filled]
    if missing:
        raise LoadError(f"{path}: it does not have {', '.join(at_most(3, missing))}")
    known = {id(at(place)) for places in contents.places.values() for place in places}
    empty = [name for name, x in model.named_buffers() if x.is_meta and id(x) not in known]
    if empty:
        what = f"{', '.join(at_most(3, empty))} is on the meta device, and no part of a checkpoint"
        raise LoadError(f"{what}: build the model with such buffers on a device")


def _scales(name: str, entry: Entry, called: str, own: Entry, scale: Tensor) -> WeightScales:
    """What is read of the `scale` of a weight. `called`, `own`: its name and its entry."""
    if own.dtype not in STORED:
        raise LoadError(f"{own.file}: the scale of {name} is {own.dtype}; {', '.join(STORED)} can be read")
    shape, (*stack, rows, columns) = tuple(scale.shape), entry.shape
    if shape == (*stack, *map(ops.blocks, (rows, columns), SQUARE)):
        block = SQUARE
    elif scale.numel() == 1:
        block = WHOLE
    elif shape in ((rows,), (rows, 1)):
        block = ROW
    else:
        what = f"{own.file}: scales of {name} are {list(shape)} for {list(entry.shape)}"
        raise LoadError(f"{what}; one scale, one a row, or one for each 128 x 128 elements, can be held")
    wide = scale.to(torch.float32)
    if not bool((wide.isfinite() & (wide > 0)).all()):
        raise LoadError(f"{own.file}: a scale of {name} is not above zero, or not finite")
    wide = wide.reshape({WHOLE: (1,), ROW: (-1, 1)}.get(block, shape))
    return WeightScales(wide, Stored(STORED[own.dtype], called.rpartition(".")[2], own.shape), block)


def _check_blocks(name: str, entry: Entry, scales: WeightScales) -> None:
    """Of experts: blocks that begin where a matrix, or a part of it, does."""
    if scales.block != SQUARE or any(size % 128 for size in entry.shape[-2:]):
        what = f"{entry.file}: {name} is a part of a stack, and {list(entry.shape)}"
        raise LoadError(
            f"{what}: stacks can be held with scales of 128 x 128 elements, which divide their sides"
        )
