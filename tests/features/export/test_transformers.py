"""Exports of a tiny Llama, loaded by transformers, and by compressed-tensors' own decompressor.

On a CPU, transformers runs compressed-tensors checkpoints with weights that are decompressed and inputs that
are quantized and dequantized. A fine-grained FP8 checkpoint is dequantized, and its inputs are not quantized:
here hooks do that.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from tests.features.export.small import WORDS, Small, trained
from tests.support.harness import sqnr
from tests.support.reference_casts import OCP, quantize
from tests.support.served import config_of, serve, tensors_of

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]

BATCHES = 5
# Two implementations that order sums differently, or divide where the other multiplies by an inverse, agree
# to 2**-22 (over 100 dB), until one value rounds to the other FP8 neighbour: its 1/8 spreads through the
# layers after it, to 25 dB at worst. That happens in a part of the batches, so the median has to be high. A
# wrong scale gives under 30 dB in every batch.
MEDIAN_DB, WORST_DB = 60.0, 14.0
E4M3 = OCP[0]


class Logits(nn.Module):
    """A causal language model whose output is the logits."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.inner = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(input_ids=ids).logits


def llama() -> Any:
    sizes = dict(vocab_size=WORDS, hidden_size=128, intermediate_size=256, num_hidden_layers=1)
    heads = dict(num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64)
    how = dict(use_cache=False, attn_implementation="eager")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **how))


def batch(seed: int) -> Tensor:
    return torch.randint(WORDS, (1, 12), generator=torch.Generator().manual_seed(100 + seed))


def exported(
    recipe: str, path: Path, dtype: torch.dtype = torch.float32, format: str | None = None, **options: Any
) -> tuple[Any, Any, fp8compile.Exported]:
    """A trained Llama: the module, its compiled wrapper, and the export."""
    model = llama().to(dtype)
    compiled = trained(Logits(model), 3, recipe, **options)
    return model, compiled, fp8compile.export(model, path, format)


def outputs(model: Any, training: bool = False) -> list[Tensor]:
    """Logits of all batches: in evaluation, or those that the next training call would return."""
    model.train(training)
    with fp8compile.freeze_scaling_state(), torch.set_grad_enabled(training):
        return [model(batch(seed)).detach() for seed in range(BATCHES)]


def assert_alike(ours: list[Tensor], theirs: list[Tensor]) -> None:
    ratios = [sqnr(a, b) for a, b in zip(ours, theirs, strict=True)]
    assert median(ratios) > MEDIAN_DB and min(ratios) > WORST_DB, ratios


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    load = transformers.AutoModelForCausalLM.from_pretrained
    return Logits(load(path, dtype=dtype, attn_implementation="eager"))


@pytest.mark.slow
def test_the_configuration_is_the_models_own(tmp_path: Path) -> None:
    model, _, made = exported("rowwise", tmp_path / "out")
    written = json.loads((made.directory / "config.json").read_text())
    assert written.pop("quantization_config") == config_of(made.directory)
    assert written["architectures"] == ["LlamaForCausalLM"] and written["dtype"] == "float32"
    read, own = transformers.LlamaConfig.from_dict(written).to_dict(), model.config.to_dict()
    assert {key for key in {*read, *own} if read.get(key) != own.get(key)} <= {"architectures", "dtype"}
    assert getattr(model.config, "quantization_config", None) is None
    assert made.ignored == ("model.embed_tokens", "lm_head") and len(made.layers) == 7


@pytest.mark.weekly
@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_loaded_with_compressed_tensors(recipe: str, tmp_path: Path) -> None:
    """By a server in eager, too. With `delayed`, training reads the same scales; evaluation current ones."""
    pytest.importorskip("compressed_tensors")
    # compressed-tensors rounds no scales of inputs
    options = {"power_of_2_scale": False} if recipe == "blockwise" else {}
    model, compiled, made = exported(recipe, tmp_path / "out", format="compressed-tensors", **options)
    theirs = loaded(made.directory)
    held = dict(theirs.inner.named_parameters())
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in held.values()) == len(made.layers) == 7
    for name, tensor in tensors_of(made.directory).items():
        assert torch.equal(held[name].float(), tensor.float()), name
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(held[name], model.get_parameter(name)), name
    ours = outputs(compiled, training=recipe == "delayed")
    assert_alike(ours, outputs(theirs))
    assert_alike(ours, outputs(Logits(serve(llama(), made.directory))))


@pytest.mark.weekly
def test_mxfp8_loaded_with_compressed_tensors_in_bf16(tmp_path: Path) -> None:
    """As it is. Sums that are rounded to bf16 differ in a bit now and then, and so do FP8 values after them:
    about 40 dB. Inputs that are not quantized give 28 dB. Scales of `rowwise` are rounded to bf16; a wrong
    layer is at 0 dB."""
    pytest.importorskip("compressed_tensors")
    policy = {"rules": [{"module": "*mlp*", "recipe": "rowwise"}]}
    model, compiled, made = exported("mxfp8", tmp_path / "out", torch.bfloat16, policy=policy)
    theirs = loaded(made.directory, torch.bfloat16)
    ratios = [sqnr(a, b) for a, b in zip(outputs(compiled), outputs(theirs), strict=True)]
    for name, recipe in made.layers.items():
        if recipe == "mxfp8":
            exact = quantize(model.get_submodule(name).weight, E4M3, (1, 32), rounded=True).exact()
            assert torch.equal(theirs.inner.get_submodule(name).weight.double(), exact), name
    assert len(set(made.layers.values())) == 2 and median(ratios) > 20.0, ratios


@pytest.mark.slow
def test_mxfp8_of_a_float32_model_is_loaded_in_bf16(tmp_path: Path) -> None:
    """As export.md says. In float32, and with `.float()`, transformers refuses."""
    pytest.importorskip("compressed_tensors")
    model, _, made = exported("mxfp8", tmp_path / "out")
    with pytest.raises(RuntimeError, match="expected m1 and m2 to have the same dtype"):
        loaded(made.directory)(batch(0))
    theirs = loaded(made.directory, torch.bfloat16)
    ratios = [sqnr(a, b) for a, b in zip(outputs(Logits(model)), outputs(theirs), strict=True)]
    assert median(ratios) > 20.0, ratios  # of the model in high precision, that is, FP8's own error


@pytest.mark.slow
def test_loaded_with_fine_grained_fp8(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model, compiled, made = exported("blockwise", tmp_path / "out")
    assert made.format == "fp8"
    theirs = loaded(made.directory)

    def quantized(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        rows = args[0].reshape(-1, args[0].shape[-1])
        return (quantize(rows, E4M3, (1, 128), rounded=True).exact().float().reshape(args[0].shape),)

    for name in made.layers:
        layer = theirs.inner.get_submodule(name)
        expected = quantize(model.get_submodule(name).weight, E4M3, (128, 128), rounded=True).exact().float()
        assert torch.equal(layer.weight, expected), name
        layer.register_forward_pre_hook(quantized)
    assert torch.equal(theirs.inner.lm_head.weight, model.lm_head.weight)
    assert_alike(outputs(compiled), outputs(theirs))


def test_which_layers_transformers_converts(tmp_path: Path) -> None:
    """By its rules for names, just the exported layers become FP8, even if a name is the end of another."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    class Parts(nn.ModuleDict):
        def forward(self, ids: Tensor) -> Tensor:
            x = self["net"].embed(ids)
            x = self["net"].down(self["net"].up(x))
            return self["1"](self["11"](x)) + self["net"].head(x)

    parts = Parts({"net": Small(), "1": nn.Linear(128, 96), "11": nn.Linear(128, 128)})
    whole = nn.Sequential(parts)
    trained(whole, 1, "blockwise")
    for i, model in enumerate((whole, parts)):
        made = fp8compile.export(model, tmp_path / f"{i}")
        patterns = config_of(made.directory)["modules_to_not_convert"]
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        assert {name for name in linears if should_convert_module(name, patterns)} == set(made.layers)
    assert "^1$" in patterns
