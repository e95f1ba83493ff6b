"""The cases, by name. Each case has a file; `base` defines what a case is."""

from __future__ import annotations

from . import dit, ffn, gpt2, llama_layers, llama_models, loss, moe, qwen3
from .base import Case

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        ffn.HALF,
        ffn.FULL,
        gpt2.GPT2,
        llama_layers.LAYERS,
        llama_models.LLAMA_1B,
        llama_models.LLAMA_3B,
        qwen3.QWEN3_LORA,
        dit.DIT,
        loss.LOSS,
        moe.MOE,
    )
}
