"""`export` of a sharded model: a file a rank and one index; what goes wrong on one rank is told on all.
(That bytes are those of a replica's export: `test_served.py`; of held weights: `load/test_shards.py`.)"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import fp8compile
from tests.features.export.small import Small, tokens
from tests.support.processes import error_of, on_ranks
from tests.support.served import alike, same, tensors_of

pytest.importorskip("safetensors")
LIMIT = 120.0  # seconds, of each test
ON = {"extends": "none", "rules": [{"where": "n >= 128 and k >= 128", "fp8": "on"}, {"fp8": "off"}]}
INDEX = "model.safetensors.index.json"


def sharded(model: Any, recipe: str, *args: Any, **how: Any) -> Any:
    """A model after a training call."""
    torch._dynamo.reset()
    model.compile(backend="fp8", options={"recipe": recipe, "policy": ON})
    fully_shard(model, **how)
    model(*args).float().sum().backward()
    return model


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _written(rank: int, folder: str) -> Any:
    torch.manual_seed(0)
    model = sharded(Small(), "blockwise", tokens())
    out = Path(folder, "out")
    made = fp8compile.export(model, out)
    before = {}
    if rank == 0:
        before = files(out)
        (out / "tokenizer.json").write_text("{}")
    again = fp8compile.export(model, out, overwrite=True, max_shard_size=40_000)
    return made, before, again


@pytest.mark.feature("load")
def test_a_file_a_rank(tmp_path: Path) -> None:
    """Shares are equal but for one tensor. A second export takes the place of the first."""
    (made, before, again), (other, _, third) = on_ranks(2, _written, str(tmp_path), limit=LIMIT)
    assert made == other and again == third
    pair = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert made.files == (*pair, "config.json", INDEX) and sorted(before) == sorted(made.files)
    index = json.loads(before[INDEX])
    assert set(index["weight_map"].values()) == set(pair)
    sizes = [len(before[name]) for name in pair]
    assert abs(sizes[0] - sizes[1]) <= 4 * 96 * 128  # bytes of the largest tensor
    assert len(again.files) > 6
    assert sorted(files(tmp_path / "out")) == sorted((*again.files, "tokenizer.json"))
    first = tmp_path / "first"
    first.mkdir()
    for name, content in before.items():
        (first / name).write_bytes(content)
    one = tensors_of(first)
    assert alike(one, tensors_of(tmp_path / "out")) and one.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in one.values())
    model = Small()
    assert "2 layers held in FP8" in str(fp8compile.load_fp8(model, first))
    assert same(model.up.weight.data_, one["up.weight"])


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


def _replicas(rank: int, folder: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(One(), "tensorwise", torch.ones(32, 128), mesh=mesh)
    apart = nn.Sequential(One(), One())
    for one, name in zip(apart, ("replicate", "shard"), strict=True):
        one.up.weight = nn.Parameter(distribute_tensor(one.up.weight.detach(), mesh[name]))  # type: ignore
    return fp8compile.export(model, folder).files, _error(apart, folder)


@pytest.mark.slow
def test_replicas_of_shards_and_ranks_with_nothing_to_write(tmp_path: Path) -> None:
    """A weight and its scale, on four ranks. Meshes that no rank has whole are refused."""
    said, wrong = zip(*on_ranks(4, _replicas, str(tmp_path), limit=LIMIT), strict=True)
    pair = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert said == ((*pair, "config.json", INDEX),) * 4 and sorted(files(tmp_path)) == sorted(said[0])
    assert tensors_of(tmp_path).keys() == {"up.weight", "up.weight_scale"}
    assert "parameters are on meshes of ranks [0, 2] and [0, 1], which no rank can gather" in wrong[0]


def _error(model: Any, *args: Any, **options: Any) -> str:
    return error_of(lambda: fp8compile.export(model, *args, **options))


def _errors(rank: int, folder: str) -> list[str]:
    model = sharded(Small(), "blockwise", tokens())
    out = Path(folder, "out")
    fp8compile.export(model, out)
    said = [_error(model, out)]
    full = mock.patch("safetensors.torch.save_file", side_effect=OSError("no space left"))
    blind = mock.patch.object(Path, "is_dir", return_value=False)
    for failing in (full, blind):
        with failing if rank == 1 else contextlib.nullcontext():
            said.append(_error(model, out, overwrite=True))
    said.append(_error(model, out, ("fp8", "compressed-tensors")[rank], overwrite=True))
    if rank == 1:
        with torch.no_grad():
            model.down.weight.to_local()[3, 5] = float("nan")
    said.append(_error(model, out, overwrite=True))
    return said


@pytest.mark.cases(test=1, slow=1)
def test_an_error_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    one, two = on_ranks(2, _errors, str(tmp_path), limit=LIMIT)
    assert "has files already (config.json, " in one[0]
    assert two[0].startswith("ExportError: rank 0: ExportError: ") and one[0].partition(": ")[2] in two[0]
    assert one[1] == "ExportError: rank 1: OSError: no space left" and two[1] == "OSError: no space left"
    assert "of the first rank is not here: name a directory that all ranks see" in one[2]
    assert one[3] == two[3] and "ranks that share this model's shards would export other layers" in one[3]
    assert one[4] == two[4] and "down.weight has NaN or infinite values" in one[4]
    assert not any("\n" in text for text in (*one, *two))
    assert len(tensors_of(tmp_path / "out")) == 10 and len(files(tmp_path / "out")) == 4
