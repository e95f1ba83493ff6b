"""Checkpoints that compressed-tensors' own compressor has written: held, and written again as they were."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fp8compile
from tests.features.load.test_load import comes_out
from tests.support.compressed import compress, tiny
from tests.support.harness import sqnr
from tests.support.served import config_of, same

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]
BF16, F32 = torch.bfloat16, torch.float32
IDS = torch.arange(16).reshape(1, 16)


@pytest.mark.parametrize(
    ("kind", "strategy", "dtype"),
    [
        ("Llama", "tensor", F32),
        ("Qwen3", "tensor", BF16),
        ("Llama", "block", BF16),
        ("Qwen3", "block", F32),
        ("Llama", "channel", F32),
        ("Qwen3", "channel", BF16),
    ],
)
def test_in_and_out(kind: str, strategy: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of a model that nothing has compiled or called: the same tensors, and the scheme of the file. Its
    values are those of compressed-tensors' own decompressor, to the bit; so are logits in eager mode."""
    theirs, model = (tiny(kind, dtype) for _ in range(2))
    tensors = compress(theirs, tmp_path / "in", strategy)
    said = fp8compile.load_fp8(model, tmp_path / "in")
    assert len(said.layers) == 7 and len(fp8compile.fp8_parameters(model)) == 7
    made = comes_out(model, tmp_path, tensors)
    assert made.format == "compressed-tensors" and made.layers.keys() == said.layers.keys()
    assert scheme(tmp_path / "out") == scheme(tmp_path / "in")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        made.directory, dtype=dtype, attn_implementation="eager"
    )
    with torch.no_grad():
        again(input_ids=IDS)  # which decompresses
        for name in said.layers:
            expected = again.get_submodule(name).weight
            assert same(model.get_submodule(name).weight.dequantized(), expected), name
        plain = tiny(kind, dtype)
        plain.load_state_dict(model.state_dict())
        assert torch.equal(plain(input_ids=IDS).logits, model(input_ids=IDS).logits)
        if dtype == F32:
            recipes = {"tensor": "tensorwise", "block": "blockwise", "channel": "rowwise"}
            assert_logits(model, again, recipes[strategy])


def assert_logits(model: Any, theirs: Any, recipe: str) -> None:
    """In FP8 as compressed-tensors has them, which quantizes inputs, too, and rounds no scale: over 100 dB,
    until a value rounds to the other neighbour (see tests/features/export/test_transformers.py)."""
    policy = {"extends": "none", "eval": "fp8", "rules": [{"module": "lm_head", "fp8": "off"}, {"fp8": "on"}]}
    options = {"policy": policy, "recipe": recipe, "power_of_2_scale": False}
    compiled = torch.compile(model, backend="fp8", options=options)
    batches = [torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(i)) for i in range(5)]
    ratios = [sqnr(compiled(input_ids=x).logits, theirs(input_ids=x).logits) for x in batches]
    assert median(ratios) > 60 and min(ratios) > 14, ratios
    assert sum(m.decision == "fp8" for m in fp8compile.report(model).matmuls) == 7


def scheme(folder: Path) -> list[tuple[Any, ...]]:
    """What has a scale, in each group, and which modules stay."""
    config = config_of(folder)
    assert "lm_head" in config["ignore"]
    keys = "strategy", "num_bits", "type", "block_structure", "dynamic"
    groups = config["config_groups"].values()
    return [tuple(x["weights"].get(key) for key in keys) for x in groups]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_one_scale_of_each_name_and_shape(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """As it came, except that compressed-tensors takes the shape [1] only. transformers loads it."""
    model = tiny("Llama", F32, hidden_size=256, head_dim=64)  # [1, 1] is no block of 128 x 128
    tensors = {key: x.clone() for key, x in model.state_dict().items() if key != "lm_head.weight"}
    for key in [key for key in tensors if "_proj" in key]:
        scale = tensors[key].abs().max() / 448
        tensors[key] = (tensors[key] / scale).to(torch.float8_e4m3fn)
        tensors[key.removesuffix("weight") + name] = scale.reshape(shape)
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    fp8compile.load_fp8(model, tmp_path / "in")
    form = "fp8" if name.endswith("inv") else "compressed-tensors"
    if form != "fp8":
        tensors = {key: x.reshape(1) if "scale" in key else x for key, x in tensors.items()}
    made = comes_out(model, tmp_path, tensors)
    assert made.format == form
    if form == "fp8":
        pytest.importorskip("accelerate")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made.directory, dtype=F32)
    with torch.no_grad():
        theirs(input_ids=IDS)
        for layer in made.layers:
            assert torch.equal(theirs.get_submodule(layer).weight, model.get_submodule(layer).weight), layer


def test_another_format_than_the_one_it_came_in(tmp_path: Path) -> None:
    """Blocks have other names there, and the same bytes."""
    model = tiny("Llama", BF16)
    tensors = compress(tiny("Llama", BF16), tmp_path / "in", "block")
    fp8compile.load_fp8(model, tmp_path / "in")
    renamed = {f"{name}_inv" if name.endswith("_scale") else name: x for name, x in tensors.items()}
    comes_out(model, tmp_path, renamed, format="fp8")
