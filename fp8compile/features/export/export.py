"""`fp8compile.export(model, "dir")`: a trained model as an FP8 checkpoint, with the numerics of the recipe
that trained it.

    model  ->  layers whose forward matmul is FP8 (`choose`), weights cast as training casts them (`cast`)
           ->  names of tensors and the configuration of a format (`checkpoint_formats`)
           ->  model.safetensors, config.json (`checkpoint_files`)
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ...errors import ExportError, at_most, need
from ...frontend.inputs import plain
from ...logs import get_logger
from ...runtime.named_weights import unwrapped
from . import checkpoint_files
from .checkpoint_formats import FORMATS, pick
from .exported_layers import Chosen, cast, choose

logger = get_logger(__name__)


@dataclass(frozen=True)
class Exported:
    """What was written. `format`: "compressed-tensors" or "fp8". `layers`: the recipe of each layer in FP8,
    by name. `ignored`: modules with matrices that stay in high precision. `left`: those among them whose
    forward matmul is FP8, with the reason. `files`: names in `directory`."""

    directory: Path
    format: str
    layers: dict[str, str]
    ignored: tuple[str, ...]
    left: dict[str, str]
    files: tuple[str, ...]

    def __str__(self) -> str:
        recipes = ", ".join(f"{count} {recipe}" for recipe, count in Counter(self.layers.values()).items())
        kept = f"; {len(self.ignored)} modules in high precision" if self.ignored else ""
        return f"{self.directory}: {self.format}, {len(self.layers)} layers in FP8 ({recipes}){kept}"


def export(
    model: nn.Module,
    directory: str | os.PathLike[str],
    format: str | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
) -> Exported:
    """Write a model for servers: `model.safetensors` with FP8 weights and their scales, and `config.json`.

    `model` is the module, or the wrapper that torch.compile or DDP made of it. Some call has to have compiled
    it: a training call, or an evaluation with the policy `eval="fp8"`. In FP8 are the Linears whose forward
    matmul the report shows as FP8. All other tensors are written as they are, with their names in
    `state_dict()`; of tied tensors the first. The model is not changed.

    `format`: "compressed-tensors" (vLLM, transformers): scales per tensor, output channel, 128 x 128 or 1 x
    32 elements, also mixed. "fp8" (vLLM, transformers): DeepSeek-V3's layout, 128 x 128 elements only. None:
    "fp8" if all layers are `blockwise`, else "compressed-tensors".

    Weights are float8_e4m3fn ``[out, in]``, cast as the next forward of training would cast them: with the
    current amax, or with `delayed` the scale of its history. What is held in FP8 is written as it is, scales
    of `load_fp8` in the dtype that they came in. Scales are float32 otherwise; with `mxfp8` E8M0 bytes,
    uint8 ``[out, in / 32]``. With `delayed`, inputs get the static scale of their history; if they have none,
    or with other recipes, servers scale inputs by their current amax. docs/export.md says where servers
    compute otherwise than training.

    `config.json` is the model's configuration (`model.config`), if it has one, with a `quantization_config`.
    Tokenizer and generation configuration are not written. A directory with files is refused, unless
    `overwrite`: then an older checkpoint is replaced, and other files stay. With huggingface_hub, more than
    `max_shard_size` bytes ("5GB", or an integer) become several files and an index.

    In a distributed job, call it on one rank. Parameters sharded by FSDP or tensor parallelism are refused.

    Returns an `Exported`. Raises ExportError (a ValueError) if the model has no FP8 layer or cannot be
    exported, or for the directory or format; ImportError without safetensors; TypeError for no module."""
    model = unwrapped(model)
    path = Path(directory)
    need("safetensors", "fp8compile.export")
    checkpoint_files.check_directory(path, overwrite)
    _check_whole(model)
    chosen = choose(model)
    if not chosen.layers:
        raise ExportError(_nothing(model, chosen))
    name = pick(format, chosen.layers.values())
    tensors = _tensors(model, chosen, name)
    config = {**checkpoint_files.config_of(model), "quantization_config": FORMATS[name].config(chosen)}
    written = checkpoint_files.write(path, tensors, config, max_shard_size)
    recipes = {layer.name: layer.recipe for layer in chosen.layers.values()}
    made = Exported(path, name, recipes, chosen.ignored, chosen.left, tuple(written))
    logger.info("fp8: exported %s", made)
    if chosen.left:
        text = "fp8: export leaves layers in high precision that train in FP8: %s"
        logger.warning(text, _some(chosen.left))
    return made


def _tensors(model: nn.Module, chosen: Chosen, format: str) -> dict[str, Tensor]:
    """The tensors of the checkpoint, in the order of the state dict. One weight is cast at a time."""
    found: dict[str, Tensor] = {}
    weights = {f"{name}.weight".lstrip("."): layer for name, layer in chosen.layers.items()}
    given = {plain(name): tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    others = {name: tensor for name, tensor in given.items() if name not in weights}
    high = checkpoint_files.own_memory(others)
    for name in given:
        if name in high:
            found[name] = high[name]
        elif name in weights:
            layer = weights[name]
            made = FORMATS[format].tensors(layer, cast(layer))
            for last, tensor in made.items():
                found[f"{layer.name}.{last}".lstrip(".")] = tensor.contiguous()
    return found


def _check_whole(model: nn.Module) -> None:
    """ExportError for a model whose parameters are not the weights to serve."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        sharded = any(hasattr(p, "placements") for p in module.parameters(recurse=False))
        if sharded or kind == "FullyShardedDataParallel":
            raise ExportError(
                f"{plain(name) or 'the model'} has sharded parameters: gather them (get_model_state_dict "
                "with full_state_dict=True), load them into a model on one device, compile that, call it "
                "once, and export it"
            )
        children = [last.lower() for last, _ in module.named_children()]
        if hasattr(module, "base_layer") and any("lora" in last for last in children):
            fix = "call model.merge_and_unload(), compile, call"
            raise ExportError(f"{plain(name)} has an adapter that is not merged: {fix}")
        for last, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                what = f"{plain(name)}.{last} is on the meta device, without values"
                raise ExportError(f"{what}: load the weights first")


def _nothing(model: nn.Module, chosen: Chosen) -> str:
    if chosen.left:
        return f"nothing of this {type(model).__name__} can be exported in FP8: {_some(chosen.left)}"
    return (
        f"no layer of this {type(model).__name__} is known to be FP8: compile it with backend='fp8', and "
        "call it in training, or in evaluation with the policy eval='fp8'. fp8compile.report(model) has "
        "the reason for each matmul"
    )


def _some(left: dict[str, str], most: int = 3) -> str:
    return "; ".join(at_most(most, [f"{name}: {why}" for name, why in left.items()]))
