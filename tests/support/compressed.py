"""Checkpoints in FP8 by compressed-tensors' own compressor: an oracle that is not ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WEIGHTS: dict[str, dict[str, Any]] = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    "block": {"strategy": "block", "block_structure": [128, 128]},
}
INPUTS: dict[str, dict[str, Any]] = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "token"},
    "block": {"strategy": "group", "group_size": 128},
}


def tiny(kind: str, dtype: torch.dtype, **more: Any) -> Any:
    """A model of transformers, "Llama" or "Qwen3", with tied embeddings."""
    import transformers

    sizes = dict(vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=1, head_dim=32)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
    how = {"use_cache": False, "tie_word_embeddings": True, "attn_implementation": "eager", **more}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **heads, **how})
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()


def compress(model: nn.Module, folder: Path, strategy: str) -> dict[str, Tensor]:
    """Write a model of transformers, all Linears but its head in FP8; the tensors of the file. The model is
    then in FP8 itself, and its forward decompresses the weights."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from safetensors.torch import load_file, save_file

    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**fp8, **WEIGHTS[strategy], "dynamic": False},
        "input_activations": {**fp8, **INPUTS[strategy], "dynamic": True},
    }
    config = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "format": "float-quantized"}
    quantization = QuantizationConfig.model_validate(config)
    apply_quantization_config(model, quantization)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            scale = _scale(module.weight, strategy).to(module.weight_scale.dtype)
            module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    compressor = ModelCompressor(quantization_config=quantization)
    compressor.compress_model(model)
    tied = getattr(model.config, "tie_word_embeddings", False)
    state = {k: x.contiguous() for k, x in model.state_dict().items() if not (tied and "lm_head" in k)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    compressor.update_config(str(folder))
    return load_file(folder / "model.safetensors")


def _scale(weight: Tensor, strategy: str) -> Tensor:
    """The largest magnitude that shares a scale, over 448."""
    rows, columns = weight.shape
    height, width = {"tensor": (rows, columns), "channel": (1, columns), "block": (128, 128)}[strategy]
    high, wide = -(-rows // height), -(-columns // width)
    padded = torch.zeros(high * height, wide * width, dtype=weight.dtype)
    padded[:rows, :columns] = weight.detach()
    return padded.reshape(high, height, wide, width).abs().amax((1, 3)) / 448
