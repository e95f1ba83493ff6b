"""Adapters of PEFT: an export writes them beside the base, or merged into it.

    up.base_layer.weight, up.lora_A.default.weight, ..   ->  up.weight, and adapter/adapter_model.safetensors
    merge="fp8"              ->  up.weight in FP8: Q(W + d), d = the update by PEFT's `get_delta_weight`
    merge="high_precision"   ->  up.weight: W + d in the dtype of the layer

`vanilla` makes modules with the names from before PEFT, which share all tensors with the model, so that the
rest of an export knows nothing of adapters. The model is never changed.

W in FP8 lies on the grid that Q rounds to, so a small update is rounded away: `left` measures how much.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import ExportError, describe
from ...frontend.inputs import plain
from ...ir import frozen, ops
from ...ir.frozen import FrozenWeight
from ...ir.scale import inverse_of
from . import forwards
from .checkpoint_formats import SHAPES
from .exported_layers import Chosen, cast, whole
from .writers import Writers

FP8, HIGH, BESIDE = "fp8", "high_precision", "adapter"
LEAST = 0.5  # of an update, what has to be left of it after a cast to FP8
BASES = ("base_layer", "original_module", "token_adapter")  # PEFT's names for the module that it wraps


@dataclass(frozen=True)
class Vanilla:
    """`model`: the modules from before PEFT. `peft`: the PeftModel whose adapters go beside it, if any.
    `merged`: the layer of PEFT, by the name of each module of `model` that its update is a part of."""

    model: nn.Module
    peft: Any = None
    merged: dict[str, Any] = field(default_factory=dict)


class _Peft(NamedTuple):
    """Classes of PEFT: of whole models, and of modules that stand in the place of others. `lora`: those whose
    `get_delta_weight` is all of their update."""

    model: Any = ()  # nothing is an instance of these, without PEFT
    layer: Any = ()
    wrapper: Any = ()
    saved: Any = ()
    lora: tuple[Any, ...] = ()


def _peft() -> _Peft:
    if "peft" not in sys.modules:
        return _Peft()
    from peft import PeftModel
    from peft.tuners import lora
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    mergeable = lora.Linear, lora.Embedding
    return _Peft(PeftModel, BaseTunerLayer, AuxiliaryTrainingWrapper, ModulesToSaveWrapper, mergeable)


def vanilla(model: nn.Module, merge: str | None) -> Vanilla:
    """The model without its adapters, or with their updates in it. ExportError for a value of `merge` that is
    none, for what cannot be merged, and where names could not be restored."""
    if merge not in (None, FP8, HIGH):
        raise ExportError(f"merge must be one of None, {FP8!r}, {HIGH!r}; got {describe(merge)}")
    known = _peft()
    modules = {plain(name): module for name, module in model.named_modules()}
    layers = {name: x for name, x in modules.items() if isinstance(x, (known.layer, known.wrapper))}
    wholes = [x for x in modules.values() if isinstance(x, known.model)]
    if merge and not layers:
        what = f"this {type(model).__name__} has no layer with an adapter of PEFT"
        raise ExportError(f"merge={merge!r}: {what}")
    if not layers and not wholes:
        return Vanilla(model)
    owners = Counter(id(p) for x in modules.values() for p in x._parameters.values())
    for name, layer in layers.items():
        if layer.merged_adapters:
            fix = "call model.unmerge_adapter(), or model.merge_and_unload() and export what it returns"
            raise ExportError(f"{name} has an adapter that is merged, and still there: {fix}")
        why = merge and _obstacle(layer, owners, known)
        if why:
            fix = "leave merge out, and the adapter is written beside the base"
            raise ExportError(f"merge={merge!r}: {name} {why}: {fix}")
    if not merge and len(wholes) != 1:
        what = f"{len(wholes)} PeftModels hold its adapters" if wholes else "no PeftModel holds its adapters"
        fix = f"make one by peft.get_peft_model, or pass merge={HIGH!r}"
        raise ExportError(f"{what}, and save_pretrained of one is to write them: {fix}")
    made = _Copies(merge, known)
    bare = made.of(model)
    names = {id(module): plain(name) for name, module in bare.named_modules()}
    for name, module in bare.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            what = f"{plain(name) or 'the model'} is a {type(module).__name__} of PEFT"
            raise ExportError(f"{what}, and names below it could not be restored: export what it holds")
    return Vanilla(bare, None if merge else wholes[0], {names[key]: x for key, x in made.merged.items()})


def _active(layer: Any) -> list[str]:
    """The adapters of LoRA that the next forward of a layer adds."""
    own = {*layer.lora_A, *layer.lora_embedding_A}
    return [] if layer.disable_adapters else [name for name in layer.active_adapters if name in own]


def _obstacle(layer: Any, owners: Mapping[int, int], known: _Peft) -> str:
    """Why the forward of a layer is not that of W + d, with the d of `get_delta_weight`; "" if it is."""
    if isinstance(layer, known.saved):
        return ""
    if type(layer) not in known.lora:
        kind = f"{type(layer).__module__.removeprefix('peft.tuners.')}.{type(layer).__name__}"
        return f"is a {kind}, and only LoRA of Linears and Embeddings can be merged"
    variants = [layer.lora_variant[name] for name in _active(layer) if name in layer.lora_variant]
    if variants:
        kind = getattr(variants[0], "__name__", type(variants[0]).__name__)
        return f"has a {kind}, whose update is not the one that get_delta_weight of PEFT gives"
    if any(layer.lora_bias.get(name) for name in _active(layer)):
        return "has lora_bias=True, an update that get_delta_weight of PEFT does not give"
    if any(hasattr(p, "placements") for p in layer.parameters()):
        return "has sharded parameters"
    return "has a weight that another module shares" if owners[id(layer.get_base_layer().weight)] > 1 else ""


class _Copies:
    """Copies of the modules around layers of PEFT; in the place of these stand the modules that they wrap."""

    def __init__(self, merge: str | None, peft: _Peft) -> None:
        self.merge, self.peft = merge, peft
        self.known: dict[int, nn.Module] = {}
        self.merged: dict[int, Any] = {}  # the layer of PEFT, by the id of what stands in its place

    def of(self, module: Any) -> nn.Module:
        if id(module) not in self.known:
            self.known[id(module)] = self._of(module)
        return self.known[id(module)]

    def _of(self, module: Any) -> nn.Module:
        if isinstance(module, self.peft.model):
            return self.of(module.get_base_model())
        if hasattr(module, "_orig_mod"):
            return self.of(module._orig_mod)
        if isinstance(module, self.peft.saved) and self.merge and not module.disable_adapters:
            for name in (x for x in module.active_adapters if x in module.modules_to_save):
                return self.of(module.modules_to_save[name])
        if isinstance(module, (self.peft.layer, self.peft.wrapper)):
            base = self.of(next(module._modules[x] for x in BASES if module._modules.get(x) is not None))
            update = isinstance(module, self.peft.layer) and self.merge and _active(module)
            return self._with_update(module, base) if update else base
        children = {name: x if x is None else self.of(x) for name, x in module._modules.items()}
        same = all(x is module._modules[name] for name, x in children.items())
        return module if same else _like(module, _modules=children)

    @torch.no_grad()
    def _with_update(self, layer: Any, base: nn.Module) -> nn.Module:
        weight, update = base._parameters["weight"], _update(layer)
        assert weight is not None
        if not update.any():
            return base
        total = _exact(weight) + update
        if isinstance(weight, FrozenWeight) and self.merge == FP8:
            parameter = nn.Parameter(_cast_again(weight, total), requires_grad=False)
        else:
            parameter = nn.Parameter(total.to(weight.dtype).cpu(), requires_grad=False)
            if self.merge == FP8:
                forwards.share(weight, parameter)
        made = _like(base, _parameters={**base._parameters, "weight": parameter})
        self.merged[id(made)] = layer
        return made


def _like(module: nn.Module, **changes: Any) -> nn.Module:
    """A module that shares with this one all that is not changed."""
    made: nn.Module = object.__new__(type(module))
    made.__dict__.update(module.__dict__, **changes)
    return made


def _update(layer: Any) -> Tensor:
    """d, float32, of the shape of the weight."""
    with torch.no_grad():
        return torch.stack([layer.get_delta_weight(name).float() for name in _active(layer)]).sum(0)


def _exact(weight: Tensor) -> Tensor:
    """What a weight stands for, in float32."""
    if isinstance(weight, FrozenWeight):
        return ops.values(weight.data_, weight.inv_, torch.float32, weight.block)
    return weight.detach().float()


def _cast_again(weight: FrozenWeight, values: Tensor) -> FrozenWeight:
    """New values in the format of a weight: blocks, powers of two if its scales are such, their dtype."""
    rounded = bool((torch.frexp(weight.inv_).mantissa == 0.5).all())
    data, inverse = frozen.cast(values, weight.data_.dtype, weight.block, weight.margin, rounded)
    if weight.stored is not None and weight.stored.dtype != torch.float32:
        inverse = inverse.to(weight.stored.dtype).float()
        largest = torch.finfo(data.dtype).max
        data = ops.quantize(values, inverse_of(inverse), data.dtype, largest, False, list(weight.block))
    return weight.like(data.cpu(), inverse.cpu())


@torch.no_grad()
def left(bare: Vanilla, chosen: Chosen, merge: str | None) -> dict[str, float]:
    """Which part of each update is in what is written: <written - W, d> / <d, d>. ExportError if it is under
    half of one that was to be merged into FP8."""
    found: dict[str, float] = {}
    for name, layer in bare.merged.items():
        ours = chosen.layers.get(name)
        if ours is None:
            written = bare.model.get_parameter(f"{name}.weight").float()
        else:
            values, inverse = (x.cpu() for x in cast(ours))
            block = ours.scaling.block
            inverse = inverse.float().reshape(SHAPES.get(block, inverse.shape))
            written = ops.values(values, inverse, torch.float32, block)
        before, update = _exact(layer.get_base_layer().weight).cpu(), _update(layer).cpu()
        found[name] = float(((written - before) * update).sum() / update.square().sum())
    worst = min(found, key=lambda name: found[name], default="")
    if merge == FP8 and worst and not found[worst] >= LEAST:
        what = (
            f"merge={FP8!r} would leave {found[worst]:.2f} of the update of {worst}, and round the rest away"
        )
        fix = f"merge={HIGH!r} writes such layers in their own dtype, and merge=None the adapter beside"
        raise ExportError(f"{what}: {fix}")
    return found


def write(peft_model: Any, directory: Path, writers: Writers) -> dict[str, Path]:
    """Write all adapters by PEFT's own `save_pretrained`; the folder of each, by its name. Not into
    `directory` itself: transformers takes a folder with `adapter_config.json` for that of an adapter."""
    state = writers.attempt(lambda: _state(peft_model))
    writers.attempt(lambda: _save(peft_model, directory, state) if writers.first else None)
    folder = directory / BESIDE
    return {name: folder if name == "default" else folder / name for name in peft_model.peft_config}


def _state(peft_model: Any) -> dict[str, Tensor]:
    """The state dict, in which the tensors that PEFT writes are whole."""
    from peft import get_peft_model_state_dict

    state = peft_model.state_dict(keep_vars=True)
    of_each = (get_peft_model_state_dict(peft_model, state, name) for name in peft_model.peft_config)
    written = {id(tensor) for tensors in of_each for tensor in tensors.values()}
    return {name: whole(x) if id(x) in written else x for name, x in state.items()}


def _save(peft_model: Any, directory: Path, state: dict[str, Tensor]) -> None:
    configs = peft_model.peft_config.values()
    before = [config.base_model_name_or_path for config in configs]
    try:
        for config in configs:
            config.base_model_name_or_path = str(directory)
        peft_model.save_pretrained(str(directory / BESIDE), state_dict=state)
    finally:
        for config, name in zip(configs, before, strict=True):
            config.base_model_name_or_path = name
