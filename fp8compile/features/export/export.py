"""`fp8compile.export(model, "dir")`: a trained model as an FP8 checkpoint, with the numerics of the recipe
that trained it.

    model  ->  without adapters, or with them merged (`adapters`)
           ->  layers whose forward matmul is FP8 (`choose`), weights cast as training casts them (`cast`)
           ->  names of tensors and the configuration of a format (`checkpoint_formats`)
           ->  model.safetensors, config.json (`checkpoint_files`); of shards, a file a rank (`writers`)
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...errors import ExportError, at_most, need
from ...frontend.inputs import plain
from ...logs import get_logger
from ...runtime import held
from ...runtime.named_weights import named_weights, unwrapped
from . import adapters, checkpoint_files
from .checkpoint_formats import FORMATS, pick
from .exported_layers import Chosen, ExportedLayer, cast, choose, whole
from .writers import Writers

logger = get_logger(__name__)


@dataclass(frozen=True)
class Exported:
    """What was written. `format`: "compressed-tensors" or "fp8", or "": updates were merged in high precision
    into all layers. `layers`: the recipe of each layer in FP8, by name. `ignored`: modules with matrices that
    stay in high precision. `left`: those among them whose forward matmul is FP8, with the reason. `files`:
    names in `directory`. `adapters`: the folder of each adapter of PEFT beside them. `merged`: of each layer
    that an adapter was merged into, the part of the update that is in what was written: 1 is all of it."""

    directory: Path
    format: str
    layers: dict[str, str]
    ignored: tuple[str, ...]
    left: dict[str, str]
    files: tuple[str, ...]
    adapters: dict[str, Path] = field(default_factory=dict)
    merged: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        recipes = ", ".join(f"{count} {recipe}" for recipe, count in Counter(self.layers.values()).items())
        kept = f"; {len(self.ignored)} modules in high precision" if self.ignored else ""
        if self.merged:
            least = min(self.merged.values())
            kept += f"; {len(self.merged)} updates merged, {least:.2f} or more of each is left"
        kept += "".join(f"; adapter in {folder}" for folder in self.adapters.values())
        fp8 = f"{self.format}, {len(self.layers)} layers in FP8 ({recipes})" if self.format else "no FP8"
        return f"{self.directory}: {fp8}{kept}"


def export(
    model: nn.Module,
    directory: str | os.PathLike[str],
    format: str | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    merge: str | None = None,
) -> Exported:
    """Write a model for servers: `model.safetensors` with FP8 weights and their scales, and `config.json`.

    `model` is the module, or the wrapper that torch.compile or DDP made of it. Some call has to have compiled
    it: a training call, or an evaluation with the policy `eval="fp8"`. In FP8 are the Linears whose forward
    matmul the report shows as FP8, and those that `load_fp8` holds, called or not. All other tensors are
    written as they are, with their names in `state_dict()`; of tied tensors the first. The model is not
    changed.

    `format`: "compressed-tensors" (vLLM, transformers): scales per tensor, output channel, 128 x 128 or 1 x
    32 elements, also mixed. "fp8" (vLLM, transformers): DeepSeek-V3's layout, 128 x 128 elements only. None:
    that of a checkpoint that was loaded; "fp8" if all layers are `blockwise`, else "compressed-tensors".

    Weights are float8_e4m3fn ``[out, in]``, cast as the next forward of training would cast them: with the
    current amax, or with `delayed` the scale of its history. What is held in FP8 is written as it is, scales
    of `load_fp8` as they came. Scales are float32 otherwise; with `mxfp8` E8M0 bytes,
    uint8 ``[out, in / 32]``. With `delayed`, inputs get the static scale of their history; if they have none,
    or with other recipes, servers scale inputs by their current amax. docs/export.md says where servers
    compute otherwise than training.

    `config.json` is the model's configuration (`model.config`), if it has one, with a `quantization_config`.
    Tokenizer and generation configuration are not written. A directory with files is refused, unless
    `overwrite`: then an older checkpoint is replaced, and other files stay. With huggingface_hub, more than
    `max_shard_size` bytes ("5GB", or an integer) become several files and an index.

    `merge`: of a PEFT model. None: the base has the names from before PEFT, and `directory/adapter` all
    adapters, by PEFT's `save_pretrained`. "fp8": LoRA's updates are added, and the sums cast again as their
    layers are. "high_precision": sums are in the dtype of the layer, and other layers stay in FP8.

    In a distributed job, call it on one rank. But where FSDP2 or tensor parallelism shards parameters, all
    ranks that have the shards call it, with a directory that all of them see; a rank alone would wait for the
    others. Each writes a part of the tensors, and keeps that part alone in host memory: a file a rank, each
    of up to `max_shard_size`, and one index. Tensors are those of the same model without shards; but for
    static scales of inputs (`delayed`): each is that of the rank that writes it, without `reduce_amax`. An
    error on one rank is one on all. FSDP1 is refused, and `merge` of adapters that are sharded.

    Returns an `Exported`. Raises ExportError (a ValueError) if the model has no FP8 layer or cannot be
    exported, if "fp8" leaves under half of an update, or for the directory or format; ImportError without
    safetensors; TypeError for no module."""
    model = unwrapped(model)
    path = Path(directory)
    need("safetensors", "fp8compile.export")
    writers = Writers(model)

    def prepare() -> tuple[adapters.Vanilla, Chosen, str, dict[str, float], dict[str, Any]]:
        if writers.first:  # a look of others could make a network's file system hide what the first one makes
            checkpoint_files.check_directory(path, overwrite)
        _check_whole(model)
        bare = adapters.vanilla(model, merge)
        chosen, name = _chosen(bare, format)
        config = checkpoint_files.config_of(bare.model)
        if name:
            config["quantization_config"] = FORMATS[name].config(chosen)
        return bare, chosen, name, adapters.left(bare, chosen, merge), config

    bare, chosen, name, merged, config = writers.attempt(prepare)
    _check_alike(writers, bare.model, chosen, config)
    taken = _tensors(bare.model, chosen, name)
    tensors = writers.attempt(lambda: checkpoint_files.own_memory(writers.share(taken)))
    written = checkpoint_files.write(path, tensors, config, max_shard_size, writers)
    recipes = {layer.name: layer.recipe for layer in chosen.layers.values()}
    beside = adapters.write(bare.peft, path, writers) if bare.peft is not None else {}
    made = Exported(path, name, recipes, chosen.ignored, chosen.left, tuple(written), beside, merged)
    if writers.first:
        logger.info("fp8: exported %s", made)
    if chosen.left and writers.first:
        text = "fp8: export leaves layers in high precision that train in FP8: %s"
        logger.warning(text, _some(chosen.left))
    return made


def served_weights(
    model: nn.Module, format: str | None = None, merge: str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that `export` would write, one layer at a time: for a server that takes new weights while
    the model trains. Names, dtypes, shapes, bytes and order are those of the checkpoint; `format` and `merge`
    are those of `export`, and adapters that are not merged do not come. Beside the model there is one layer,
    and float32 copies while it is cast: together up to 17 bytes for each element of its weight.

    The FP8 bytes are those that the next forward of training multiplies with: those that `fp8_all_gather` or
    `cache_weights` would bring, too. Take all tensors before a training call or an optimizer step.

    Tensors are contiguous and on the device of their parameter. What is not cast is the memory of the model
    itself: read it, or copy it. To compare what has arrived, see `digest`.

    Parameters that FSDP2 or tensor parallelism shards are gathered one at a time. Then all ranks have to take
    all tensors, which are the same on each; but for static scales of inputs (`delayed`): those are the rank's
    own, without `reduce_amax`.

    Raises what `export` raises; for a NaN in a weight when the weight's turn comes, on all ranks. Also
    ExportError where tensor parallelism cuts what shares a scale, without `amax_group`."""
    model = unwrapped(model)
    _check_whole(model)
    bare = adapters.vanilla(model, merge)
    chosen, name = _chosen(bare, format)
    if merge == adapters.FP8:
        adapters.left(bare, chosen, merge)  # an error, where too little is left
    return _tensors(bare.model, chosen, name)


def _chosen(bare: adapters.Vanilla, format: str | None) -> tuple[Chosen, str]:
    """The layers in FP8, and the name of their format: "" if updates were merged into all."""
    _check_adapters(bare.model)
    chosen = choose(bare.model)
    if not chosen.layers and not bare.merged:
        raise ExportError(_nothing(bare.model, chosen))
    return chosen, pick(format, chosen.layers.values()) if chosen.layers else ""


def _tensors(model: nn.Module, chosen: Chosen, format: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the checkpoint, in the order of the state dict. One weight is cast at a time."""
    weights: defaultdict[str, list[ExportedLayer]] = defaultdict(list)
    for layer in chosen.layers.values():
        weights[layer.parameter].append(layer)
    # parameters themselves: plain copies of all that is held in FP8 would be the whole model
    state = model.state_dict(keep_vars=True)
    given = {plain(name): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    for name, tensor in checkpoint_files.untied(given).items():
        if name not in weights:
            frozen = held.held_in(tensor) is not None
            yield name, held.whole(tensor).dequantized() if frozen else whole(tensor).contiguous()
            continue
        stack = held.whole(tensor) if weights[name][0].part is not None else None  # once for all its parts
        for layer in weights[name]:
            for last, made in FORMATS[format].tensors(layer, cast(layer, stack)).items():
                yield layer.called(last), made.contiguous()


def _check_alike(writers: Writers, model: nn.Module, chosen: Chosen, config: dict[str, Any]) -> None:
    """ExportError where ranks would write parts of different checkpoints."""
    shapes = [(name, tuple(weight.shape)) for name, weight in named_weights(model).items()]
    if any(other != (shapes, config, chosen.left) for other in writers.gather((shapes, config, chosen.left))):
        raise ExportError(
            "ranks that share this model's shards would export other layers or other formats: run the same "
            "layers on all of them, call export with the same arguments, and with 'delayed' set reduce_amax"
        )


def _check_whole(model: nn.Module) -> None:
    """ExportError for a model whose parameters are not the weights to serve."""
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ExportError(
                f"{plain(name) or 'the model'} is sharded by FSDP1: take fully_shard (FSDP2), or gather "
                "parameters (get_model_state_dict with full_state_dict=True), load them into a model on one "
                "device, compile that, call it once, and export it"
            )
        for last, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                what = f"{plain(name)}.{last} is on the meta device, without values"
                raise ExportError(f"{what}: load the weights first")


def _check_adapters(model: nn.Module) -> None:
    """ExportError for adapters that are left when those of PEFT are gone."""
    for name, module in model.named_modules():
        children = [last.lower() for last, _ in module.named_children()]
        if hasattr(module, "base_layer") and any("lora" in last for last in children):
            what = f"{plain(name)} has an adapter that PEFT did not make, so no other tool knows its names"
            raise ExportError(f"{what}: add it to base_layer, put base_layer in its place, compile, call")


def _nothing(model: nn.Module, chosen: Chosen) -> str:
    if chosen.left:
        return f"nothing of this {type(model).__name__} can be exported in FP8: {_some(chosen.left)}"
    return (
        f"no layer of this {type(model).__name__} is known to be FP8: compile it with backend='fp8', and "
        "call it in training, or in evaluation with the policy eval='fp8'. fp8compile.report(model) has "
        "the reason for each matmul"
    )


def _some(left: dict[str, str]) -> str:
    return "; ".join(at_most(3, [f"{name}: {why}" for name, why in left.items()]))
