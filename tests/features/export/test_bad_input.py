"""What cannot be exported: one line that says what, and what to do. Nothing is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import fp8compile
from fp8compile import ExportError
from tests.features.export.small import Small, exported, trained

pytest.importorskip("safetensors")
pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


def refused(model: nn.Module, path: Path, match: str, **options: Any) -> None:
    with pytest.raises(ExportError, match=match) as error:
        fp8compile.export(model, path / "out", **options)
    assert "\n" not in str(error.value) and isinstance(error.value, ValueError)
    assert not (path / "out").exists()


class Adapter(nn.Module):
    """A Linear with a low-rank update, by the names of PEFT."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.base_layer = layer
        self.lora_A, self.lora_B = nn.Linear(layer.in_features, 8), nn.Linear(8, layer.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def adapted() -> Small:
    model = Small()
    model.up = Adapter(model.up)  # type: ignore[assignment]
    return model


CUT = "nothing of this Small can be exported in FP8: up: 192 x 128 is no multiple of 128 x 128; down"
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "AMD's encoding": (Small, {"fp8_encoding": "fnuz"}, "up: .*AMD's fnuz encoding.*fp8_encoding='ocp'"),
    "blocks that are cut": (lambda: Small(hidden=192), {"recipe": "blockwise"}, CUT),
    "an adapter": (adapted, {}, "up has an adapter that PEFT did not make, .*: add it to base_layer"),
    "all off": (Small, {"policy": {"rules": [{"fp8": "off"}]}}, "no layer of this Small is known to be FP8"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, tmp_path: Path) -> None:
    build, options, match = MODELS[name]
    model = build()
    trained(model, 1, **{"recipe": "tensorwise", **options})
    refused(model, tmp_path, match)


def test_formats_values_and_compiled_code_that_is_gone(tmp_path: Path) -> None:
    model = Small()
    refused(model, tmp_path, "no layer of this Small is known to be FP8: compile it")
    trained(model, 1, "rowwise")
    wrong = "format must be one of 'compressed-tensors', 'fp8'; got 'compressed_tensor'"
    refused(model, tmp_path, f"{wrong}.*mean 'compressed-tensors'", format="compressed_tensor")
    wrong = "128 x 128 elements only, and up was trained with 'rowwise'"
    refused(model, tmp_path, wrong, format="fp8")
    with torch.no_grad():
        model.down.weight[3, 5] = float("nan")
    wrong = "down.weight has NaN or infinite values: export the last checkpoint that is finite"
    refused(model, tmp_path, wrong)
    torch._dynamo.reset()
    refused(model, tmp_path, "no layer")


def test_parameters_of_fsdp1(tmp_path: Path, one_process: str) -> None:
    model = FullyShardedDataParallel(Small(), device_id=torch.device("cpu"))
    refused(model, tmp_path, "the model is sharded by FSDP1: take fully_shard .*full_state_dict=True")


def test_parameters_without_values(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expected a torch.nn.Module, not dict"):
        fp8compile.export({}, tmp_path / "out")  # type: ignore[arg-type]
    with torch.device("meta"):
        model = Small()
    refused(model, tmp_path, "embed.weight is on the meta device")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(4, 128, 128) / 12)
        self.up = nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
        y = torch.nn.functional.grouped_mm(x.flatten(0, 1).bfloat16(), self.stack.bfloat16(), offs=ends)
        return self.up(y.float()).view(x.shape)


class Others(nn.Module):
    """FP8 matmuls whose weights are no weights of a Linear, or shared."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.moe = nn.Embedding(128, 128), Experts()
        self.plain, self.one, self.two = (nn.Linear(128, 128) for _ in range(3))
        self.two.weight = self.one.weight
        self.free = nn.ParameterDict({"w": nn.Parameter(torch.randn(128, 128) / 12)})
        self.fused = nn.Linear(128, 256, bias=False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(128, 128))
        self.head = nn.Linear(128, 96)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.normed(self.two(self.one(self.plain(self.moe(self.embed(ids)))))) @ self.free["w"]
        return self.head(x + nn.functional.linear(x, self.fused.weight[:128]))


def test_other_weights_stay_in_high_precision(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="fp8compile"):
        *_, made = exported(tmp_path, "tensorwise", Others())
    assert set(made.layers) == {"plain", "moe.up"}
    assert made.left["one"] == "its weight is shared: one, two"
    assert made.left["free"] == "a ParameterDict: servers replace Linear only"
    assert made.left["fused"].startswith("its matmul reads a part of the weight")
    assert {"one", "two", "free", "fused", "normed", "head", "embed"} <= set(made.ignored)
    # the module itself is no name for a server: it would leave out `moe.up` as well
    assert made.left["moe"].startswith("a stack of expert weights") and "moe" not in made.ignored
    assert "moe: a stack of expert weights" in caplog.text


def test_safetensors_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    wrong = "needs safetensors, which is not installed: pip install safetensors"
    with pytest.raises(ImportError, match=wrong):
        fp8compile.export(Small(), tmp_path / "out")
