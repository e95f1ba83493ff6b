"""Mixtures of experts of the transformers library, tiny: what becomes FP8, and that they train."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8compile
from tests.support.harness import ALL_FP8, Pair, interpreted
from tests.support.models import Experts
from tests.support.operands import ends
from tests.support.reference_settings import RECIPES

transformers = pytest.importorskip("transformers")

COMMON = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=128)
LATENT = dict(kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16, v_head_dim=32, qk_nope_head_dim=16)
FEW = dict(num_experts_per_tok=2)
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": dict(FEW, intermediate_size=256, moe_intermediate_size=128, num_experts=8, head_dim=32),
    "Mixtral": dict(FEW, intermediate_size=128, num_local_experts=4),
    "GptOss": dict(FEW, intermediate_size=128, num_local_experts=4, head_dim=32),  # with biases, [E, in, out]
    "Olmoe": dict(FEW, intermediate_size=128, num_experts=4),
    "GraniteMoe": dict(FEW, intermediate_size=128, num_local_experts=4),
    "DeepseekV3": dict(
        **FEW,
        **LATENT,
        **dict(intermediate_size=256, moe_intermediate_size=128, n_routed_experts=8),
        **dict(n_group=2, topk_group=1, first_k_dense_replace=0),
    ),
}


def experts_of(model: torch.nn.Module) -> dict[tuple[str, str], str]:
    records = fp8compile.report(model).matmuls
    return {(record.parameter, record.gemm): record.decision for record in records if record.groups}


@pytest.mark.weekly
@pytest.mark.parametrize("name", MODELS)
def test_each_layer_has_six_matmuls_in_fp8_and_learns(name: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(num_hidden_layers=1, **COMMON, **MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)
    ids = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(0))
    keys = list(model.state_dict())
    call = torch.compile(model, backend="fp8", options={"policy": "moe"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with interpreted():
        for _ in range(6):
            loss = call(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(float(loss))
            optimizer.step()
            optimizer.zero_grad()
    decisions = experts_of(model)
    assert len(decisions) == 6 and set(decisions.values()) == {"fp8"}
    assert losses[-1] < losses[0] - 0.5
    assert list(model.state_dict()) == keys


class Float32(torch.nn.Module):
    """Gated experts in float32 by transformers' own operator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = Experts(128, 128, 6)

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        multiply = torch.ops.transformers.grouped_mm_fallback
        gate, value = multiply(x, self.experts.gate_up_proj.transpose(-2, -1), offs).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * value
        return multiply(hidden, self.experts.down_proj.transpose(-2, -1), offs)


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "recipe",
    [
        x if x in ("delayed", "rowwise_with_gw_hp") else pytest.param(x, marks=pytest.mark.slow)
        for x in RECIPES
    ],
)
def test_float32_experts_are_those_of_an_eager_loop(recipe: str) -> None:
    """Steps of changing routes: outputs, gradients, state. What stays in high precision stays that loop."""
    from transformers.integrations import moe  # noqa: F401  # registers the operator

    pair = Pair(Float32(), recipe, policy=ALL_FP8)
    for number in range(5):
        generator = torch.Generator().manual_seed(number)
        sizes = [[0, 1, 15, 16, 17, 257][i] for i in torch.randperm(6, generator=generator)]
        x, dy = (torch.randn(306, 128, generator=generator) for _ in range(2))
        pair.step(x, ends(sizes), grad=dy)
        assert not pair.model.experts.gate_up_proj.grad[sizes.index(0)].any()
    kept = {gemm for (_, gemm), decision in experts_of(pair.model).items() if decision != "fp8"}
    assert kept == ({"wgrad"} if recipe == "rowwise_with_gw_hp" else set())
    assert "would multiply in float32" in str(fp8compile.report(pair.model))
