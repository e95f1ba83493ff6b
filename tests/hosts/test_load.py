"""`integrations.transformers.load_fp8`: a released checkpoint in transformers' vanilla class, with PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import fp8compile
from fp8compile import LoadError
from tests.features.load.test_load import in_fp8, values
from tests.support.served import same

pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("interpreted")]
BF16 = torch.bfloat16
IDS = torch.arange(16).reshape(1, 16)


def config(kind: str) -> Any:
    import transformers

    sizes = dict(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1, head_dim=32)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
    return getattr(transformers, f"{kind}Config")(**sizes, **heads, use_cache=False, tie_word_embeddings=True)


def released(
    folder: Path, kind: str = "Qwen3", stored: torch.dtype = torch.float32
) -> tuple[Any, dict[str, Tensor]]:
    """A vanilla model with the values of a checkpoint in FP8 that is written; the tensors of this."""
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}ForCausalLM")
    made(config(kind)).to(BF16).save_pretrained(folder)
    plain = made.from_pretrained(folder, dtype=BF16)  # whose rotary angles are in float32
    tensors: dict[str, Tensor] = {}
    for name, x in plain.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        stem = name.removesuffix(".weight")
        parts = in_fp8(x, stored=stored) if "_proj" in name else {"weight": x.clone()}
        tensors |= {f"{stem}.{last}": part for last, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name, module in plain.named_modules():
        if "_proj" in name:
            module.weight.data.copy_(values(tensors, name))
    return plain, tensors


def loaded(folder: Path, **more: Any) -> Any:
    from fp8compile.integrations.transformers import load_fp8

    return load_fp8(folder, **more)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_the_vanilla_model_with_the_bytes_of_the_file(kind: str, tmp_path: Path) -> None:
    plain, tensors = released(tmp_path, kind)
    model = loaded(tmp_path)
    assert type(model) is type(plain) and not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
    held = {name for name, p in model.named_parameters() if p in fp8compile.fp8_parameters(model)}
    assert held == {f"{name.removesuffix('_scale_inv')}" for name in tensors if name.endswith("_scale_inv")}
    layer = model.model.layers[0].mlp.up_proj
    assert same(layer.weight.data_, tensors["model.layers.0.mlp.up_proj.weight"])
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)
        made = [x.generate(IDS, max_new_tokens=4, do_sample=False) for x in (model, plain)]
    assert torch.equal(*made)


def test_wider_than_the_files(tmp_path: Path) -> None:
    released(tmp_path)
    model = loaded(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model(input_ids=IDS).logits.isfinite().all()


def test_peft_by_its_ordinary_call(tmp_path: Path) -> None:
    released(tmp_path)
    model = loaded(tmp_path, use_cache=False)
    wanted = peft.LoraConfig(r=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, wanted).train()
    adapted.compile(backend="fp8", options={"policy": {"rules": [{"where": "n >= 128", "fp8": "on"}]}})
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained and all("lora" in name for name in trained)
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in trained.values())
    found = [m for m in fp8compile.report(adapted).matmuls if m.fqn.endswith("base_layer")]
    used = {(m.decision, m.recipe) for m in found}
    assert used == {("fp8", "blockwise")}
    adapted.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_folders_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="there is no config.json: huggingface_hub.snapshot_download"):
        loaded(tmp_path)
    released(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("Qwen3ForCausalLM", "Qwen99ForCausalLM"))
    with pytest.raises(LoadError, match="has no Qwen99ForCausalLM"):
        loaded(tmp_path)
    assert torch.get_default_dtype() == torch.float32
    path.write_text("{")
    with pytest.raises(LoadError, match="config.json: OSError: ") as caught:
        loaded(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["qwen3", "unknown"])
def test_code_in_a_folder_is_not_executed(kind: str, tmp_path: Path) -> None:
    """Nobody is asked, either. A class that transformers has is taken from there."""
    released(tmp_path)
    path, executed = tmp_path / "config.json", tmp_path / "executed"
    auto = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": kind, "auto_map": auto}))
    (tmp_path / "own.py").write_text(f"open({str(executed)!r}, 'w')\n")
    if kind == "qwen3":
        assert type(loaded(tmp_path)).__name__ == "Qwen3ForCausalLM"
    else:
        with pytest.raises(LoadError, match="config.json: ValueError: .*custom code") as caught:
            loaded(tmp_path)
        assert "\n" not in str(caught.value)
    assert not executed.exists()
