"""The files of a checkpoint: safetensors, in several files if it is large or has several writers, their
index, and config.json."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...errors import ExportError
from .writers import Writers

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
OURS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|config\.json")


def check_directory(directory: Path, overwrite: bool) -> None:
    """ExportError if `directory` is a file, or has files already."""
    if directory.exists() and not directory.is_dir():
        raise ExportError(f"{directory} is a file: name a directory")
    if directory.is_dir() and not overwrite and (held := sorted(path.name for path in directory.iterdir())):
        shown = ", ".join(held[:3]) + (", ..." if len(held) > 3 else "")
        fix = "name another directory, or pass overwrite=True"
        raise ExportError(f"{directory} has files already ({shown}): {fix}")


def untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of tied tensors (one object, or the same memory in the same way) the first name, as in checkpoints of
    transformers."""
    found: dict[str, Tensor] = {}
    seen: set[Any] = set()
    for name, tensor in tensors.items():
        memory = None if is_traceable_wrapper_subclass(tensor) or not tensor.numel() else tensor.data_ptr()
        way = tensor.device, memory, tuple(tensor.shape), tensor.stride(), tensor.dtype
        keys = {id(tensor)} if memory is None else {id(tensor), way}
        if seen.isdisjoint(keys):
            found[name] = tensor
        seen |= keys
    return found


def own_memory(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors on the CPU, as safetensors takes them: contiguous, each with its own memory. They are taken
    one at a time."""
    found: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors:
        tensor = tensor.to("cpu").contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        found[name] = tensor
    return found


def config_of(model: nn.Module) -> dict[str, Any]:
    """The model's own configuration, as `save_pretrained` of transformers writes it; {} if it has none."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_dict", None)):
        return {}
    if hasattr(config, "to_json_string"):
        text = config.to_json_string(use_diff=False)
    else:
        text = json.dumps(config.to_dict())
    found = json.loads(text)
    if not found.get("architectures"):
        found["architectures"] = [type(model).__name__]  # servers find the class of the model by it
    kinds = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    key = "torch_dtype" if "torch_dtype" in found else "dtype"
    found[key] = str(next(kinds, torch.float32)).removeprefix("torch.")
    return found


def write(
    directory: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    max_shard_size: int | str,
    writers: Writers,
) -> list[str]:
    """Write the checkpoint; one that is there goes when all files are written. `tensors`: those of this rank.
    Returns the names of the files of all ranks."""
    own = writers.attempt(lambda: _split(dict(tensors), max_shard_size))
    sizes = writers.gather([{name: tensor.nbytes for name, tensor in file.items()} for file in own])
    files = _named([file for of_rank in sizes for file in of_rank])
    texts = {CONFIG: config, **({INDEX: _index(files)} if len(files) > 1 else {})}
    before = sum(map(len, sizes[: writers.place]))
    mine = dict(zip([*files][before:], own, strict=False))
    made = writers.attempt(lambda: _temporary(directory) if writers.first else None)
    with made or nullcontext():
        folder = Path(writers.gather(made and made.name)[0])
        writers.attempt(lambda: _save(folder, mine, texts if writers.first else {}))
        writers.attempt(lambda: _move([*files, *texts], folder, directory) if writers.first else None)
    return [*files, *texts]


def _split(tensors: dict[str, Tensor], max_shard_size: int | str) -> list[dict[str, Tensor]]:
    """The tensors of each file; one file without huggingface_hub."""
    try:
        from huggingface_hub import split_torch_state_dict_into_shards
    except ModuleNotFoundError:
        return [tensors] if tensors else []
    cut = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
    return [{key: tensors[key] for key in keys} for keys in cut.filename_to_tensors.values() if keys]


def _named(files: Sequence[Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
    """Files by the names that loaders look for. Of each tensor in a file the bytes."""
    if len(files) == 1:
        return {WEIGHTS: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": file for i, file in enumerate(files, 1)}


def _index(files: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    total = sum(sum(file.values()) for file in files.values())
    names = {tensor: name for name, file in files.items() for tensor in file}
    return {"metadata": {"total_size": total}, "weight_map": names}


def _temporary(directory: Path) -> tempfile.TemporaryDirectory[str]:
    directory.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=directory, prefix=".export-")


def _save(folder: Path, files: Mapping[str, dict[str, Tensor]], texts: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    if not folder.is_dir():
        raise ExportError(
            f"{folder.parent} of the first rank is not here: name a directory that all ranks see"
        )
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _move(names: Iterable[str], folder: Path, directory: Path) -> None:
    """The index comes last: without it, nothing loads several files."""
    for path in directory.iterdir():
        if OURS.fullmatch(path.name):
            path.unlink()  # shards of an older checkpoint would be loaded, too
    for name in names:
        (folder / name).replace(directory / name)
