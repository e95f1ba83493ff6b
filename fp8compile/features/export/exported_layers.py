"""Which layers of a model are exported in FP8, and why the others stay as they are; and their FP8 bytes and
scales, by the operators that training casts with.

    weight   = saturate(w * scale), rounded to nearest even, float8_e4m3fn [out, in]
    scale    = 448 / (amax * 2**margin), float32, one a tensor, row or block; see `ir.scale`
    exported: the weight, and 1 / scale, which multiplies the values of the weight: [1], [out, 1],
              [out / 128, in / 128], [out, in / 32] or, for tiles, [out / 32, in / 32], rounded up
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ... import compat
from ...codegen.scaled_mm_kind import LINE, MX_BLOCK, MX_TILE, SQUARE
from ...config.recipe import ROW, WHOLE, Block, Scaling, recipe_holding
from ...devices.formats import E4M3
from ...errors import ExportError
from ...frontend.inputs import plain
from ...ir import ops
from ...ir.frozen import FrozenWeight, Stored
from ...ir.scale import inverse_of, scale_of
from ...runtime.held import StackPart, held_in, parts_of
from ...runtime.held import whole as whole_held
from ...runtime.named_weights import named_weights
from ...runtime.parameters import find
from . import forwards
from .forwards import Forward

Sharded = Mapping[int, tuple[Tensor, torch.dtype]]  # by the id of a parameter: see `_read`
# the blocks of weight and input that some format can say; of a weight that no graph read, the first input
PAIRS = ((WHOLE, WHOLE), (WHOLE, ROW), (ROW, ROW), (SQUARE, LINE), (MX_BLOCK, MX_BLOCK), (MX_TILE, MX_BLOCK))


@dataclass(frozen=True)
class ExportedLayer:
    """A Linear that is exported in FP8, or one matrix of a stack that `load_fp8` holds.

    `parameter`: its name in the model. `tensor`: the name of its weight in the checkpoint. `weight`: the
    parameter ``[out, in]``, of which FSDP2 or tensor parallelism may have left a part here.
    `dtype`: in which graphs read it. `scaling`: of the weight. `input_block`: the elements of an input that
    share a scale. `partners`: weights that share the scale of this one, itself among them.
    `input_scale_inv`: float32 ``[1]``, what brings FP8 inputs back; None: inputs are scaled by their own
    amax, each in its tensor, token, or group of 128 or 32 elements of a token. `part`: the part of `weight`
    that it is, if this is a stack."""

    name: str
    parameter: str
    tensor: str
    weight: Tensor
    dtype: torch.dtype
    recipe: str
    scaling: Scaling
    input_block: Block
    partners: tuple[Tensor, ...]
    input_scale_inv: Tensor | None
    part: StackPart | None = None

    @property
    def static(self) -> bool:
        return self.input_scale_inv is not None

    def called(self, last: str) -> str:
        """The name in the checkpoint of one of its tensors, such as "weight_scale"."""
        stem, dot, own = self.tensor.rpartition(".")
        return stem + dot + last.replace("weight", own, 1)

    @property
    def stored(self) -> Stored | None:
        """The scales of the weight in the FP8 checkpoint that it comes from."""
        held = held_in(self.weight)
        return held.stored if held is not None else None


@dataclass(frozen=True)
class Chosen:
    """`left`: why a layer whose forward matmul is FP8 stays in high precision. `ignored`: every module, by
    name, that owns a matrix and stays in high precision, those of `left` among them."""

    layers: dict[str, ExportedLayer]
    left: dict[str, str]
    ignored: tuple[str, ...]


def choose(model: nn.Module) -> Chosen:
    """The layers of a bare module (`named_weights.unwrapped`). ExportError for what no server could run."""
    layers: dict[str, ExportedLayer] = {}
    left: dict[str, str] = {}
    ignored: list[str] = []
    owners: dict[int, list[str]] = {}
    parts = compat.fsdp.local_shapes(named_weights(model))
    sharded = compat.fsdp.gathered_as()
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(plain(name))
    for name, module in model.named_modules():
        name = plain(name)
        own = [(last, p) for last, p in module.named_parameters(recurse=False) if p.dim() > 1]
        stacks = [(last, p) for last, p in own if held_in(p) is not None and p.dim() == 3]
        for last, stack in stacks:
            matrices_of = _matrices(f"{name}.{last}".lstrip("."), stack, parts_of(module, last))
            layers.update({layer.name: layer for layer in matrices_of})
        matrices = [p for _, p in own]
        why = ""
        for matrix in matrices if not stacks else ():
            known = forwards.of(matrix)
            held = held_in(matrix)
            if held is not None and not _in_fp8(module, matrix, known):
                known = (_as_held(held),)
            elif not known:
                continue
            why = obstacle(module, matrix, known, owners[id(matrix)])
            if not why:
                _check_parts(name, matrix, known, parts.get(f"{name}.weight".lstrip(".")))
                layers[name] = _layer(name, matrix, known, sharded)
        if why:
            left[name] = why
        # a Linear whose weight is parametrized has no matrix of its own, but a server would replace it
        if (matrices or isinstance(module, nn.Linear)) and name not in layers and not stacks:
            ignored.append(name)
    # a server may take a name for the whole subtree below it
    ignored = [name for name in ignored if name and not any(layer.startswith(f"{name}.") for layer in layers)]
    return Chosen(layers, left, tuple(ignored))


def obstacle(module: nn.Module, weight: Tensor, known: tuple[Forward, ...], owners: list[str]) -> str:
    """Why a layer whose forward matmuls are FP8 cannot be exported so; "" if it can."""
    first = known[0]
    if weight.dim() != 2 or first.groups:
        return "a stack of expert weights: no layout of one checkpoint format fits all models"
    if not isinstance(module, nn.Linear):
        return f"a {type(module).__name__}: servers replace Linear only"
    if len(owners) > 1:
        return f"its weight is shared: {', '.join(owners)}"
    if not all(one.whole and one.rows_are_outputs for one in known):
        return "its matmul reads a part of the weight, its transpose, or a tensor computed from it"
    ways = {(one.weight, one.data, one.recipe, one.fnuz) for one in known}
    if len(ways) > 1:
        return "its matmuls are scaled in different ways"
    block = first.weight.block
    if (block, first.data.block) not in PAIRS:
        return f"no format has the scales of recipe {first.recipe!r}"
    if block == SQUARE and any(size % 128 for size in weight.shape) and not _held(weight, block):
        return f"{weight.shape[0]} x {weight.shape[1]} is no multiple of 128 x 128"
    if block in (MX_BLOCK, MX_TILE) and weight.shape[1] % MX_BLOCK.columns:
        return f"{weight.shape[0]} x {weight.shape[1]}: the second size is no multiple of {MX_BLOCK.columns}"
    return ""


def _held(weight: Tensor, block: Block) -> bool:
    """True if this weight is kept in FP8 with such blocks. Then it is written as it is."""
    held = held_in(weight)
    return held is not None and held.block == block


def _in_fp8(module: nn.Module, weight: Tensor, known: tuple[Forward, ...]) -> bool:
    """True if graphs multiply by the FP8 values of this weight, and in one way."""
    return bool(known) and not obstacle(module, weight, known, []) and _held(weight, known[0].weight.block)


def _as_held(weight: FrozenWeight) -> Forward:
    """How a server multiplies by FP8 values that no graph has read: by the recipe that has their blocks."""
    of_weight = Scaling(False, weight.block, False, weight.margin, weight.power_of_2, "auto")
    of_input = next(data for own, data in PAIRS if own == weight.block)
    fnuz = weight.data_.dtype == torch.float8_e4m3fnuz
    data = of_weight._replace(block=of_input, margin=0)
    return Forward(recipe_holding(weight.block), of_weight, data, fnuz=fnuz)


def _matrices(parameter: str, stack: Tensor, parts: Sequence[StackPart]) -> Iterator[ExportedLayer]:
    """What a stack of experts that is held is in its checkpoint: one tensor, or one for each part."""
    held = held_in(stack)
    assert held is not None
    how = _as_held(held)
    of = held.dtype, how.recipe, how.weight, how.data.block, (), None
    if not parts:
        yield ExportedLayer(parameter, parameter, parameter, stack, *of)
    for part in parts:
        yield ExportedLayer(part.name.removesuffix(".weight"), parameter, part.name, stack, *of, part)


def _part(stack: FrozenWeight, part: StackPart) -> FrozenWeight:
    """A view of a part of a stack, with the scales of its blocks."""
    inverse = part.of(stack.inv_, stack.block.rows)
    stored = None if stack.stored is None else stack.stored._replace(shape=tuple(inverse.shape))
    made = stack.like(part.of(stack.data_), inverse)
    made.stored = stored
    return made


def _check_parts(name: str, weight: Tensor, known: tuple[Forward, ...], part: Sequence[int] | None) -> None:
    """ExportError for a weight in parts (shape of this rank's: `part`) whose ranks scale it otherwise than a
    server could: elements that share a scale are on several ranks."""
    sizes = zip(part or weight.shape, weight.shape, known[0].weight.block, strict=True)
    cut = any(own != whole and (not block or own % block) for own, whole, block in sizes)
    if cut and not known[0].alike:
        raise ExportError(
            f"{name}: each rank has a part of its weight and scales it by the part's own amax, and a "
            "checkpoint has one scale: compile with amax_group, or serve it in high precision (fp8 = 'off')"
        )


def _layer(name: str, weight: Tensor, known: tuple[Forward, ...], sharded: Sharded) -> ExportedLayer:
    first = known[0]
    if first.fnuz:
        raise ExportError(
            f"{name}: its FP8 values have AMD's fnuz encoding, and checkpoints hold e4m3fn. Load the "
            "high-precision checkpoint on a CPU, compile the model there with fp8_encoding='ocp', call it "
            "once, and export that"
        )
    weight, dtype = _read(weight, sharded)
    partners = [_read(x, sharded)[0] for one in known for x in one.partners()]
    held = held_in(weight)
    came = held is not None and held.stored is not None  # and goes out as it came
    tensor = f"{name}.weight".lstrip(".")
    together = tuple({id(partner): partner for partner in partners}.values())
    input_scale_inv = None if came else _input_scale_inv(known, weight.device)
    how = first.recipe, first.weight, first.data.block, together, input_scale_inv
    return ExportedLayer(name, tensor, tensor, weight, dtype, *how)


def _read(parameter: Tensor, sharded: Sharded) -> tuple[Tensor, torch.dtype]:
    """Where the values of a parameter are, and the dtype in which graphs read them: FSDP2 frees the tensor
    that graphs have read."""
    same = (parameter, *(reference() for reference in find(parameter).references))
    return next((sharded[id(x)] for x in same if id(x) in sharded), (parameter, parameter.dtype))


def _input_scale_inv(known: Iterable[Forward], device: torch.device) -> Tensor | None:
    """The inverse of the scale that the next training call uses for the layer's input: of the smallest scale,
    if the layer is used several times. None if some input has no history."""
    scales = [one.stored_scale(one.data_slot, "input") for one in known]
    found = [scale for scale in scales if scale is not None]
    if len(found) < len(scales):
        return None
    return inverse_of(torch.tensor([min(found)], dtype=torch.float32, device=device))


# -- casts --


class WeightCast(NamedTuple):
    """`values`: float8_e4m3fn ``[out, in]``. `scale_inv`: float32, see above, or of the dtype and the shape
    that it had in an FP8 checkpoint."""

    values: Tensor
    scale_inv: Tensor


def cast(layer: ExportedLayer, held: FrozenWeight | None = None) -> WeightCast:
    """The weight of a layer, as the next forward of training would cast it.

    With a history, the scale is that of the history. If there is none, it is that of the current amax, as in
    a cold call. Weights of merged matmuls share their smallest scale. Shards are gathered: a collective.
    `held`: what was gathered of a weight that is held in FP8."""
    with torch.no_grad():
        if _held(layer.weight, layer.scaling.block):
            held = whole_held(layer.weight) if held is None else held
            held = held if layer.part is None else _part(held, layer.part)
            inverse = held.inv_
            if held.stored is not None:
                inverse = inverse.to(held.stored.dtype).reshape(held.stored.shape)
            return WeightCast(held.data_, inverse)
        weight = whole(layer.weight).to(layer.dtype)
        if not bool(weight.isfinite().all()):
            fix = "export the last checkpoint that is finite"
            raise ExportError(f"{layer.name}.weight has NaN or infinite values: {fix}")
        scale = _scale(layer, weight)
        values = ops.quantize(weight, scale, E4M3.dtype, E4M3.max, False, list(layer.scaling.block))
        return WeightCast(values, inverse_of(scale))


def whole(tensor: Tensor) -> Tensor:
    """A tensor of all ranks: gathered, if it is a DTensor."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _scale(layer: ExportedLayer, weight: Tensor) -> Tensor:
    """`weight`: the whole one."""
    scales = []
    for one in layer.partners or (layer.weight,):
        values = weight if one is layer.weight else whole(one).to(layer.dtype)
        scales.append(_own_scale(one, values, layer.scaling).to(weight.device))
    return torch.stack(scales).amin(0)


def _own_scale(parameter: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
    """The scale of one parameter, with all its values in `weight`, float32: `[1]`, or one a block of it."""
    if scaling.delayed:
        stored = (one.stored_scale(one.weight_slot, "weight") for one in forwards.of(parameter))
        scale = next((scale for scale in stored if scale is not None), None)
        if scale is not None:
            return torch.tensor([scale], dtype=torch.float32, device=weight.device)
    block = list(scaling.block)
    amax = ops.amax(weight) if scaling.block == WHOLE else ops.amax_blocks(weight, False, block)
    return scale_of(amax, E4M3.max, scaling.margin, scaling.power_of_2)
