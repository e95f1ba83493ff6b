"""What cannot be exported: one line that says what, and what to do. Nothing is written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile import ExportError
from tests.features.export.small import Small, trained

pytest.importorskip("safetensors")
pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


def refused(model: nn.Module, path: Path, match: str, **options: Any) -> None:
    with pytest.raises(ExportError, match=match) as error:
        fp8compile.export(model, path, **options)
    assert "\n" not in str(error.value) and isinstance(error.value, ValueError)
    assert not path.exists() or not list(path.iterdir())


def test_encodings_without_a_layout(tmp_path: Path) -> None:
    model = Small()
    trained(model, 1, "tensorwise", fp8_encoding="fnuz")
    refused(model, tmp_path / "out", "up: .*AMD's fnuz encoding.*fp8_encoding='ocp'")


def test_formats(tmp_path: Path) -> None:
    model = Small()
    trained(model, 1, "rowwise")
    wrong = (
        "format must be one of 'compressed-tensors', 'fp8'; got 'compressed_tensor'.*mean "
        "'compressed-tensors'"
    )
    refused(model, tmp_path / "out", wrong, format="compressed_tensor")
    refused(
        model, tmp_path / "out", "128 x 128 elements only, and up was trained with 'rowwise'", format="fp8"
    )
    model = Small(hidden=192)  # blocks that are cut stay in high precision
    trained(model, 1, "blockwise")
    match = "nothing of this Small can be exported in FP8: up: 192 x 128 is no multiple of 128 x 128; down"
    refused(model, tmp_path / "out", match)


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    model = Small()
    trained(model, 1, "rowwise")
    with torch.no_grad():
        model.down.weight[3, 5] = float("nan")
    refused(
        model,
        tmp_path / "out",
        "down.weight has NaN or infinite values: export the last checkpoint that is finite",
    )


def test_directories(tmp_path: Path) -> None:
    model = Small()
    trained(model, 1, "rowwise")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ExportError, match="is a file: name a directory"):
        fp8compile.export(model, tmp_path / "file")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match=r"has files already \(notes.txt\)"):
        fp8compile.export(model, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    assert fp8compile.export(model, tmp_path / "empty").layers


def test_sharded_parameters(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = Small()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.detach(), mesh))
        refused(model, tmp_path / "out", "up has sharded parameters: gather them .*full_state_dict=True")
    finally:
        torch.distributed.destroy_process_group()


def test_parameters_without_values(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expected a torch.nn.Module, not dict"):
        fp8compile.export({}, tmp_path / "out")  # type: ignore[arg-type]
    with torch.device("meta"):
        model = Small()
    refused(model, tmp_path / "out", "embed.weight is on the meta device")


class Adapter(nn.Module):
    """A Linear with a low-rank update, by the names of PEFT."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.base_layer = layer
        self.lora_A, self.lora_B = nn.Linear(layer.in_features, 8), nn.Linear(8, layer.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def test_adapters(tmp_path: Path) -> None:
    model = Small()
    model.up = Adapter(model.up)  # type: ignore[assignment]
    trained(model, 1, "rowwise")
    refused(model, tmp_path / "out", r"up has an adapter that is not merged: call model.merge_and_unload\(\)")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 128)
        self.stack = nn.Parameter(torch.randn(4, 128, 128) / 12)
        self.up = nn.Linear(128, 128)
        self.head = nn.Linear(128, 96)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).flatten(0, 1)
        ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
        y = torch.nn.functional.grouped_mm(x.bfloat16(), self.stack.bfloat16(), offs=ends).float()
        return self.head(self.up(y)).unflatten(0, ids.shape)


def test_experts_stay_in_high_precision(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential()
    model.add_module("moe", Experts())
    trained(model, 1, "tensorwise")
    with caplog.at_level("WARNING", logger="fp8compile"):
        made = fp8compile.export(model, tmp_path / "out")
    assert set(made.layers) == {"moe.up"}
    # the module itself is no name for a server: it would leave out `moe.up` as well
    assert made.left["moe"].startswith("a stack of expert weights") and "moe" not in made.ignored
    assert "moe: a stack of expert weights" in caplog.text


class Others(nn.Module):
    """FP8 matmuls whose weights are no weights of a Linear, or shared."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 128)
        self.plain, self.one = nn.Linear(128, 128), nn.Linear(128, 128)
        self.two = nn.Linear(128, 128)
        self.two.weight = self.one.weight
        self.free = nn.ParameterDict({"w": nn.Parameter(torch.randn(128, 128) / 12)})
        self.fused = nn.Linear(128, 256, bias=False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(128, 128))
        self.head = nn.Linear(128, 96)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.normed(self.two(self.one(self.plain(self.embed(ids))))) @ self.free["w"]
        return self.head(x + nn.functional.linear(x, self.fused.weight[:128]))


def test_other_weights_stay_in_high_precision(tmp_path: Path) -> None:
    model = Others()
    trained(model, 1, "tensorwise")
    made = fp8compile.export(model, tmp_path / "out")
    assert set(made.layers) == {"plain"}
    assert made.left["one"] == "its weight is shared: one, two"
    assert made.left["free"] == "a ParameterDict: servers replace Linear only"
    assert made.left["fused"].startswith("its matmul reads a part of the weight")
    assert {"one", "two", "free", "fused", "normed", "head", "embed"} <= set(made.ignored)


def test_safetensors_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(
        ImportError, match=r"needs safetensors, which is not installed: pip install safetensors"
    ):
        fp8compile.export(Small(), tmp_path / "out")


def test_no_fp8_layer(tmp_path: Path) -> None:
    refused(Small(), tmp_path / "out", "no layer of this Small is known to be FP8: compile it")
    model = Small()
    trained(model, 1, policy={"rules": [{"module": "*", "fp8": "off"}]})
    refused(model, tmp_path / "out", "no layer of this Small is known to be FP8")
    trained(model, 1, "rowwise")
    torch._dynamo.reset()
    refused(model, tmp_path / "out", "no layer")
