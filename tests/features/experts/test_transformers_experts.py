"""Mixtures of experts of the transformers library, tiny: what becomes FP8, and that they train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import fp8compile
from tests.support.harness import ALL_FP8, Pair, interpreted
from tests.support.models import Experts
from tests.support.operands import ends
from tests.support.reference_settings import RECIPES

transformers = pytest.importorskip("transformers")

BF16 = torch.bfloat16
COMMON = dict(
    hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=128
)
FEW = dict(num_experts_per_tok=2)
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": dict(FEW, intermediate_size=256, moe_intermediate_size=128, num_experts=8, head_dim=32),
    "Mixtral": dict(FEW, intermediate_size=128, num_local_experts=4),
    "GptOss": dict(FEW, intermediate_size=128, num_local_experts=4, head_dim=32),  # with biases, [E, in, out]
    "Olmoe": dict(FEW, intermediate_size=128, num_experts=4),
    "GraniteMoe": dict(FEW, intermediate_size=128, num_local_experts=4),
    "DeepseekV3": dict(
        FEW,
        intermediate_size=256,
        moe_intermediate_size=128,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=0,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        qk_nope_head_dim=16,
    ),
}


def make(name: str, dtype: torch.dtype = BF16, layers: int = 1) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **MODELS[name], "num_hidden_layers": layers})
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)  # type: ignore[no-any-return]


def experts_of(model: torch.nn.Module) -> Mapping[tuple[str, str], str]:
    found = {}
    for record in fp8compile.report(model).matmuls:
        if record.groups:
            found[record.parameter, record.gemm] = record.decision
    return found


def step(model: torch.nn.Module, call: Any, seed: int = 0) -> float:
    ids = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(seed))
    loss = call(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss)


@pytest.mark.weekly
@pytest.mark.parametrize("name", MODELS)
def test_each_layer_has_six_matmuls_in_fp8_and_learns(name: str) -> None:
    model = make(name)
    keys = list(model.state_dict())
    call = torch.compile(model, backend="fp8", options={"policy": "moe"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with interpreted():
        for _ in range(6):
            losses.append(step(model, call))
            optimizer.step()
            optimizer.zero_grad()
    decisions = experts_of(model)
    assert len(decisions) == 6 and set(decisions.values()) == {"fp8"}
    assert losses[-1] < losses[0] - 0.5
    assert list(model.state_dict()) == keys


def kept(model: torch.nn.Module) -> set[str]:
    """The gemms of experts in high precision."""
    return {gemm for (_, gemm), decision in experts_of(model).items() if decision != "fp8"}


class Float32(torch.nn.Module):
    """Gated experts in float32 by transformers' own operator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = Experts(128, 128, 6)

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        multiply = torch.ops.transformers.grouped_mm_fallback
        gate, value = multiply(x, self.experts.gate_up_proj.transpose(-2, -1), offs).chunk(2, -1)
        return multiply(
            torch.nn.functional.silu(gate) * value, self.experts.down_proj.transpose(-2, -1), offs
        )


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
    assert kept(pair.model) == ({"wgrad"} if recipe == "rowwise_with_gw_hp" else set())
    assert "would multiply in float32" in str(fp8compile.report(pair.model))
