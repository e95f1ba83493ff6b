"""Checkpoint formats: names of tensors, and the `quantization_config` that says which layers have them.

    "compressed-tensors"   `weight`, `weight_scale`, and `input_scale` where inputs have a static scale;
                           `ignore` lists the other layers. Read in compressed-tensors 0.20
                           (quantization/quant_config.py, quant_args.py and lifecycle/initialize.py;
                           compressors/mxfp8), vLLM (quantization/compressed_tensors) and transformers 5.24.
    "fp8"                  `weight`, `weight_scale_inv`, for 128 x 128 blocks: the layout of DeepSeek-V3;
                           `modules_to_not_convert` lists the other layers. Read in transformers 5.24
                           (integrations/finegrained_fp8.py) and vLLM (quantization/fp8.py). With one scale
                           a weight only for what came so: transformers has `weight_scale_inv`, [], where
                           vLLM has `weight_scale`.

In both, a stored scale multiplies the FP8 values: it is our `scale_inv`, whatever it is called there. Scales
are float32, or with mxfp8 the exponent bytes of E8M0: the byte b is 2**(b - 127).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...codegen.scaled_mm_kind import LINE, MX_BLOCK, MX_TILE, SQUARE
from ...config.recipe import ROW, WHOLE, Block
from ...errors import ExportError, describe, did_you_mean, near
from .exported_layers import Chosen, ExportedLayer, WeightCast

COMPRESSED_TENSORS, FINE_GRAINED = "compressed-tensors", "fp8"
MX = {"strategy": "group", "group_size": MX_BLOCK.columns, "scale_dtype": "torch.uint8"}
# what has a scale, in the words of compressed-tensors
WEIGHTS: Mapping[Block, dict[str, Any]] = {
    WHOLE: {"strategy": "tensor"},
    ROW: {"strategy": "channel"},
    SQUARE: {"strategy": "block", "block_structure": list(SQUARE)},
    MX_BLOCK: MX,
    MX_TILE: MX,  # groups of 32 rows have equal scales
}
INPUTS: Mapping[Block, dict[str, Any]] = {
    WHOLE: {"strategy": "tensor"},
    ROW: {"strategy": "token"},
    LINE: {"strategy": "group", "group_size": LINE.columns},
    MX_BLOCK: MX,
}


class CheckpointFormat(NamedTuple):
    """`tensors`: what replaces a layer's weight, by its names there. `config`: the `quantization_config`."""

    tensors: Callable[[ExportedLayer, WeightCast], dict[str, Tensor]]
    config: Callable[[Chosen], dict[str, Any]]


def pick(name: str | None, layers: Iterable[ExportedLayer]) -> str:
    """The format's name: `name`, or the recipes' own. ExportError if it is none, or cannot hold them."""
    layers = list(layers)
    names = {layer.stored.name if layer.stored is not None else "" for layer in layers}
    others = [layer for layer in layers if layer.scaling.block != SQUARE]
    if names == {"weight_scale_inv"} and {layer.scaling.block for layer in layers} == {WHOLE}:
        others = []  # they came so
    if name is None:
        return COMPRESSED_TENSORS if others or "weight_scale" in names else FINE_GRAINED
    if name not in FORMATS:
        allowed = ", ".join(map(repr, FORMATS))
        meant = did_you_mean(near(name, FORMATS))
        raise ExportError(f"format must be one of {allowed}; got {describe(name)}.{meant}")
    if name == FINE_GRAINED and others:
        raise ExportError(
            f"format {name!r} has scales of 128 x 128 elements only, and {others[0].name} was trained with "
            f"{others[0].recipe!r}: take format={COMPRESSED_TENSORS!r}"
        )
    return name


# -- compressed-tensors --

# compressed-tensors takes these shapes only. Other scales of a weight can have come as [] or [1, 1]
SHAPES: Mapping[Block, tuple[int, ...]] = {WHOLE: (1,), ROW: (-1, 1)}


def _compressed(layer: ExportedLayer, cast: WeightCast) -> dict[str, Tensor]:
    static = {"input_scale": layer.input_scale_inv.clone()} if layer.input_scale_inv is not None else {}
    block, scale = layer.scaling.block, cast.scale_inv
    scale = _e8m0(layer, scale) if _is_mx(layer) else scale.reshape(SHAPES.get(block, scale.shape))
    return {"weight": cast.values, "weight_scale": scale, **static}


def _is_mx(layer: ExportedLayer) -> bool:
    return WEIGHTS[layer.scaling.block] is MX


def _e8m0(layer: ExportedLayer, scale_inv: Tensor) -> Tensor:
    """The bytes of the scales, uint8 ``[out, in / 32]``; the rows of a tile get a copy each. Nothing is
    rounded: scales are powers of two, with inverses from 2**-127 to 2**126 (`ir.scale`), which E8M0 holds."""
    rows = scale_inv.repeat_interleave(layer.scaling.block.rows, dim=0)[: layer.weight.shape[0]]
    return rows.to(torch.float8_e8m0fnu).view(torch.uint8)


def _compressed_config(chosen: Chosen) -> dict[str, Any]:
    schemes: dict[tuple[str, Block, bool], list[ExportedLayer]] = {}
    for layer in chosen.layers.values():
        key = WEIGHTS[layer.scaling.block]["strategy"], layer.input_block, layer.static
        schemes.setdefault(key, []).append(layer)
    groups = {}
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    # mxfp8 last: `dequantize=True` of transformers 5.24 reads all by the first group, and E8M0 fits any scale
    for i, layers in enumerate(sorted(schemes.values(), key=lambda layers: _is_mx(layers[0]))):
        first = layers[0]
        groups[f"group_{i}"] = {
            "targets": ["Linear"] if len(schemes) == 1 else [layer.name for layer in layers],
            "format": "mxfp8-quantized" if _is_mx(first) else "float-quantized",
            "weights": {**fp8, **WEIGHTS[first.scaling.block], "dynamic": False},
            "input_activations": {**fp8, **INPUTS[first.input_block], "dynamic": not first.static},
            "output_activations": None,
        }
    forms = {group["format"] for group in groups.values()}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(chosen.ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


# -- fine-grained FP8 --


def _fine_grained(layer: ExportedLayer, cast: WeightCast) -> dict[str, Tensor]:
    return {"weight": cast.values, "weight_scale_inv": cast.scale_inv}


def _fine_grained_config(chosen: Chosen) -> dict[str, Any]:
    blocks = {layer.scaling.block for layer in chosen.layers.values()}
    e8m0 = all(x.stored and x.stored.dtype == torch.float8_e8m0fnu for x in chosen.layers.values())
    return {
        "quant_method": FINE_GRAINED,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": None if WHOLE in blocks else list(SQUARE),
        **({"scale_fmt": "ue8m0"} if e8m0 else {}),
        "modules_to_not_convert": [_alone(name, chosen.layers) for name in chosen.ignored],
    }


def _alone(name: str, layers: Iterable[str]) -> str:
    """A pattern that leaves out this module, and no exported one: to transformers a name is a pattern for the
    beginning of others, and their end. vLLM compares names: there, an anchored one is not found."""
    hit = re.compile(rf"(?:{name})(?:(?<=\.)|(?=\.|$))")
    collides = any(hit.match(other) or other.endswith(name) for other in layers)
    return f"^{re.escape(name)}$" if collides else name


FORMATS: Mapping[str, CheckpointFormat] = {
    COMPRESSED_TENSORS: CheckpointFormat(_compressed, _compressed_config),
    FINE_GRAINED: CheckpointFormat(_fine_grained, _fine_grained_config),
}
