"""What an export writes: bytes and scales of weights, names, configuration, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.features.export.exported_layers import obstacle
from fp8compile.features.export.forwards import Forward
from tests.features.export.small import (
    FP8,
    Small,
    decompressed,
    evaluated,
    exported,
    next_forward,
    tokens,
    trained,
)
from tests.support.harness import load_scaling, sqnr
from tests.support.hooks import phases_afresh, slots_of
from tests.support.models import SwiGlu
from tests.support.reference_casts import OCP, Quantized, quantize
from tests.support.served import alike, config_of, same, serve, tensors_of

pytest.importorskip("safetensors")
pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]

E4M3 = OCP[0]
# recipe -> (blocks of a weight that share a scale, whether scales are powers of two)
CURRENT = {"tensorwise": ((0, 0), False), "rowwise": ((1, 0), False), "blockwise": ((128, 128), True)}
# The order of float32 sums, and 1 / scale against scale, move results by 2**-24, or let one value in some
# 100,000 round to the other neighbour. Other scales, or another block, give 20 to 30 dB.
CLOSE_DB = 60.0


def stored(directory: Path, name: str) -> Quantized:
    """A weight of a checkpoint with its scales."""
    tensors = tensors_of(directory)
    key = f"{name}.weight_scale_inv" if f"{name}.weight_scale_inv" in tensors else f"{name}.weight_scale"
    return Quantized(tensors[f"{name}.weight"], tensors[key], (0, 0))


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [("tensorwise", torch.float32), ("blockwise", torch.float32), ("rowwise", torch.bfloat16)],
)
def test_bytes_and_scales_of_current_scaling(recipe: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A server computes with them what evaluation computes."""
    model, compiled, made = exported(tmp_path, recipe, Small().to(dtype), 2)
    block, rounded = CURRENT[recipe]
    for name in FP8:
        weight = model.get_submodule(name).weight
        expected, found = quantize(weight, E4M3, block, rounded=rounded), stored(made.directory, name)
        assert same(found.values, expected.values), name
        assert found.scale_inv.dtype == torch.float32
        assert torch.equal(found.scale_inv.reshape(expected.scale_inv.shape), expected.scale_inv), name
    if dtype == torch.float32:
        theirs = serve(Small(), made.directory, rounded=rounded)(tokens(9))
        assert sqnr(evaluated(compiled, tokens(9)), theirs) > CLOSE_DB


class Gated(nn.Module):
    """A language model whose activations have more digits than bf16 before they are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(96, 256), nn.Linear(256, 96)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(256, 512), "down": nn.Linear(512, 256, bias=False)})
            for _ in range(3)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block["down"](nn.functional.gelu(block["up"](nn.functional.rms_norm(x, (256,)))))
        return self.lm_head(x)


@pytest.mark.parametrize("power_of_2", [False, True])
def test_a_vllm_server_computes_what_training_does(power_of_2: bool, tmp_path: Path) -> None:
    """Logits of a bf16 model, if Inductor rounds between operators as eager mode does. Without `serve`, most
    differ, because what is cast is not rounded to bf16 before."""
    found = {}
    for name, options in {"with": {"policy": "vllm"}, "without": {"recipe": "blockwise"}}.items():
        torch.manual_seed(0)
        model = Gated().bfloat16()
        with torch._inductor.config.patch(emulate_precision_casts=True):
            options["power_of_2_scale"] = power_of_2
            out = torch.compile(model, backend="fp8", options=options)(tokens(9))
            out.float().logsumexp(-1).mean().backward()
        made = fp8compile.export(model, tmp_path / name)
        assert made.ignored == ("embed", "lm_head") and len(made.layers) == 6
        with torch.no_grad():
            theirs = serve(Gated().bfloat16(), made.directory, rounded=power_of_2, vllm=True)(tokens(9))
        found[name] = (out == theirs).float().mean().item()
    assert found["with"] > 0.98 and found["without"] < 0.5, found  # float32 sums have another order


@pytest.mark.parametrize("recipe", CURRENT)
def test_the_decompressor_of_compressed_tensors(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model, _, made = exported(tmp_path, recipe, format="compressed-tensors")
    block, rounded = CURRENT[recipe]
    for name, found in decompressed(made.directory, FP8).items():
        expected = quantize(model.get_submodule(name).weight, E4M3, block, rounded=rounded).exact().float()
        assert found.dtype == torch.float32 and torch.equal(found, expected), name


@pytest.mark.slow
def test_margin_and_power_of_2_are_in_the_scale(tmp_path: Path) -> None:
    """And a layer whose fprop is not FP8 is left."""
    rules = {"rules": [{"module": "down", "override_linear_precision": [True, False, False]}]}
    options: Any = {"margin": (0, 1, 0), "power_of_2_scale": True, "policy": rules}
    model, _, made = exported(tmp_path, "tensorwise", **options)
    expected, found = quantize(model.up.weight, E4M3, margin=1, rounded=True), stored(made.directory, "up")
    assert same(found.values, expected.values) and found.scale_inv.item() == expected.scale_inv.item()
    assert set(made.layers) == {"up"} and tensors_of(made.directory)["down.weight"].dtype == torch.float32


@pytest.mark.slow
def test_delayed_takes_the_scales_of_its_state(tmp_path: Path) -> None:
    model = Small()
    compiled = trained(model, 4)
    with torch.no_grad():
        model.up.weight.mul_(1.5)  # beyond its history: what does not fit saturates, as in training
    made = fp8compile.export(compiled, tmp_path / "out")
    tensors = tensors_of(made.directory)
    for name in FP8:
        slots = {role: slots_of(model)[f"{name}.weight", role, 0] for role in ("weight", "input")}
        expected = quantize(model.get_submodule(name).weight, E4M3, scale=slots["weight"].scale())
        assert same(tensors[f"{name}.weight"], expected.values), name
        assert tensors[f"{name}.weight_scale"].tolist() == [slots["weight"].scale_inv()]
        assert tensors[f"{name}.input_scale"].tolist() == [slots["input"].scale_inv()]
    values = tensors["up.weight"].float()
    assert (values.abs() == 448.0).sum() > 10
    theirs = serve(Small(), made.directory)(tokens(9))
    assert sqnr(next_forward(compiled, tokens(9)), theirs) > CLOSE_DB


def test_torchs_default_dtype_is_that_of_no_scale(tmp_path: Path) -> None:
    model = Small()
    compiled = trained(model, 2)
    usual = tensors_of(fp8compile.export(compiled, tmp_path / "usual").directory)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = tensors_of(fp8compile.export(compiled, tmp_path / "out").directory)
    finally:
        torch.set_default_dtype(torch.float32)
    assert alike(found, usual) and "up.input_scale" in found


@pytest.mark.feature("schedule")
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_the_warm_up_of_a_schedule_is_training(recipe: str, tmp_path: Path) -> None:
    """An export in it is what FP8 begins with: the warm-up keeps the histories."""
    model = Small()
    with phases_afresh():
        compiled = trained(model, 2, recipe, policy={"schedule": {"warmup_steps": 3}})
        made = fp8compile.export(model, tmp_path / "out")
        assert made.layers == dict.fromkeys(FP8, recipe)
        assert ("up.input_scale" in tensors_of(made.directory)) is (recipe == "delayed")
        theirs = serve(Small(), made.directory)(tokens(9))
        assert sqnr(next_forward(compiled, tokens(9)), theirs) < CLOSE_DB
        fp8compile.set_precision("fp8", model)
        assert sqnr(next_forward(compiled, tokens(9)), theirs) > CLOSE_DB


def test_delayed_without_a_history_takes_the_current_amax(tmp_path: Path) -> None:
    """After an overflow training scales by the current amax, and so does the export."""
    model = Small()
    compiled = trained(model, 2)
    load_scaling(model, None)
    made = fp8compile.export(compiled, tmp_path / "out")
    assert "up.input_scale" not in tensors_of(made.directory)
    assert same(stored(made.directory, "up").values, quantize(model.up.weight, E4M3).values)
    model = Small()
    compiled = trained(model, 2)
    with torch.no_grad():
        model.up.weight.mul_(8.0)
    compiled(tokens(5)).sum().backward()
    made = fp8compile.export(compiled, tmp_path / "other")
    assert same(stored(made.directory, "up").values, quantize(model.up.weight, E4M3).values)
    slot = slots_of(model)["down.weight", "weight", 0]
    assert stored(made.directory, "down").scale_inv.item() == slot.scale_inv()


class UsedTwice(nn.Module):
    """One layer, first on small inputs, then on larger ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(96, 128), nn.Linear(128, 128), nn.Linear(128, 96)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(50.0 * torch.tanh(self.layer(self.embed(ids)))))


@pytest.mark.slow
def test_a_layer_that_is_used_twice_takes_the_range_of_both_inputs(tmp_path: Path) -> None:
    model, _, made = exported(tmp_path, "delayed", UsedTwice(), 2)
    small, large = (slots_of(model)["layer.weight", "input", use].scale_inv() for use in (0, 1))
    assert small < large and tensors_of(made.directory)["layer.input_scale"].tolist() == [large]


def test_merged_weights_share_a_scale(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(96, 128), SwiGlu(), nn.Linear(128, 96))
    gate, up = model[1].gate.weight, model[1].up.weight  # type: ignore[union-attr]
    with torch.no_grad():
        up.mul_(4.0)
    *_, made = exported(tmp_path, "tensorwise", model, merge_matmuls=True)
    assert any("merged" in x.how for x in fp8compile.report(model).matmuls if x.gemm == "fprop")
    scale = 1.0 / quantize(up, E4M3).scale_inv.double().item()
    for name, weight in {"1.gate": gate, "1.up": up}.items():
        expected = quantize(weight, E4M3, scale=scale).values
        assert same(stored(made.directory, name).values, expected), name
    assert gate.abs().max() < up.abs().max()


def test_what_is_not_fp8_is_written_as_it_is(tmp_path: Path) -> None:
    model = Small()
    trained(model, 1, "rowwise")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = fp8compile.export(model, tmp_path / "out")
    assert made.ignored == ("embed", "head") and not made.left
    assert made.layers == dict.fromkeys(FP8, "rowwise")
    tensors = tensors_of(made.directory)
    for name, tensor in before.items():
        assert torch.equal(model.state_dict()[name], tensor), f"{name} of the model has changed"
        if name not in ("up.weight", "down.weight"):
            assert torch.equal(tensors.pop(name), tensor), name
    assert sorted(tensors) == ["down.weight", "down.weight_scale", "up.weight", "up.weight_scale"]


def test_scales_that_no_format_has() -> None:
    """Inputs scaled by rows, weights by 128 x 128: servers would scale inputs otherwise than training did."""
    weight, data = fp8compile.Recipe("blockwise"), fp8compile.Recipe("rowwise")
    made = Forward("new", weight=weight.scaling("weight", "fprop"), data=data.scaling("input", "fprop"))
    layer = nn.Linear(128, 128)
    assert obstacle(layer, layer.weight, (made,), ["up"]) == "no format has the scales of recipe 'new'"


def _config(path: Path, recipe: str, **options: Any) -> dict[str, Any]:
    *_, made = exported(path / f"{len(list(path.iterdir()))}", recipe, steps=2, **options)
    return config_of(made.directory)


# recipe, options -> what has a scale, of a weight and of an input; whether servers compute that of an input
SCHEMES: list[tuple[str, dict[str, Any], str, str, bool]] = [
    ("rowwise", {}, "channel", "token", True),
    ("rowwise", {"weight_tiles": True}, "tensor", "token", True),
    ("delayed", {}, "tensor", "tensor", False),
    ("tensorwise", {}, "tensor", "tensor", True),
]


@pytest.mark.slow
def test_configurations(tmp_path: Path) -> None:
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    for recipe, options, weights, inputs, dynamic in SCHEMES:
        (group,) = _config(tmp_path, recipe, **options)["config_groups"].values()
        assert group["weights"] == {**fp8, "strategy": weights, "dynamic": False}
        assert group["input_activations"] == {**fp8, "strategy": inputs, "dynamic": dynamic}
        assert group["targets"] == ["Linear"]
    assert _config(tmp_path, "blockwise") == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["embed", "head"],
    }
    (group,) = _config(tmp_path, "blockwise", format="compressed-tensors")["config_groups"].values()
    assert group["weights"]["block_structure"] == [128, 128]
    assert group["input_activations"]["group_size"] == 128
    mixed = _config(tmp_path, "rowwise", policy={"rules": [{"module": "down", "recipe": "blockwise"}]})
    assert mixed["quant_method"] == "compressed-tensors" and mixed["ignore"] == ["embed", "head"]
    assert [group["targets"] for group in mixed["config_groups"].values()] == [["up"], ["down"]]


def test_files(tmp_path: Path) -> None:
    """An older checkpoint goes when the new one is written."""
    (tmp_path / "out").mkdir()
    model, _, made = exported(tmp_path, "tensorwise")
    files = {path.name: path.read_bytes() for path in made.directory.iterdir()}
    assert sorted(files) == sorted(made.files) == ["config.json", "model.safetensors"]
    whole = tensors_of(made.directory)
    with pytest.raises(fp8compile.ExportError, match="is a file: name a directory"):
        fp8compile.export(model, made.directory / "config.json")
    with pytest.raises(fp8compile.ExportError, match=r"has files already \(config.json, .*overwrite=True"):
        fp8compile.export(model, made.directory)
    full = mock.patch("safetensors.torch.save_file", side_effect=OSError("no space left on device"))
    with full, pytest.raises(OSError, match="no space"):
        fp8compile.export(model, made.directory, overwrite=True)
    assert {path.name: path.read_bytes() for path in made.directory.iterdir()} == files
    (made.directory / "tokenizer.json").write_text("{}")
    again = fp8compile.export(model, made.directory, overwrite=True, max_shard_size=40_000)
    names = {path.name for path in made.directory.iterdir()}
    assert names == {*again.files, "tokenizer.json"} and "model.safetensors" not in names and len(names) > 4
    index = json.loads((made.directory / "model.safetensors.index.json").read_text())
    assert alike(tensors_of(made.directory), whole) and set(index["weight_map"]) == set(whole)


def test_tied_and_overlapping_tensors_have_their_own_memory(tmp_path: Path) -> None:
    model = Small()
    model.head.weight = model.embed.weight
    buffer = torch.arange(8.0)
    model.register_buffer("first", buffer[:4])
    model.register_buffer("second", buffer[2:6])
    trained(model, 1, "tensorwise")
    tensors = tensors_of(fp8compile.export(model, tmp_path / "out").directory)
    assert "head.weight" not in tensors and torch.equal(tensors["embed.weight"], model.embed.weight)
    assert tensors["first"].tolist() == [0, 1, 2, 3] and tensors["second"].tolist() == [2, 3, 4, 5]


class Block(nn.Module):
    """Two layers that read one tensor: their input has one history, which belongs to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate(x) + torch.tanh(self.up(x))


@pytest.mark.slow
def test_blocks_that_are_compiled_one_by_one(tmp_path: Path) -> None:
    """All blocks run the code of one graph; each has scales of its own."""

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Embedding(96, 128), Block(), Block(), Block(), nn.Linear(128, 96))

    model = build()
    for block in model[1:4]:
        block.compile(backend="fp8")
    for step in range(3):
        model(tokens(step)).logsumexp(-1).mean().backward()
    made = fp8compile.export(model, tmp_path / "out")
    tensors = tensors_of(made.directory)
    assert list(made.layers) == [f"{i}.{name}" for i in (1, 2, 3) for name in ("gate", "up")]
    scales = [tensors[f"{i}.up.input_scale"].item() for i in (1, 2, 3)]
    assert len(set(scales)) == 3
    for i, scale in zip((1, 2, 3), scales, strict=True):
        assert tensors[f"{i}.gate.input_scale"].item() == scale
        assert slots_of(model)[f"{i}.gate.weight", "input", 0].scale_inv() == scale
        assert (f"{i}.up.weight", "input", 0) not in slots_of(model)
    model.train()
    theirs = serve(build(), made.directory)(tokens(9))
    assert sqnr(next_forward(model, tokens(9)), theirs) > CLOSE_DB
