"""Tiny models, tokens and a tokenizer for hosts, made from configurations: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import fp8compile

# what callbacks log with each step
STATE = {"fp8/share", "fp8/matmuls", *(f"fp8/{role}/amax" for role in ("input", "weight", "gradient"))}


def llama(layers: int = 1) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


def linears(layers: int = 1) -> set[str]:
    """The names of the linears of `llama` that FP8 multiplies."""
    parts = [f"self_attn.{name}" for name in "qkvo"] + [f"mlp.{name}" for name in ("gate", "up", "down")]
    return {f"model.layers.{i}.{part}_proj" for i in range(layers) for part in parts}


def tokens(step: int = 0, count: int = 2) -> torch.Tensor:
    return torch.randint(0, 256, (count, 64), generator=torch.Generator().manual_seed(step))


def examples(count: int = 8) -> list[dict[str, Any]]:
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in tokens(count=count)]


def tokenizer() -> Any:
    """Of 256 words, without rules."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(i): i for i in range(256)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", pad_token="1", eos_token="2")


def training_arguments(folder: Path, **more: Any) -> dict[str, Any]:
    """Of Trainer and TRL: two steps on the CPU, each logged and saved."""
    often = {"max_steps": 2, "logging_steps": 1, "save_steps": 1, "save_strategy": "steps"}
    often |= {"per_device_train_batch_size": 2}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "output_dir": str(folder)}
    return {**often, **quiet, **more}


def logged(trainer: Any) -> list[dict[str, Any]]:
    """The logs of Trainer with a loss, after a trip through JSON that allows only its own numbers."""
    rows = json.loads(json.dumps(trainer.state.log_history, allow_nan=False))
    return [row for row in rows if "loss" in row]


def saved(checkpoint: Path) -> list[str]:
    """The names of the tensors that a checkpoint of transformers has, sorted."""
    from safetensors.torch import load_file

    return sorted(load_file(checkpoint / "model.safetensors"))


def in_fp8(model: Any) -> set[str]:
    """The modules that have a matmul in FP8."""
    return {record.fqn for record in fp8compile.report(model).matmuls if record.decision == "fp8"}


def vanilla(model: Any, folder: Path) -> list[str]:
    """The names that the same model has when it is saved by itself."""
    model.save_pretrained(folder)
    return saved(folder)
