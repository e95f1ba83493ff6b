"""`export` of models with adapters of PEFT: beside the base, whose bytes are those that came, or merged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp8compile
from fp8compile import ExportError
from tests.features.export.small import Small, tokens, trained
from tests.features.load.test_load import comes_out, in_fp8
from tests.hosts.test_load import IDS, loaded, released
from tests.support.compressed import compress, tiny
from tests.support.reference_casts import OCP, cast, elements, quantize
from tests.support.served import alike, config_of, same, tensors_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("interpreted")]
BF16, F32 = torch.bfloat16, torch.float32
POLICY = {"extends": "none", "rules": [{"where": "n >= 128", "fp8": "on"}, {"fp8": "off"}]}
TARGETS = ("q_proj", "up_proj")
# by transformers' fine-grained quantizer, with scales of these dtypes
STORED = {"fp8, F32": F32, "fp8, BF16": BF16, "fp8, E8M0": torch.float8_e8m0fnu}


def lora(model: nn.Module, targets: Any = ("up", "down"), r: int = 4, **more: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=r, target_modules=list(targets), **more))


def tuned(model: Any, size: float = 1.0, targets: Any = TARGETS) -> Any:
    """A model with adapters, after a step of training with backend="fp8"."""
    torch.manual_seed(1)
    adapted = lora(model, targets, r=8).train()
    run = torch.compile(adapted, backend="fp8", options={"policy": POLICY, "recipe": "tensorwise"})
    run(input_ids=IDS, labels=IDS).loss.backward()
    assert any(m.decision == "fp8" for m in fp8compile.report(adapted).matmuls)
    with torch.no_grad():
        for p in (p for p in adapted.parameters() if p.requires_grad):
            p.add_(torch.sign(p.grad), alpha=-size * 1e-2)
    return adapted.eval()


def written(path: Path, kind: str, by: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """A released checkpoint: of transformers' fine-grained quantizer, or by compressed-tensors."""
    torch.manual_seed(0)
    return released(path, kind, STORED[by])[1] if by in STORED else compress(tiny(kind, dtype), path, by)


@pytest.mark.parametrize(
    ("kind", "by", "dtype"),
    [
        *(("Llama", "fp8, F32", BF16), ("Qwen3", "fp8, BF16", BF16), ("Llama", "fp8, E8M0", BF16)),
        *(("Qwen3", "tensor", BF16), ("Llama", "block", F32), ("Qwen3", "channel", BF16)),
    ],
)
def test_in_lora_out(kind: str, by: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The base is to the byte what came in. transformers and PEFT load both, with our logits to the bit."""
    tensors = written(tmp_path / "in", kind, by, dtype)
    adapted = tuned(loaded(tmp_path / "in", dtype=dtype))
    names, config = [*adapted.state_dict()], copy.deepcopy(adapted.peft_config)
    made = comes_out(adapted, tmp_path, tensors)
    assert made.format == ("fp8" if by in STORED else "compressed-tensors") and len(made.layers) == 7
    assert made.adapters == {"default": tmp_path / "out" / "adapter"} and not made.merged
    assert [*adapted.state_dict()] == names and adapted.peft_config == config
    adapted.save_pretrained(tmp_path / "peft")
    folders = tmp_path / "peft", made.adapters["default"]
    assert alike(*(load_file(x / "adapter_model.safetensors") for x in folders))
    said = json.loads((made.adapters["default"] / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(tmp_path / "out")
    plain = {}
    if by not in STORED:
        plain["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made.directory, dtype=dtype, **plain)
    both = peft.PeftModel.from_pretrained(theirs, made.adapters["default"]).eval()
    with torch.no_grad():
        expected = adapted(input_ids=IDS).logits
        assert torch.equal(both(input_ids=IDS).logits, expected)
        with both.disable_adapter():
            assert not torch.equal(both(input_ids=IDS).logits, expected)


def update(adapted: Any, name: str) -> Tensor:
    return adapted.base_model.model.get_submodule(name).get_delta_weight("default").detach().float()


@pytest.mark.parametrize("merge", ["fp8", "high_precision"])
def test_a_merged_update(merge: str, tmp_path: Path) -> None:
    """In FP8 by an independent cast of the sum, or in bf16. Other layers keep their bytes."""
    tensors = written(tmp_path / "in", "Qwen3", "fp8, F32", BF16)
    adapted = tuned(loaded(tmp_path / "in"), size=30.0)
    before = {name: x.clone() for name, x in adapted.state_dict().items()}
    made = fp8compile.export(adapted, tmp_path / "out", merge=merge)
    found = load_file(tmp_path / "out" / "model.safetensors")
    changed = [f"model.layers.0.{x}" for x in ("self_attn.q_proj", "mlp.up_proj")]
    assert made.merged.keys() == {*changed} and not made.adapters and not (tmp_path / "out/adapter").exists()
    for name in changed:
        base, delta = exact(tensors, name), update(adapted, name)
        if merge == "fp8":
            expected = quantize(base + delta, OCP[0], (128, 128))
            assert same(found[f"{name}.weight"], expected.values)
            assert same(found[f"{name}.weight_scale_inv"], expected.scale_inv)
            after = expected.exact().float()
        else:
            assert same(found[f"{name}.weight"], (base + delta).to(BF16))
            assert name in made.ignored and f"{name}.weight_scale_inv" not in found
            after = found[f"{name}.weight"].float()
        left = ((after - base) * delta).sum() / delta.square().sum()
        assert made.merged[name] == pytest.approx(float(left), abs=1e-4) and 0.5 < left < 1.1
    others = {name for name in tensors if not any(name.startswith(x) for x in changed)}
    assert all(same(found[name], tensors[name]) for name in others)
    assert all(torch.equal(x, before[name]) for name, x in adapted.state_dict().items())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made.directory, dtype=F32)
    assert torch.equal(theirs.get_submodule(changed[0]).weight, after_of(found, changed[0]))


def exact(tensors: dict[str, Tensor], name: str) -> Tensor:
    """What a weight with blocks stands for, in float32."""
    data, scale = tensors[f"{name}.weight"].float(), tensors[f"{name}.weight_scale_inv"].float()
    return data * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: data.shape[0], : data.shape[1]]


def after_of(tensors: dict[str, Tensor], name: str) -> Tensor:
    return (
        exact(tensors, name) if f"{name}.weight_scale_inv" in tensors else tensors[f"{name}.weight"].float()
    )


@pytest.mark.parametrize("stored", [BF16, torch.float8_e8m0fnu])
def test_the_sum_is_in_the_format_of_the_layer(stored: torch.dtype, tmp_path: Path) -> None:
    """Its scales have the dtype that they came in, and the values fit to these."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(256, 128, bias=False, dtype=BF16))
    tensors = {f"0.{last}": x for last, x in in_fp8(base[0].weight.detach(), stored=stored).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    fp8compile.load_fp8(base, tmp_path)
    adapted = lora(base, ["0"], init_lora_weights=False)
    made = fp8compile.export(adapted, tmp_path / "out", merge="fp8")
    found, total = tensors_of(made.directory), exact(tensors, "0") + update(adapted, "0")
    inverse = quantize(total, OCP[0], (128, 128), rounded=stored != BF16).scale_inv.to(stored)
    scale = elements(1 / inverse.float(), total, (128, 128))
    assert same(found["0.weight_scale_inv"], inverse) and same(found["0.weight"], cast(total, scale, *OCP[0]))
    assert made.merged["0"] > 0.9


def test_what_fp8_would_round_away_is_an_error(tmp_path: Path) -> None:
    written(tmp_path / "in", "Llama", "tensor", BF16)
    adapted = tuned(loaded(tmp_path / "in"), size=0.1)
    refused(adapted, tmp_path, r"leave 0\.[0-4]\d of the update of model.layers.0.*merge='high_precision'")
    assert fp8compile.export(adapted, tmp_path / "beside").adapters


def refused(model: nn.Module, path: Path, match: str, merge: Any = "fp8") -> None:
    with pytest.raises(ExportError, match=match) as caught:
        fp8compile.export(model, path / "no", merge=merge)
    assert "\n" not in str(caught.value) and not (path / "no").exists()


def test_names_are_those_before_peft(tmp_path: Path) -> None:
    """As PEFT's own `unload` restores them, of a base that trains in high precision; two adapters, a module
    that is trained as a whole, and a model around the PeftModel."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lora(Small(), targets=("up", "down", "embed"), modules_to_save=["head"])

        def forward(self, ids: Tensor) -> Tensor:
            return self.inner(ids)

    model = Around()
    model.inner.add_adapter("second", peft.LoraConfig(r=2, target_modules=["down"]))
    trained(model, 2, "tensorwise")
    made = fp8compile.export(model, tmp_path / "out")
    assert made.layers == {"inner.up": "tensorwise", "inner.down": "tensorwise"}
    folder = tmp_path / "out/adapter"
    assert made.adapters == {"default": folder, "second": folder / "second"}
    for folder in made.adapters.values():
        peft.PeftModel.from_pretrained(Small(), folder)
    bare = copy.deepcopy(model.inner).unload()
    expected = {f"inner.{name}": x for name, x in bare.state_dict().items()}
    found = tensors_of(made.directory)
    scales = {name for name in found if name.endswith("weight_scale")}
    assert found.keys() - scales == expected.keys() and len(scales) == 2
    assert not any("lora" in x or "base" in x for x in config_of(made.directory)["ignore"])
    plain = [name for name, x in found.items() if x.dtype == F32 and name not in scales]
    assert all(torch.equal(found[x], expected[x]) for x in plain if "head" not in x) and len(plain) > 5
    merged = fp8compile.export(model, tmp_path / "merged", merge="high_precision")
    assert merged.merged.keys() == {"inner.up", "inner.down", "inner.embed"} and merged.format == ""
    found = tensors_of(merged.directory)
    reference = copy.deepcopy(model.inner).merge_and_unload().state_dict()
    assert found.keys() == expected.keys()
    for name, x in reference.items():
        torch.testing.assert_close(found[f"inner.{name}"], x, rtol=1e-6, atol=1e-7)


def test_a_base_that_is_not_held_is_cast_as_training_casts_it(tmp_path: Path) -> None:
    model = lora(Small())
    trained(model, 2, "delayed")
    made = fp8compile.export(model, tmp_path / "out", merge="fp8")
    found = tensors_of(made.directory)
    assert made.layers == {"up": "delayed", "down": "delayed"} and min(made.merged.values()) > 0.9
    for name in made.layers:
        layer = model.base_model.model.get_submodule(name)
        total = layer.base_layer.weight.detach() + layer.get_delta_weight("default").detach()
        assert f"{name}.input_scale" in found
        stands_for = found[f"{name}.weight"].float() * found[f"{name}.weight_scale"]
        assert float((stands_for - total).norm() / total.norm()) < 0.04


def injected() -> nn.Module:
    return peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["up"]), Small())


def already_merged() -> nn.Module:
    model = lora(Small())
    model.merge_adapter()
    return model


def tied() -> nn.Module:
    model = Small()
    model.head.weight = model.embed.weight
    return lora(model, targets=("embed",))


def on_meta() -> nn.Module:
    return lora(Small()).to("meta")


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "another value": (Small, "bf16", "merge must be one of None, 'fp8', 'high_precision'; got 'bf16'"),
    "no adapter": (Small, "fp8", "this Small has no layer with an adapter of PEFT"),
    "DoRA": (lambda: lora(Small(), use_dora=True), "fp8", "up has a Dora.*: leave merge out"),
    "biases": (lambda: lora(Small(), targets=["up"], lora_bias=True), "high_precision", "has lora_bias=True"),
    "another kind": (
        lambda: peft.get_peft_model(Small(), peft.LoHaConfig(r=2, target_modules=["up"])),
        "fp8",
        "up is a loha.layer.Linear, and only LoRA of Linears and Embeddings can be merged",
    ),
    "no PeftModel": (injected, None, "no PeftModel holds its adapters.*make one by peft.get_peft_model"),
    "a mixed model": (
        lambda: peft.get_peft_model(Small(), peft.LoraConfig(r=4, target_modules=["up"]), mixed=True),
        "high_precision",
        "the model is a PeftMixedModel of PEFT, and names below it could not be restored",
    ),
    "merged already": (already_merged, None, "up has an adapter that is merged, and still there"),
    "no values": (on_meta, "fp8", "embed.weight is on the meta device, without values"),
    "a shared weight": (tied, "high_precision", "embed has a weight that another module shares"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    build, merge, message = REFUSED[case]
    refused(build(), tmp_path, message, merge)


def test_an_injected_adapter_can_be_merged(tmp_path: Path) -> None:
    model = injected()
    trained(model, 1, "tensorwise")
    made = fp8compile.export(model, tmp_path / "out", merge="high_precision")
    assert made.merged.keys() == {"up"} and made.layers.keys() == {"down"}
    assert model(tokens()).shape == (2, 16, 96)
