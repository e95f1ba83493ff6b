"""The files of a safetensors checkpoint: which tensors they have, and these, one at a time. Nothing of a file
is executed, and no tensor is read before the headers of all files are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import LoadError, need, one_line

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its dtype in safetensors' words, "F8_E4M3", and its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def entries(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """The tensors of a checkpoint by name, in the order of its files: of a directory, or of one file."""
    need("safetensors", "fp8compile.load_fp8")
    found: dict[str, Entry] = {}
    files, index = _files(Path(path))
    for file in files:
        with opened(file) as held:
            for name in held.keys():  # noqa: SIM118  # no mapping
                if name in found:
                    raise LoadError(f"{file}: {name} is in {found[name].file.name}, too")
                part = held.get_slice(name)
                found[name] = Entry(file, part.get_dtype(), tuple(part.get_shape()))
    for name, file_name in index.items():
        if name not in found or found[name].file.name != file_name:
            raise LoadError(f"{Path(path) / file_name}: {name} is not there, though {INDEX} says so")
    return found


def _files(path: Path) -> tuple[list[Path], Mapping[str, str]]:
    """The files, and the file of each tensor by the index, if there is one."""
    if path.is_file():
        return [path], {}
    index = path / INDEX
    if index.is_file():
        names = _index(index)
        return [path / name for name in dict.fromkeys(names.values())], names
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS], {}
    raise LoadError(f"{path}: there is no {WEIGHTS}, and no {INDEX}")


def _index(path: Path) -> dict[str, str]:
    try:
        names = json.loads(path.read_text())["weight_map"]
        plain = all(isinstance(x, str) and x == Path(x).name for x in names.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path}: no index of safetensors files: {one_line(error)}") from None
    if not plain:
        raise LoadError(f"{path}: its weight_map names files outside of the directory")
    return names


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A file of safetensors. LoadError names it if it cannot be read, or ends before its tensors do."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as held:
            yield held
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{file}: {one_line(error)}") from None


def tensors(found: Mapping[str, Entry]) -> Iterator[tuple[str, Tensor]]:
    """These tensors, one at a time, on the CPU."""
    for file in dict.fromkeys(entry.file for entry in found.values()):
        with opened(file) as held:
            for name in (name for name, entry in found.items() if entry.file == file):
                yield name, held.get_tensor(name)
