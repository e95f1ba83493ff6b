"""Mixtures of experts of transformers, whose released checkpoints have a tensor for each expert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fp8compile
from tests.features.load.test_load import comes_out, in_fp8, values
from tests.hosts.test_load import BF16, IDS, loaded
from tests.support.served import alike, config_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("interpreted")]
SIZES = dict(vocab_size=64, hidden_size=128, intermediate_size=256, moe_intermediate_size=128)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32, num_experts_per_tok=2)
LATENT = dict(q_lora_rank=64, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32)
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": dict(num_hidden_layers=1, num_experts=4, head_dim=32),
    "DeepseekV3": dict(
        num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=4, n_group=2, topk_group=1, **LATENT
    ),
}


def released(folder: Path, kind: str) -> tuple[Any, dict[str, Tensor]]:
    """A model of transformers with the values of a checkpoint in FP8, which is written, and its tensors.
    Their names are those of transformers' own `save_pretrained`."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **KINDS[kind], use_cache=False)
    cls = getattr(transformers, f"{kind}ForCausalLM")
    source = cls(config).to(BF16)
    for module in source.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.float()  # as DeepSeek's files have a router's bias
            module.weight.data = module.weight.data.to(BF16)
    source.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    dequantized: dict[str, Tensor] = {}
    for name, x in load_file(file).items():
        stem = name.removesuffix(".weight")
        if stem.endswith("_proj") or "_proj_" in stem:
            made = {f"{stem}.{last}": part for last, part in in_fp8(x).items()}
            dequantized[name] = values(made, stem)
            tensors |= made
        else:
            dequantized[name] = tensors[name] = x.clone()
    save_file(dequantized, file, metadata={"format": "pt"})
    plain = cls.from_pretrained(folder, dtype=BF16, experts_implementation="grouped_mm")
    save_file(tensors, file, metadata={"format": "pt"})
    return plain.eval(), tensors


@pytest.mark.parametrize("kind", KINDS)
def test_in_lora_out(kind: str, tmp_path: Path) -> None:
    """Logits are those of the dequantized model, to the bit; after a step of LoRA on attention the checkpoint
    comes out as it went in, also by `served_weights`; and experts were multiplied by their bytes."""
    plain, tensors = released(tmp_path / "in", kind)
    assert any(".experts.3.down_proj.weight" in name for name in tensors)
    model = loaded(tmp_path / "in", experts_implementation="grouped_mm")
    assert len([p for p in fp8compile.fp8_parameters(model) if p.dim() == 3]) == 2
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    wanted = peft.LoraConfig(r=8, target_modules=["o_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, wanted).train()
    policy = {"extends": "none", "rules": [{"where": "n >= 128 and k >= 128", "fp8": "on"}, {"fp8": "off"}]}
    adapted.compile(backend="fp8", options={"policy": policy})
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        adapted(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    grouped = [m for m in fp8compile.report(adapted).matmuls if m.groups]
    assert {(m.gemm, m.recipe, m.decision) for m in grouped} >= {("fprop", "blockwise", "fp8")}
    assert {m.decision for m in grouped} == {"fp8"}
    said = comes_out(adapted, tmp_path, tensors)
    assert alike(dict(fp8compile.served_weights(adapted)), tensors)
    assert said.adapters["default"].is_dir()
    config = config_of(tmp_path / "out")
    assert config["quant_method"] == "fp8"
    assert not any("experts" in name and "shared" not in name for name in config["modules_to_not_convert"])
