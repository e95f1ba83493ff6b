"""`fp8compile.load_fp8(model, "dir")`: a released FP8 checkpoint into a vanilla model, its bytes as they are.

    up.weight            float8_e4m3fn [out, in]  ->  `FrozenWeight`, which looks like a parameter
    up.weight_scale_inv  [out / 128, in / 128], rounded up, [out, 1] or one number; also called weight_scale
    everything else                               ->  parameters and buffers, as with load_state_dict

A stored scale multiplies the FP8 values, whatever it is called. Graphs get it in float32; `export` writes it
as it came.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ...codegen.scaled_mm_kind import SQUARE
from ...config.recipe import ROW, WHOLE
from ...ir import ops
from ...ir.frozen import FrozenWeight
from ...logs import get_logger
from ...runtime.held import StackPart, held_in, hold, release
from ...runtime.named_weights import unwrapped
from .contents import Contents, Place, Stack, WeightScales, at, contents_of
from .files import tensors

logger = get_logger(__name__)

KINDS = {SQUARE: "128 x 128", ROW: "a row", WHOLE: "a tensor"}


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


def load_fp8(
    model: nn.Module,
    path: str | os.PathLike[str],
    device: torch.device | str | None = None,
    stacks: Mapping[str, Stack] | None = None,
    unread: Iterable[str] = (),
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

    `stacks`: experts. A parameter ``[E, out, in]`` whose matrices are separate tensors in the checkpoint, by
    its name in the model: ``Stack([["experts.0.gate.weight", "experts.0.up.weight"], ..])`` has for each
    expert the tensors whose rows stand below each other. Stacks can be held with scales of 128 x 128
    elements, which have to divide the sides of each tensor. `unread`: patterns (`re.search`) of names in the
    checkpoint that the model has no use for.

    Before `fully_shard`, which leaves each rank its rows of these bytes, and gathers bytes and scales;
    `ignored_params=fp8_parameters(model)` leaves these weights whole on each rank.

    Returns a `Loaded`. Raises LoadError (a ValueError) for a checkpoint that cannot be read or does not fit,
    before anything is changed; ImportError without safetensors; TypeError for no module."""
    model = unwrapped(model)
    contents = contents_of(model, path, stacks or {}, unread)
    _read(contents, torch.device(device or "cpu"))
    held = contents.held()
    layers = {name.removesuffix(".weight"): KINDS[block] for name, block in held.items()}
    size = sum(at(contents.places[name][0]).nbytes for name in held)
    others = len(contents.spots) - len(contents.scales)
    made = Loaded(Path(path), layers, others, contents.unread, size)
    logger.info("fp8: loaded %s", made)
    return made


def fp8_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of a model that are held in FP8 only, or shards of such. For `fully_shard(..,
    ignored_params=..)`, which leaves them whole on each rank."""
    return {x for x in unwrapped(model).parameters() if held_in(x) is not None}


@torch.no_grad()
def _read(contents: Contents, device: torch.device) -> None:
    stacks = {name: _Stacking(contents, name, device) for name in contents.parts}
    for name, tensor in tensors({name: contents.entries[name] for name in contents.spots}):
        spot, scales = contents.spots[name], contents.scales.get(name)
        places = contents.places[spot.name]
        was = at(places[0])
        where = device if was.is_meta else was.device
        if spot.part is not None:
            stacks[spot.name].add(spot.part, tensor, scales)
        elif scales is not None:
            inverse = scales.inverse.to(where)
            held = tensor.to(where, copy=True)  # on a CPU it would be the file, which somebody may overwrite
            made = FrozenWeight(held, inverse, was.dtype, scales.block, stored=scales.stored)
            for module, last in places:
                hold(module, last, made)
        elif was.is_meta or isinstance(was, FrozenWeight):
            _put(places, tensor.to(where, copy=True))
        else:
            was.copy_(tensor)


class _Stacking:
    """A stack of matrices, whose parts come one after another, in any order."""

    def __init__(self, contents: Contents, name: str, device: torch.device):
        self.places, self.parts = contents.places[name], contents.parts[name]
        self.left = len(self.parts)
        was = at(self.places[0])
        self.device = device if was.is_meta else was.device
        self.data: Tensor | None = None
        self.inverse: Tensor | None = None

    def add(self, part: StackPart, tensor: Tensor, scales: WeightScales | None) -> None:
        """Put a part into its place; with the last one, the stack into the model."""
        was = at(self.places[0])
        in_place = scales is None and not was.is_meta and not isinstance(was, FrozenWeight)
        if self.data is None:
            self.data = was if in_place else torch.empty(was.shape, dtype=tensor.dtype, device=self.device)
        part.of(self.data).copy_(tensor)
        if scales is not None:
            if self.inverse is None:
                blocks = [was.shape[0], *map(ops.blocks, was.shape[1:], SQUARE)]
                self.inverse = torch.empty(blocks, dtype=torch.float32, device=self.device)
            part.of(self.inverse, SQUARE.rows).copy_(scales.inverse)
        self.left -= 1
        if self.left or in_place:
            return
        if scales is None or self.inverse is None:
            _put(self.places, self.data)
            return
        made = FrozenWeight(self.data, self.inverse, was.dtype, SQUARE, stored=scales.stored)
        for module, last in self.places:
            hold(module, last, made, parts=self.parts)


def _put(places: Iterable[Place], tensor: Tensor) -> None:
    """New memory: for what was on the meta device, or held in FP8 by an earlier load."""
    made: nn.Parameter | None = None
    for module, name in places:
        if name in module._buffers:
            module._buffers[name] = tensor
            continue
        made = made if made is not None else nn.Parameter(tensor, at((module, name)).requires_grad)
        release(module, name, made)
